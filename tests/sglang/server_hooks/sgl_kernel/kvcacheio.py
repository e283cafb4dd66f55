"""See the package."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from sgl_kernel import _op


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)
    return _op(name)
