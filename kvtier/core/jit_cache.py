"""What numba raises for a cache of compiled code that cannot be kept or read. Importing this needs
numba. Any thread."""

from __future__ import annotations

from typing import Final

from numba.core import caching

__all__ = ["CACHE_ERRORS"]

#: Where no folder can hold it, and for one that a power cut has torn (the last as numba's module
#: knows it: nothing else here has to do with such files).
CACHE_ERRORS: Final[tuple[type[Exception], ...]] = (
    RuntimeError,
    OSError,
    EOFError,
    ValueError,
    KeyError,
    IndexError,
    getattr(getattr(caching, "pickle", None), "UnpicklingError", EOFError),
)
