"""What the compiled inner loops share: how they are compiled, the mix, the place of a key.

Importing this needs numba. Its functions are for compiled code. `shape` is MappedTable.shape.
Places and addresses are int64, words uint64: numba makes a float of a sum of the two.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from kvtier.packing.jit_numba import part
from kvtier.transfer.local.atomics import load_number, load_own
from kvtier.transfer.local.entry import BUSY, EMPTY, MIX_FACTORS, NAME_BITS, PLACE_FACTORS

__all__ = [
    "BUSY_WORD",
    "EMPTY_WORD",
    "FACTORS",
    "GIVEN",
    "HALF",
    "NAME",
    "ONE",
    "finish",
    "home",
    "mix_of",
    "opened",
    "opened_at",
]

GIVEN: Final = "Array(uint64, 1, 'C', readonly=True)"

EMPTY_WORD: Final = np.uint64(EMPTY)
BUSY_WORD: Final = np.uint64(BUSY)
ONE: Final = np.uint64(1)
_TWO: Final = np.uint64(2)
HALF: Final = np.uint64(32)
_LAST: Final = np.uint64(29)
NAME: Final = np.uint64(NAME_BITS)
FACTORS: Final = np.array(MIX_FACTORS, np.uint64)
_P1, _P2, _P3, _P4, _P5 = (np.uint64(factor) for factor in PLACE_FACTORS)


@part
def opened_at(shape: Any) -> Any:
    """Of the shape at an address of our own: (address of the file, of entry 0, entry mask, hash
    shift, hash seed, mix seed).
    """
    file, entries, mask = load_number(shape), load_number(shape + 8), load_number(shape + 16)
    return file, entries, mask, load_own(shape + 24), load_own(shape + 32), load_own(shape + 40)


@part
def opened(shape: Any) -> Any:
    return opened_at(np.int64(shape.ctypes.data))


@part
def finish(total: Any) -> Any:
    """entry.mix_many's last steps."""
    total ^= total >> HALF
    total *= FACTORS[15]
    total ^= total >> _LAST
    return total if total > BUSY_WORD else total + _TWO


@part
def mix_of(row: Any, seed: Any) -> Any:
    """The mix of the row at an address of our own."""
    total = seed
    for word in range(15):
        term = load_own(row + 8 * word) * FACTORS[word]
        total += term ^ (term >> HALF)
    return finish(total)


@part
def home(table: Any, key: Any, name: Any) -> Any:
    """entry.place_many of the four words at an address of our own."""
    mixed = load_own(key) + load_own(key + 8) * _P1
    mixed += load_own(key + 16) * _P2
    mixed += load_own(key + 24) * _P3
    mixed += name * _P4 + table[4]
    return np.int64(((mixed ^ (mixed >> HALF)) * _P5) >> table[3])
