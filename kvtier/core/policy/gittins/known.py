"""Blocks that are remembered, cached or not: found by a 64-bit word, in an open-addressing table.

The word comes from the page's key, which is a hash of everything before it. Two keys with one word
would be taken for one page by the forecast, which costs at most a hit.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.core.jit import compiled
from kvtier.core.policy.gittins.layout import (
    BLOCK_FREE,
    BLOCK_NEXT,
    DEPTH,
    KIDS,
    KNOWN,
    NONE,
    OWNER,
    PARENT,
    State,
)

__all__ = ["depths", "find", "forget_block", "insert", "path_to", "rehash"]

_MIX: Final = np.uint64(0x9E3779B97F4A7C15)
_SHIFT: Final = np.uint64(32)


@compiled
def _home(word: np.uint64, mask: int) -> int:
    mixed = word * _MIX
    mixed ^= mixed >> _SHIFT
    return int(np.int64(mixed & np.uint64(mask)))


@compiled
def find(table: npt.NDArray[np.int32], words: npt.NDArray[np.uint64], word: np.uint64) -> int:
    """The block known by this word, or NONE. `table`, `words`: of a State."""
    mask = len(table) - 1
    at = _home(word, mask)
    while True:
        entry = table[at]
        if entry == 0:
            return NONE
        if words[entry - 1] == word:
            found: int = entry - 1
            return found
        at = (at + 1) & mask


@compiled
def _place(state: State, block: int) -> None:
    mask = len(state.table) - 1
    at = _home(state.word[block], mask)
    while state.table[at] != 0:
        at = (at + 1) & mask
    state.table[at] = block + 1


@compiled
def insert(state: State, word: np.uint64, parent: int, owner: int) -> int:
    """A block that is not known yet; there must be room for it."""
    block: int = state.counts[BLOCK_FREE]
    state.counts[BLOCK_FREE] = state.block[block, BLOCK_NEXT]
    state.counts[KNOWN] += 1
    state.word[block] = word
    state.block[block, PARENT] = parent
    state.block[block, OWNER] = owner
    state.block[block, KIDS] = 0
    state.block[block, DEPTH] = 0 if parent == NONE else state.block[parent, DEPTH] + 1
    _place(state, block)
    return block


@compiled
def forget_block(state: State, block: int) -> None:
    """The entries after it close its place in the table (algorithm R of D. E. Knuth, "The Art of
    Computer Programming" 3, section 6.4)."""
    table, words, mask = state.table, state.word, len(state.table) - 1
    at = _home(words[block], mask)
    while table[at] != block + 1:
        at = (at + 1) & mask
    hole = at
    while True:
        at = (at + 1) & mask
        entry = table[at]
        if entry == 0:
            break
        home = _home(words[entry - 1], mask)
        if ((at - home) & mask) >= ((at - hole) & mask):
            table[hole] = entry
            hole = at
    table[hole] = 0
    state.block[block, OWNER] = NONE
    state.block[block, BLOCK_NEXT] = state.counts[BLOCK_FREE]
    state.counts[BLOCK_FREE] = block
    state.counts[KNOWN] -= 1


@compiled
def rehash(state: State) -> None:
    """Fills a table that was made anew."""
    for block in range(len(state.word)):
        if state.block[block, OWNER] != NONE:
            _place(state, block)


@compiled
def path_to(state: State, block: int) -> npt.NDArray[np.uint64]:
    """The words of the blocks up to this one, from the first; none for NONE."""
    n = 0 if block == NONE else state.block[block, DEPTH] + 1
    words = np.empty(n, np.uint64)
    for at in range(n - 1, -1, -1):
        words[at] = state.word[block]
        block = state.block[block, PARENT]
    return words


@compiled
def depths(state: State, words: npt.NDArray[np.uint64]) -> npt.NDArray[np.int32]:
    """The position of each of these known blocks in its path."""
    found = np.empty(len(words), np.int32)
    for i in range(len(words)):
        found[i] = state.block[find(state.table, state.word, words[i]), DEPTH]
    return found
