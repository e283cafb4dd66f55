"""Functions as machine code, by numba, and what becomes of that between processes.

What is compiled lies in numba's cache, beside the module or in the user's cache folder. Where no
folder can hold it, it is compiled by each process; what a power cut has torn is compiled again, and
mended. The cache of a function notices a change of its own module alone.

Importing this needs numba (extra `fast`). Any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar, cast

import numba
from numba.core import caching

__all__ = ["compiled", "compiled_for"]

F = TypeVar("F", bound=Callable[..., object])

#: Where no folder can hold a cache, and for one that a power cut has torn (the last as numba's
#: module knows it: nothing else here has to do with such files).
_CACHE_ERRORS: Final[tuple[type[Exception], ...]] = (
    RuntimeError,
    OSError,
    EOFError,
    ValueError,
    KeyError,
    IndexError,
    getattr(getattr(caching, "pickle", None), "UnpicklingError", EOFError),
)
# numba's own types describe decorated functions as Python calls them, without their caches.
_njit: Any = numba.njit


def compiled(function: F) -> F:
    """By its first call, for the types of its arguments, which it trusts: for kernels that are
    many, where nothing has a deadline."""
    return cast("F", _kept(function, {}))


def compiled_for(
    signatures: Sequence[str], options: Mapping[str, Any]
) -> Callable[[Callable[..., Any]], Any]:
    """Now, for these types and no others; `options` are numba's. Raises numba's NumbaError."""

    def compile_now(function: Callable[..., Any]) -> Any:
        made = _kept(function, options)
        for signature in signatures:
            made.compile(signature)
        made.disable_compile()
        return made

    return compile_now


def _kept(function: Callable[..., object], options: Mapping[str, Any]) -> Any:
    """The function with a cache, if there is a folder for one."""
    try:
        made = _njit(cache=True, **options)(function)
    except _CACHE_ERRORS:
        return _njit(**options)(function)
    cache = getattr(made, "_cache", None)  # absent where the compiler is turned off
    if cache is not None:
        _forgive(cache)
    return made


def _forgive(cache: Any) -> None:
    """What it cannot read is thrown away, and what it cannot write is done without."""
    load, save = cache.load_overload, cache.save_overload

    def load_or_flush(*given: Any) -> Any:
        try:
            return load(*given)
        except _CACHE_ERRORS:
            _tried(cache.flush)
            return None

    def save_or_not(*given: Any) -> None:
        _tried(save, *given)

    cache.load_overload, cache.save_overload = load_or_flush, save_or_not


def _tried(call: Callable[..., object], *given: Any) -> None:
    try:
        call(*given)
    except _CACHE_ERRORS:
        return
