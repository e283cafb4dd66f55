"""In place of SGLang's kernels for the CPU, which its package index does not offer: everything can
be imported, and nothing called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

__version__ = "0.4.10"


def _op(name: str) -> Callable[..., NoReturn]:
    def op(*args: object, **options: object) -> NoReturn:
        raise NotImplementedError(f"{name} is not there in tests")

    op.__name__ = name
    return op


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)
    return _op(name)
