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
from kvtier.packing.checksum import KEY_WORD
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
    opened_at,
)
from kvtier.transfer.local.entry import HOST_WITH_SUMS, LENGTH_BYTES_MAX, SLOT_BYTES
from kvtier.transfer.local.header import (
    IN_USE_WORD,
    NAMESPACE_FACTOR,
    NAMESPACE_PROBES,
    NAMESPACES_WORD,
    OPEN_WORD,
    SHIFTS_WORD,
)
from kvtier.transfer.local.protocol import (
    DOUBT,
    HIT,
    IN_DOUBT,
    MADE_ANEW,
    MISS,
    NOT_CURRENT,
    PROBES_MAX,
    READS_MAX,
    ROUNDS_MAX,
    SETTLED,
)

__all__ = ["answer", "namespace", "probe", "readable", "recheck"]

_NUMBER: Final = np.uint64(NAMESPACE_FACTOR)
_LOW: Final = np.uint64(0xFFFFFFFF)
#: Keys whose entries are fetched together, while those before them are looked at.
_CHUNK: Final = 32
_TIER: Final = np.uint64(48)
_TIER_BITS: Final = np.uint64(0xFF)
_WITH_SUMS: Final = np.uint64(HOST_WITH_SUMS)
_LENGTH: Final = np.uint64(LENGTH_BYTES_MAX)
_LOSSY: Final = np.uint64(1 << 8)
#: The same in the whole word.
_LOSSY_BIT: Final = np.uint64(1 << 56)
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


@part
def _probe(table: Any, keys: Any, count: Any, name: Any, out: Any, is_exact: Any) -> Any:
    """Looks for keys and fills what `out` has: addresses of rows (16 n words, or 0), places (n
    words), found and tiers (n bytes). With `is_exact` a copy that was rounded is a MISS. (torn
    reads, doubts).
    """
    rows, places, found, tiers = out
    # Without rows the entries are copied, and checked, in passing.
    room = np.empty(_CHUNK * (17 if rows == 0 else 1), np.int64)
    pending = np.int64(room.ctypes.data)
    kept = rows if rows != 0 else pending + 8 * _CHUNK
    which = -1 if rows != 0 else _CHUNK - 1
    into = (kept, which, places, found)
    torn = doubts = 0
    is_open = load_acquire(table[0] + 8 * OPEN_WORD) == ONE
    for i in range(min(_CHUNK, count)):
        _fetch(table, keys, name, places, i)
    for start in range(0, count, _CHUNK):
        stop = min(start + _CHUNK, count)
        shifts = load_acquire(table[0] + 8 * SHIFTS_WORD)
        for i in range(start, stop):
            room[i - start] = i
            store_code(found + i, MISS)
        if is_open:
            torn += _search(table, keys, name, into, pending, (stop - start, count))
            torn += _settle(table, keys, name, into, pending, (start, stop, shifts))
        for i in range(start, stop):
            row = kept + 128 * (i & which)
            code = load_code(found + i)
            if code != HIT:
                doubts += code == DOUBT
                for word in range(16):
                    store_own(row + 8 * word, EMPTY_WORD)
            elif is_exact and load_own(row + 56) & _LOSSY_BIT != EMPTY_WORD:
                store_code(found + i, MISS)
            store_code(tiers + i, (load_own(row + 32) >> _TIER) & _TIER_BITS)
    return torn, doubts


@compiled(
    f"UniTuple(int64, 2)({GIVEN}, {GIVEN}, uint64, boolean,"
    " Tuple((uint64[::1], int64[::1], uint8[::1], uint8[::1])))"
)
def probe(shape: Any, words: Any, name: Any, is_exact: Any, into: Any) -> Any:
    """Fills `into`, rows (16 n, or none), places, found and tiers (n), for keys (4 n); see
    _probe.
    """
    rows, places, found, tiers = into
    count = len(found)
    kept = rows.ctypes.data if len(rows) >= 16 * count else 0
    out = (np.int64(kept), places.ctypes.data, found.ctypes.data, tiers.ctypes.data)
    return _probe(opened(shape), words.ctypes.data, count, name, out, is_exact)


@part
def _namespace(file: Any, words: Any, number: Any) -> Any:
    """The word of a namespace number; 0 if it is not current, or the directory is closed."""
    fence_acquire()
    if load_acquire(file + 8 * OPEN_WORD) != ONE:
        return EMPTY_WORD
    place = np.int64((number * _NUMBER) & _LOW) // ((1 << 32) // words)
    for step in range(NAMESPACE_PROBES):
        at = NAMESPACES_WORD + ((place + step) & (words - 1))
        word = load_acquire(file + 8 * at)
        if word >> HALF == number:
            return word
    return EMPTY_WORD


@compiled(f"uint64({GIVEN}, uint64)")
def namespace(shape: Any, number: Any) -> Any:
    """See _namespace."""
    return _namespace(np.int64(shape[0]), np.int64(shape[6]), number)


@compiled("int64(int64, int64, int64, uint64, uint64, boolean)")
def answer(shape: Any, keys: Any, count: Any, name: Any, current: Any, is_exact: Any) -> Any:
    """A whole lookup of a few keys: numbers alone, because Python takes longer to pass an array
    than the search takes. `shape` is the address of MappedTable.shape, `keys` that of the keys (32
    bytes each), behind which there is room for n places, n codes and n tiers. `current` is the
    namespace's word. Torn reads << 2 | how it ended, see Kernels.answer.
    """
    table = opened_at(shape)
    places = keys + 32 * count
    found = places + 8 * count
    out = (np.int64(0), places, found, found + count)
    torn, doubts = _probe(table, keys, count, name, out, is_exact)
    state = IN_DOUBT if doubts else SETTLED
    if _namespace(table[0], load_number(shape + 48), current >> HALF) != current:
        state = NOT_CURRENT
    # Then the search may have been in the wrong places.
    if load_acquire(table[0] + 8 * IN_USE_WORD) != np.uint64(table[2] + 1):
        state = MADE_ANEW
    return torn << 2 | state


@compiled(
    f"int64({GIVEN}, Array(uint8, 1, 'C', readonly=True), {GIVEN}, int64, int64, boolean,"
    " Tuple((int64[::1], int64[::1], uint64[:,::1], uint64[:,::1], uint8[::1])))"
)
def readable(
    words: Any, found: Any, block: Any, arena_bytes: Any, length: Any, lossy_ok: Any, into: Any
) -> Any:
    """Fills `into`, which has room for n in each of Readable's arrays; how many can be read."""
    rows, offsets, blocks, sums, outcomes = into
    count = 0
    # The header takes a unit of its own, before the payload.
    free = arena_bytes // _SLOT - 1 - (length + _SLOT - 1) // _SLOT
    for i in range(len(found)):
        outcomes[i] = found[i]
        if found[i] != HIT:
            continue
        outcomes[i] = DOUBT
        at = 16 * i
        packed, slot = words[at + 7], words[at + 6]
        kind = packed >> _TIER
        is_ours = words[at + 4] >> _TIER == _WITH_SUMS and np.int64(packed & _LENGTH) == length
        is_ours &= kind == _RAW or (lossy_ok and kind == _RAW | _LOSSY)
        # A slot may be any 64 bits: compared before it is counted with.
        if is_ours and free >= 0 and slot <= np.uint64(free):
            outcomes[i] = HIT
            rows[count] = i
            offsets[count] = (np.int64(slot) + 1) * _SLOT
            blocks[count, :] = block
            for word in range(4):
                blocks[count, KEY_WORD + word] = words[at + word]
            sums[count, 0], sums[count, 1] = words[at + 8], words[at + 9]
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
