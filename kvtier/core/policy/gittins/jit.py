"""How the kernels of this package are compiled: by their first call, as they are many and a replay
has no deadline. What is compiled lies in numba's cache; where no folder can hold it, or a power cut
has torn it, it is compiled again. Importing this needs numba (extra `fast`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

from kvtier.core.jit_cache import CACHE_ERRORS

__all__ = ["compiled"]

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """The function as machine code, kept in numba's cache; it trusts its arguments."""
    try:
        made = numba.njit(cache=True)(function)
    except CACHE_ERRORS:
        return cast("F", numba.njit(function))
    kept = getattr(made, "_cache", None)  # absent where the compiler is turned off
    if kept is not None:
        _forgive(kept)
    return cast("F", made)


def _forgive(kept: Any) -> None:
    """What a cache cannot read is thrown away, and what it cannot write is done without."""
    load, save = kept.load_overload, kept.save_overload

    def load_or_flush(*given: Any) -> Any:
        try:
            return load(*given)
        except CACHE_ERRORS:
            _tried(kept.flush)
            return None

    def save_or_not(*given: Any) -> None:
        _tried(save, *given)

    kept.load_overload, kept.save_overload = load_or_flush, save_or_not


def _tried(call: Callable[..., object], *given: Any) -> None:
    try:
        call(*given)
    except CACHE_ERRORS:
        return
