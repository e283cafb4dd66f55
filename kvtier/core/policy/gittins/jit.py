"""How the kernels of this package are compiled. Importing this needs numba (extra `fast`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

__all__ = ["compiled"]

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """The function as machine code, kept in numba's cache; it trusts its arguments."""
    return cast("F", numba.njit(cache=True)(function))
