"""Modules with compiled code, which everything can do without.

Whatever goes wrong when one is loaded (numba is absent, does not fit this Python, is set up in a
way that cannot work, or meets files that something has damaged) is a reason to do without it, and
one kind of error to those who ask. Any thread.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

__all__ = ["load_optional"]


def load_optional(name: str) -> ModuleType:
    """The module, whose import compiles it. Raises ImportError, and nothing else."""
    try:
        return import_module(name)
    except ImportError:
        raise
    except Exception as error:
        raise ImportError(f"{name} cannot be used: {type(error).__name__}: {error}") from error
