"""The owner's inner loops, compiled: write, remove, empty, store.

Promise: as kvtier/transfer/local/vectors.py, bit for bit. An entry is marked as being written
before any of its words changes, and its mix is stored last; all stores are atomic with release
order. What the owner reads nobody else writes, so its loads are plain ones.

See kernels.py for importing. For one thread at a time.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from kvtier.packing.jit_numba import compiled, part
from kvtier.transfer.local.atomics import (
    fence_release,
    load_acquire,
    load_own,
    prefetch,
    store_own,
    store_release,
)
from kvtier.transfer.local.compiling import (
    BUSY_WORD,
    EMPTY_WORD,
    GIVEN,
    NAME,
    ONE,
    home,
    mix_of,
    opened,
)
from kvtier.transfer.local.header import SHIFTS_WORD
from kvtier.transfer.local.protocol import PROBES_MAX

__all__ = ["empty", "remove", "store", "write"]

#: Rows whose entries are fetched together.
_CHUNK: Final = 32
_STATE: Final = np.uint64(56)


@part
def _publish(address: Any, row: Any) -> Any:
    store_release(address + 120, BUSY_WORD)
    fence_release()
    for word in range(16):
        store_release(address + 8 * word, load_own(row + 8 * word))


@part
def _clear(address: Any) -> Any:
    store_release(address + 120, EMPTY_WORD)
    store_release(address + 32, EMPTY_WORD)


@part
def _is_named(entry: Any, row: Any) -> Any:
    return (
        load_own(entry) == load_own(row)
        and load_own(entry + 8) == load_own(row + 8)
        and load_own(entry + 16) == load_own(row + 16)
        and load_own(entry + 24) == load_own(row + 24)
        and load_own(entry + 32) & NAME == load_own(row + 32) & NAME
    )


@part
def _find(table: Any, row: Any) -> Any:
    """(place, steps): of the entry of this name or the empty one where it would go, -1: neither."""
    place = home(table, row, load_own(row + 32) & NAME)
    for step in range(PROBES_MAX):
        entry = table[1] + place * 128
        if load_own(entry + 32) == EMPTY_WORD or _is_named(entry, row):
            return place, step + 1
        place = (place + 1) & table[2]
    return -1, PROBES_MAX


@part
def _fetch(table: Any, rows: Any, count: Any) -> Any:
    for i in range(count):
        row = rows + 128 * i
        place = home(table, row, load_own(row + 32) & NAME)
        prefetch(table[1] + place * 128)
        prefetch(table[1] + place * 128 + 64)


@compiled(f"UniTuple(int64, 3)({GIVEN}, uint64[::1], uint8[::1], int64)")
def write(shape: Any, words: Any, placed: Any, room: Any) -> Any:
    """Writes rows (16 n), at most `room` new ones; (new, steps, most steps for one row)."""
    table = opened(shape)
    rows = np.int64(words.ctypes.data)
    new = steps = longest = 0
    for i in range(len(placed)):
        if i % _CHUNK == 0:
            _fetch(table, rows + 128 * i, min(_CHUNK, len(placed) - i))
        row = rows + 128 * i
        store_own(row + 120, mix_of(row, table[5]))
        place, took = _find(table, row)
        steps += took
        longest = max(longest, took)
        address = table[1] + place * 128
        is_new = place >= 0 and load_own(address + 32) == EMPTY_WORD
        # Readers take an entry without a state for an empty one.
        has_state = load_own(row + 32) >> _STATE != EMPTY_WORD
        placed[i] = place >= 0 and has_state and (not is_new or new < room)
        if placed[i]:
            new += is_new
            _publish(address, row)
    return new, steps, longest


@part
def _close_up(table: Any, hole: Any) -> Any:
    """Moves later entries of the run into the hole, so that no search ends too early; the steps."""
    shifts = table[0] + 8 * SHIFTS_WORD
    store_release(table[1] + hole * 128 + 120, BUSY_WORD)
    steps = 0
    moved = False
    place = (hole + 1) & table[2]
    entry = table[1] + place * 128
    while load_own(entry + 32) != EMPTY_WORD:
        steps += 1
        start = home(table, entry, load_own(entry + 32) & NAME)
        # It may fill the hole unless its home lies strictly after the hole, cyclically.
        if ((place - start) & table[2]) >= ((place - hole) & table[2]):
            if not moved:
                moved = True
                store_release(shifts, load_acquire(shifts) + ONE)
                fence_release()
            _publish(table[1] + hole * 128, entry)
            hole = place
        place = (place + 1) & table[2]
        entry = table[1] + place * 128
    _clear(table[1] + hole * 128)
    if moved:
        store_release(shifts, load_acquire(shifts) + ONE)
    return steps


@compiled(f"UniTuple(int64, 2)({GIVEN}, {GIVEN}, uint8[::1])")
def remove(shape: Any, words: Any, removed: Any) -> Any:
    """Removes the entries that rows (16 n, words 0-5) name; (removed, steps)."""
    table = opened(shape)
    rows = np.int64(words.ctypes.data)
    count = steps = 0
    for i in range(len(removed)):
        if i % _CHUNK == 0:
            _fetch(table, rows + 128 * i, min(_CHUNK, len(removed) - i))
        row = rows + 128 * i
        place, took = _find(table, row)
        steps += took
        entry = table[1] + place * 128
        generation = load_own(row + 40)
        removed[i] = (
            place >= 0
            and load_own(entry + 32) != EMPTY_WORD
            and (generation == EMPTY_WORD or load_own(entry + 40) == generation)
        )
        if removed[i]:
            count += 1
            steps += _close_up(table, place)
    return count, steps


@compiled(f"void({GIVEN})")
def empty(shape: Any) -> Any:
    """Empties every entry that is not."""
    table = opened(shape)
    for place in range(table[2] + 1):
        entry = table[1] + place * 128
        if load_own(entry + 32) != EMPTY_WORD:
            _clear(entry)


@compiled(f"void({GIVEN}, int64, uint64)")
def store(shape: Any, word: Any, value: Any) -> Any:
    """Sets a word of the header or the namespace words, by its index in the file."""
    store_release(np.int64(shape[0]) + 8 * word, value)
