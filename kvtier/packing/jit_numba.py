"""How functions are compiled by numba above core: for given types, when their module is imported,
because a first call has a deadline; without the interpreter lock, and with floating point as
written.

Importing this needs numba. What becomes of the compiled code is core/jit.py's. The cache of a
function notices a change of its own module alone, so what is compiled into a kernel should lie
beside it, or be compared with something else when it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numba
from llvmlite import ir
from numba.core import cgutils
from numba.core.errors import NumbaError
from numba.extending import intrinsic

from kvtier.core.jit import compiled_for

__all__ = ["compiled", "emit_prefetch", "instructions", "part"]

_OPTIONS: Final[dict[str, Any]] = {
    "nogil": True,
    "error_model": "numpy",
    "fastmath": False,
    "boundscheck": False,
}

if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
    raise ImportError("numba's compiler is turned off (NUMBA_DISABLE_JIT)")

# numba's own types describe these as the compiler calls them, and decorated functions as Python
# calls them, which parts are not.
_njit: Any = numba.njit
_intrinsic: Any = intrinsic
_insert: Any = cgutils.get_or_insert_function


def compiled(signatures: str | Sequence[str]) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function that Python calls. Raises ImportError where numba cannot."""
    given = [signatures] if isinstance(signatures, str) else list(signatures)

    def compile_now(function: Callable[..., Any]) -> Any:
        try:
            return compiled_for(given, _OPTIONS)(function)
        except NumbaError as error:
            raise ImportError(f"numba cannot compile {function.__name__}: {error}") from error

    return compile_now


def part(function: Callable[..., Any]) -> Any:
    """Becomes a part of the functions that call it."""
    return _njit(forceinline=True, **_OPTIONS)(function)


def instructions(function: Callable[..., Any]) -> Any:
    """What `function` writes in place of a call to it. Its first argument is numba's own."""
    return _intrinsic(function)


def emit_prefetch(builder: Any, address: Any) -> None:
    """Writes, into `instructions`, what begins to fetch the cache line of an address: any number of
    64 bits, as nothing is read.
    """
    byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
    fetch = _insert(builder.module, kind, "llvm.prefetch.p0")
    # For reading, to be kept in all levels, data.
    how = [ir.Constant(number, value) for value in (0, 3, 1)]
    builder.call(fetch, [builder.inttoptr(address, byte), *how])
