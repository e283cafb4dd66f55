"""A reader's inner loops, compiled: probe, recheck, namespace, copy.

Promise: as kvtier/transfer/local/vectors.py, bit for bit. All loads of shared words are atomic with
acquire order, so that they are done, once each, in the order that the protocol of entry.py needs.
No address outside of the mapped file is formed from what the file holds: places are masked, and
their number is of the checked header.

Importing this compiles it (seconds) or takes what an earlier process left in numba's cache beside
this file or in the user's cache folder. No function needs the interpreter lock or holds state, any
number of threads may call them, and all trust their arguments: compiled.py gives them.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from kvtier.core.page import Codec
from kvtier.packing.jit_numba import compiled, part
from kvtier.transfer.local.atomics import (
    fence_acquire,
    load_acquire,
    load_code,
    load_number,
    load_own,
    prefetch,
    store_code,
    store_number,
    store_own,
)
from kvtier.transfer.local.compiling import (
    EMPTY_WORD,
    FACTORS,
    GIVEN,
    HALF,
    NAME,
    ONE,
    finish,
    home,
    opened,
)
from kvtier.transfer.local.entry import HOST_WITH_SUMS, LENGTH_BYTES_MAX, SLOT_BYTES
from kvtier.transfer.local.header import (
    NAMESPACE_FACTOR,
    NAMESPACE_PROBES,
    NAMESPACES_WORD,
    OPEN_WORD,
    SHIFTS_WORD,
)
from kvtier.transfer.local.protocol import (
    DOUBT,
    HIT,
    MISS,
    PROBES_MAX,
    READS_MAX,
    ROUNDS_MAX,
)

__all__ = ["namespace", "probe", "readable", "recheck"]

_NUMBER: Final = np.uint64(NAMESPACE_FACTOR)
_LOW: Final = np.uint64(0xFFFFFFFF)
#: Keys whose entries are fetched together, while those before them are looked at.
_CHUNK: Final = 32
_TIER: Final = np.uint64(48)
_TIER_BITS: Final = np.uint64(0xFF)
_WITH_SUMS: Final = np.uint64(HOST_WITH_SUMS)
_LENGTH: Final = np.uint64(LENGTH_BYTES_MAX)
_LOSSY_BIT: Final = np.uint64(1 << 8)
_RAW: Final = np.uint64(Codec.RAW)
_SLOT: Final = np.int64(SLOT_BYTES)
#: What a look at one place comes to: the run ends here, the entry is here, it is of another page,
#: it is being written and may be anything.
_END: Final = 0
_HERE: Final = 1
_ONWARD: Final = 2
_UNSETTLED: Final = 3


@part
def _take(address: Any, row: Any, seed: Any) -> Any:
    """Copies an entry to the address `row`; whether the copy is an entry that somebody wrote."""
    total = seed
    for word in range(15):
        value = load_acquire(address + 8 * word)
        store_own(row + 8 * word, value)
        term = value * FACTORS[word]
        total += term ^ (term >> HALF)
    # Last: what came before it has not changed up to here. No mix is BUSY or EMPTY.
    mix = load_acquire(address + 120)
    store_own(row + 120, mix)
    return mix == finish(total)


@part
def _is_named(row: Any, key: Any, name: Any) -> Any:
    differs = load_own(row) ^ load_own(key)
    differs |= load_own(row + 8) ^ load_own(key + 8)
    differs |= load_own(row + 16) ^ load_own(key + 16)
    differs |= load_own(row + 24) ^ load_own(key + 24)
    return differs | ((load_own(row + 32) ^ name) & NAME) == EMPTY_WORD


@part
def _look(table: Any, key: Any, name: Any, place: Any, row: Any) -> Any:
    """(_END, _HERE, _ONWARD or _UNSETTLED, torn reads) for one key at one place."""
    address = table[1] + place * 128
    torn = 0
    for _ in range(READS_MAX):
        # Most entries that are not the wanted one cost one cache line, the first.
        if load_acquire(address) != load_own(key) and load_acquire(address + 32) != EMPTY_WORD:
            return _ONWARD, torn
        if _take(address, row, table[5]):
            return _HERE if _is_named(row, key, name) else _ONWARD, torn
        if load_own(row + 120) == EMPTY_WORD:
            return _END, torn
        torn += 1
    return _UNSETTLED, torn


@part
def _fetch(table: Any, keys: Any, name: Any, places: Any, i: Any) -> Any:
    place = home(table, keys + 32 * i, name)
    store_number(places + 8 * i, place)
    prefetch(table[1] + place * 128)
    prefetch(table[1] + place * 128 + 64)


@part
def _search(table: Any, keys: Any, name: Any, out: Any, pending: Any, span: Any) -> Any:
    """Looks for the span[0] keys whose numbers are pending, from their places on; the torn reads.

    Place after place for all of them, so that the waits for memory overlap, with each other and
    with fetching what the keys one chunk later, below span[1], will need.
    """
    rows, which, places, found = out
    count, ahead = span
    torn = 0
    for _ in range(PROBES_MAX):
        left = 0
        for j in range(count):
            i = load_number(pending + 8 * j)
            if i + _CHUNK < ahead:
                _fetch(table, keys, name, places, i + _CHUNK)
            place = load_number(places + 8 * i)
            outcome, reads = _look(table, keys + 32 * i, name, place, rows + 128 * (i & which))
            torn += reads
            if outcome == _HERE:
                store_code(found + i, HIT)
            elif outcome != _END:
                if outcome == _UNSETTLED:
                    store_code(found + i, DOUBT)
                place = (place + 1) & table[2]
                prefetch(table[1] + place * 128)
                store_number(places + 8 * i, place)
                store_number(pending + 8 * left, i)
                left += 1
        count = left
        ahead = 0
        if count == 0:
            break
    return torn


@part
def _settle(table: Any, keys: Any, name: Any, out: Any, pending: Any, span: Any) -> Any:
    """Looks again for what keys span[0] to span[1] missed, while entries are being moved.

    `span[2]` is the count of moves before the first look. The torn reads; what could not be
    settled is DOUBT.
    """
    places, found = out[2], out[3]
    start, stop, shifts = span
    torn = 0
    for _ in range(ROUNDS_MAX):
        fence_acquire()
        now = load_acquire(table[0] + 8 * SHIFTS_WORD)
        if now == shifts and now & ONE == EMPTY_WORD:
            return torn
        shifts = now
        count = 0
        for i in range(start, stop):
            if load_code(found + i) != HIT:
                store_code(found + i, MISS)
                store_number(places + 8 * i, home(table, keys + 32 * i, name))
                store_number(pending + 8 * count, i)
                count += 1
        torn += _search(table, keys, name, out, pending, (count, 0))
        if count == 0:
            return torn
    for i in range(start, stop):
        if load_code(found + i) == MISS:
            store_code(found + i, DOUBT)
    return torn


@compiled(
    f"UniTuple(int64, 2)({GIVEN}, {GIVEN}, uint64, uint64[::1], int64[::1], uint8[::1], uint8[::1])"
)
def probe(shape: Any, words: Any, name: Any, rows: Any, places: Any, found: Any, tiers: Any) -> Any:
    """Fills rows (16 n), places, found and tiers (n) for keys (4 n); (torn reads, doubts).

    Without room in `rows` for all entries they are copied, and checked, in passing.
    """
    table = opened(shape)
    keys, count = np.int64(words.ctypes.data), len(found)
    is_kept = len(rows) >= 16 * count
    room = np.empty(_CHUNK * (1 if is_kept else 17), np.int64)
    pending = np.int64(room.ctypes.data)
    kept = np.int64(rows.ctypes.data) if is_kept else pending + 8 * _CHUNK
    which = -1 if is_kept else _CHUNK - 1
    out = (kept, which, np.int64(places.ctypes.data), np.int64(found.ctypes.data))
    torn = doubts = 0
    is_open = load_acquire(table[0] + 8 * OPEN_WORD) == ONE
    for i in range(min(_CHUNK, count)):
        _fetch(table, keys, name, out[2], i)
    for start in range(0, count, _CHUNK):
        stop = min(start + _CHUNK, count)
        shifts = load_acquire(table[0] + 8 * SHIFTS_WORD)
        for i in range(start, stop):
            room[i - start] = i
            found[i] = MISS
        if is_open:
            torn += _search(table, keys, name, out, pending, (stop - start, count))
            torn += _settle(table, keys, name, out, pending, (start, stop, shifts))
        for i in range(start, stop):
            row = kept + 128 * (i & which)
            if found[i] != HIT:
                doubts += found[i] == DOUBT
                for word in range(16):
                    store_own(row + 8 * word, EMPTY_WORD)
            tiers[i] = (load_own(row + 32) >> _TIER) & _TIER_BITS
    return torn, doubts


@compiled(
    f"int64({GIVEN}, Array(uint8, 1, 'C', readonly=True), int64, int64, boolean,"
    " int64[::1], int64[::1], uint8[::1])"
)
def readable(
    words: Any,
    found: Any,
    arena_bytes: Any,
    length: Any,
    lossy_ok: Any,
    rows: Any,
    offsets: Any,
    others: Any,
) -> Any:
    """Fills rows and offsets (up to n) and others (n), see Readable; how many can be read."""
    count = 0
    # The header takes a unit of its own, before the payload.
    free = arena_bytes // _SLOT - 1 - (length + _SLOT - 1) // _SLOT
    for i in range(len(found)):
        others[i] = found[i]
        if found[i] != HIT:
            continue
        others[i] = DOUBT
        packed = words[16 * i + 7]
        is_ours = words[16 * i + 4] >> _TIER == _WITH_SUMS
        is_ours &= np.int64(packed & _LENGTH) == length
        kind = packed >> _TIER
        is_ours &= kind == _RAW or (lossy_ok and kind == _RAW | _LOSSY_BIT)
        slot = words[16 * i + 6]
        # A slot may be any 64 bits: compared before it is counted with.
        if is_ours and free >= 0 and slot <= np.uint64(free):
            others[i] = HIT
            rows[count] = i
            offsets[count] = (np.int64(slot) + 1) * _SLOT
            count += 1
    return count


@part
def _is_same(address: Any, row: Any) -> Any:
    # Mix last: the words before it were still these when it was.
    same = True
    for word in range(16):
        same &= load_acquire(address + 8 * word) == load_own(row + 8 * word)
    return same


@part
def _is_there(table: Any, row: Any) -> Any:
    """Whether the entry has moved to another place, whole as it was."""
    for _ in range(ROUNDS_MAX):
        fence_acquire()
        shifts = load_acquire(table[0] + 8 * SHIFTS_WORD)
        place = home(table, row, load_own(row + 32) & NAME)
        for _probe in range(PROBES_MAX):
            address = table[1] + place * 128
            mix = load_acquire(address + 120)
            if mix == EMPTY_WORD:
                break
            if mix == load_own(row + 120) and _is_same(address, row):
                return True
            place = (place + 1) & table[2]
        fence_acquire()
        now = load_acquire(table[0] + 8 * SHIFTS_WORD)
        if now == shifts and now & ONE == EMPTY_WORD:
            return False
    return False


@compiled(f"void({GIVEN}, {GIVEN}, Array(int64, 1, 'C', readonly=True), uint8[::1])")
def recheck(shape: Any, words: Any, places: Any, same: Any) -> Any:
    """Clears same (n) where the rows (16 n) are no longer in the table, exactly so."""
    table = opened(shape)
    rows = np.int64(words.ctypes.data)
    # What the caller copied out of the arena was loaded before what is loaded here.
    fence_acquire()
    is_open = load_acquire(table[0] + 8 * OPEN_WORD) == ONE
    for i in range(len(same)):
        if same[i]:
            row = rows + 128 * i
            address = table[1] + (places[i] & table[2]) * 128
            same[i] = is_open and (_is_same(address, row) or _is_there(table, row))


@compiled(f"uint64({GIVEN}, uint64)")
def namespace(shape: Any, number: Any) -> Any:
    """The word of a namespace number; 0 if it is not current, or the directory is closed."""
    fence_acquire()
    file = np.int64(shape[0])
    if load_acquire(file + 8 * OPEN_WORD) != ONE:
        return EMPTY_WORD
    words = np.int64(shape[6])
    place = np.int64((number * _NUMBER) & _LOW) // ((1 << 32) // words)
    for step in range(NAMESPACE_PROBES):
        at = NAMESPACES_WORD + ((place + step) & (words - 1))
        word = load_acquire(file + 8 * at)
        if word >> HALF == number:
            return word
    return EMPTY_WORD
