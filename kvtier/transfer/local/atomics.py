"""Loads, stores and fences for compiled code that the optimiser must neither drop nor merge.

A plain load of a word that was loaded before is deleted by LLVM, which may assume that no other
thread writes it; these are real atomic instructions. Addresses are int64 and must be multiples of
8: on the supported machines such an access is never cut in two.

Needs numba: imported by modules of compiled code alone.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from kvtier.packing.jit_numba import emit_prefetch, instructions

__all__ = [
    "fence_acquire",
    "fence_release",
    "load_acquire",
    "load_code",
    "load_number",
    "load_own",
    "prefetch",
    "store_code",
    "store_number",
    "store_own",
    "store_release",
]

_BYTE = ir.IntType(8)
_WORD = ir.IntType(64)


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _loader(kind: Any, width: Any, ordering: str = "") -> Any:
    """A function of an address; atomic with an `ordering`."""
    align = width.width // 8

    @instructions
    def load(typing: Any, address: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = _pointer(builder, args[0], width)
            if ordering:
                return builder.load_atomic(pointer, ordering, align)
            return builder.load(pointer, align=align)

        return kind(types.int64), emit

    return load


def _storer(kind: Any, width: Any, ordering: str = "") -> Any:
    """A function of an address and a value; atomic with an `ordering`."""
    align = width.width // 8

    @instructions
    def store(typing: Any, address: Any, value: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = _pointer(builder, args[0], width)
            if ordering:
                builder.store_atomic(args[1], pointer, ordering, align)
            else:
                builder.store(args[1], pointer, align=align)
            return context.get_dummy_value()

        return types.void(types.int64, kind), emit

    return store


#: The uint64 at an address; no later access is moved before it.
load_acquire = _loader(types.uint64, _WORD, "acquire")
#: Writes a uint64; no earlier access is moved behind it.
store_release = _storer(types.uint64, _WORD, "release")

# Plain accesses to what no other thread uses. Arrays are taken apart to addresses before the loops,
# because a function that takes an array counts its references, each time with an instruction that
# locks the bus.
load_own = _loader(types.uint64, _WORD)
store_own = _storer(types.uint64, _WORD)
load_number = _loader(types.int64, _WORD)
store_number = _storer(types.int64, _WORD)
load_code = _loader(types.uint8, _BYTE)
store_code = _storer(types.uint8, _BYTE)


def _fence(ordering: str) -> Any:
    @instructions
    def fence(typing: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.fence(ordering)
            return context.get_dummy_value()

        return types.void(), emit

    return fence


#: Loads before it are done before any access behind it.
fence_acquire = _fence("acquire")
#: Accesses before it are done before any store behind it.
fence_release = _fence("release")


@instructions
def prefetch(typing: Any, address: Any) -> Any:
    """Begins to fetch the cache line of `address`, which may be any number."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_prefetch(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), emit
