"""The directory's inner loops in numpy, for where numba is not installed: see protocol.py.

A reader's copy of an entry is the array that fancy indexing makes: memory of its own, whose mix
says whether it is whole. Several rows are copied at once, so every step of a probe is one for all
keys that are still looking. The owner goes entry by entry, over native 64-bit elements of
memoryviews: such a store is one instruction, which a `struct` with a byte order does not promise.
Numpy has no fences, and needs none here: calls into it are made in order, x86-64 keeps the order
of stores and of loads, and on other processors the mix catches what is out of order.

Thread rule: see Kernels.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtier.core.page import KEY_BYTES, Codec
from kvtier.packing.checksum import KEY_WORD
from kvtier.packing.record import HEADER_BYTES
from kvtier.transfer.local.entry import (
    BUSY,
    EMPTY,
    NAME_BITS,
    SLOT_BYTES,
    Words,
    entry_fits,
    mix_many,
    mix_one,
    place_many,
    place_one,
)
from kvtier.transfer.local.header import (
    IN_USE_WORD,
    NAMESPACE_PROBES,
    OPEN_WORD,
    SHIFTS_WORD,
    namespace_place,
)
from kvtier.transfer.local.mapped import MIX_SEED, MappedTable
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
    Found,
    Readable,
)

__all__ = ["NumpyKernels", "fill"]

_NAME = np.uint64(NAME_BITS)
_LOSSY = np.uint64(1 << 56)
_VECTOR_FROM = 8


class NumpyKernels:
    """See Kernels."""

    @property
    def name(self) -> str:
        return "numpy"

    def probe(self, table: MappedTable, keys: Words, name: int, found: Found) -> tuple[int, int]:
        wanted = keys.reshape(-1, 4)
        found.words[:] = 0
        found.codes[:] = MISS
        found.tiers[:] = 0
        found.places[:] = _places(table, wanted, np.uint64(name))
        if table.words[OPEN_WORD] != 1:
            return 0, 0
        shifts = int(table.words[SHIFTS_WORD])
        search = _Search(table, wanted, np.uint64(name), found)
        torn = self._searched(table, wanted, search, shifts)
        if found.is_exact:
            found.codes[search.lossy] = MISS
        return torn, int(np.count_nonzero(found.codes == DOUBT))

    def _searched(self, table: MappedTable, wanted: Words, search: _Search, shifts: int) -> int:
        """Searches until nothing was moved meanwhile; the torn reads."""
        found = search.found
        torn = search.run(np.arange(len(wanted)))
        for _ in range(ROUNDS_MAX):
            missed = np.flatnonzero(found.codes != HIT)
            now = int(table.words[SHIFTS_WORD])
            if not len(missed) or (now == shifts and now % 2 == 0):
                return torn
            shifts = now
            found.places[missed] = _places(table, wanted[missed], search.name)
            found.codes[missed] = MISS
            torn += search.run(missed)
        found.codes[found.codes == MISS] = DOUBT
        return torn

    def answer(
        self, table: MappedTable, keys: bytes, name: int, current: int, *, is_exact: bool
    ) -> tuple[int, int, bytes]:
        found = Found.room_for(len(keys) // KEY_BYTES, with_entries=False, is_exact=is_exact)
        torn, doubts = self.probe(table, np.frombuffer(keys, np.uint64), name, found)
        state = IN_DOUBT if doubts else SETTLED
        if self.namespace(table, current >> 32) != current:
            state = NOT_CURRENT
        if table.words[IN_USE_WORD] != table.header.entries:
            state = MADE_ANEW
        return state, torn, found.codes.tobytes() + found.tiers.tobytes()

    def readable(
        self, found: Found, block: Words, *, arena_bytes: int, length: int, lossy_ok: bool
    ) -> Readable:
        fits = found.hits & entry_fits(found.entries, arena_bytes)
        fits &= (found.lengths == np.uint64(length)) & (found.codecs == np.uint64(Codec.RAW))
        if not lossy_ok:
            fits &= found.lossy == np.uint64(0)
        outcomes = np.where(fits, np.uint8(HIT), np.uint8(DOUBT))
        outcomes[found.codes == MISS] = MISS
        rows = np.flatnonzero(fits)
        offsets = found.slots[rows].astype(np.int64) * SLOT_BYTES + HEADER_BYTES
        blocks = np.tile(block, (len(rows), 1))
        blocks[:, KEY_WORD : KEY_WORD + 4] = found.entries[rows, :4]
        return Readable(rows, offsets, blocks, found.sums[rows], outcomes)

    def recheck(self, table: MappedTable, found: Found, same: NDArray[np.uint8]) -> None:
        if table.words[OPEN_WORD] != 1:
            same[:] = 0
            return
        asked = np.flatnonzero(same)
        rows = found.entries[asked]
        places = found.places[asked] & (table.header.entries - 1)
        there = (table.entries[places] == rows).all(axis=1)
        for _ in range(ROUNDS_MAX):
            moved = np.flatnonzero(~there)
            shifts = int(table.words[SHIFTS_WORD])
            there[moved] = _are_there(table, rows[moved])
            now = int(table.words[SHIFTS_WORD])
            if bool(there.all()) or (now == shifts and now % 2 == 0):
                break
        same[asked] = there

    def namespace(self, table: MappedTable, number: int) -> int:
        if table.words[OPEN_WORD] != 1:
            return 0
        count = len(table.namespaces)
        first = namespace_place(number, count)
        near = table.namespaces[(first + np.arange(NAMESPACE_PROBES)) & (count - 1)]
        mine = near[near >> np.uint64(32) == number]
        return int(mine[0]) if len(mine) else 0

    def write(
        self, table: MappedTable, rows: Words, placed: NDArray[np.uint8], room: int
    ) -> tuple[int, int, int]:
        new = steps = longest = 0
        mixes, homes = _mixes_and_homes(table, rows)
        rows[:, 15] = mixes
        owner = _Owner(table)
        for i, row in enumerate(rows.tolist()):
            row[15] = mixes[i]
            place, took = owner.find(homes[i], row)
            steps += took
            longest = max(longest, took)
            is_new = place >= 0 and owner.words[place * 16 + 4] == EMPTY
            # Readers take an entry without a state for an empty one.
            has_state = row[4] >> 56 != 0
            placed[i] = place >= 0 and has_state and (not is_new or new < room)
            if placed[i]:
                new += is_new
                owner.publish(place, row)
        return new, steps, longest

    def remove(
        self, table: MappedTable, rows: Words, removed: NDArray[np.uint8]
    ) -> tuple[int, int]:
        count = steps = 0
        owner = _Owner(table)
        _, homes = _mixes_and_homes(table, rows)
        for i, row in enumerate(rows.tolist()):
            place, took = owner.find(homes[i], row)
            steps += took
            at = place * 16
            removed[i] = (
                place >= 0 and owner.words[at + 4] != EMPTY and row[5] in (0, owner.words[at + 5])
            )
            if removed[i]:
                count += 1
                steps += owner.close_up(place)
        return count, steps

    def empty(self, table: MappedTable) -> None:
        owner = _Owner(table)
        for place in np.flatnonzero(table.entries[:, 4]).tolist():
            owner.clear(place)

    def store(self, table: MappedTable, word: int, value: int) -> None:
        table.words.data[word] = value


def _mixes_and_homes(table: MappedTable, rows: Words) -> tuple[list[int], list[int]]:
    """Of a few rows one by one, which is quicker there."""
    header, seed = table.header, int(table.shape[MIX_SEED])
    if len(rows) < _VECTOR_FROM:
        given = rows.tolist()
        mixes = [mix_one(row, seed) for row in given]
        homes = [place_one(row, header.hash_seed, header.shift) for row in given]
    else:
        mixes = mix_many(rows, seed).tolist()
        homes = _places(table, rows[:, :4], rows[:, 4] & _NAME).tolist()
    return mixes, homes


def fill(table: MappedTable, rows: Words) -> NDArray[np.bool_]:
    """Enters rows (n, 16) of pages that have no entry, as Kernels.write does, all together: for
    thousands of them. Which have a place, shape (n,).

    What a reader meets meanwhile may be torn, which the mix shows.
    """
    rows[:, 15] = mix_many(rows, int(table.shape[MIX_SEED]))
    places = _places(table, rows[:, :4], rows[:, 4] & _NAME)
    entries, mask = table.entries, table.header.entries - 1
    placed = np.zeros(len(rows), np.bool_)
    looking = np.arange(len(rows))
    for _ in range(PROBES_MAX):
        if not len(looking):
            break
        first = looking[entries[places[looking], 4] == EMPTY]
        # Of those that want the same place the last one gets it; the others go on.
        entries[places[first]] = rows[first]
        won = (entries[places[first]] == rows[first]).all(axis=1)
        placed[first[won]] = True
        looking = looking[~placed[looking]]
        places[looking] = (places[looking] + 1) & mask
    return placed


def _places(table: MappedTable, keys: Words, names: Words | np.uint64) -> NDArray[np.int64]:
    header = table.header
    return place_many(keys, names, header.hash_seed, header.shift)


class _Search:
    """The search for many keys, step by step together."""

    def __init__(self, table: MappedTable, wanted: Words, name: np.uint64, found: Found) -> None:
        self._table = table
        self._wanted = wanted
        self.name = name
        self.found = found
        #: Of which copies that were rounded were found.
        self.lossy = np.zeros(len(wanted), np.bool_)
        self._rows = found.entries
        self._seed = int(table.shape[MIX_SEED])

    def run(self, looking: NDArray[np.int64]) -> int:
        """Looks for the keys with these numbers from `found.places` on; the torn reads."""
        found, mask = self.found, self._table.header.entries - 1
        torn = 0
        for _ in range(PROBES_MAX):
            if not len(looking):
                break
            onward, reads = self._step(looking)
            torn += reads
            found.places[onward] = (found.places[onward] + 1) & mask
            looking = onward
        return torn

    def _step(self, looking: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
        """One entry for each key: (keys that have to go on, torn reads)."""
        found = self.found
        onward = []
        torn = 0
        for _ in range(READS_MAX):
            copies = self._table.entries[found.places[looking]]
            mix = copies[:, 15]
            passed = (copies[:, 0] != self._wanted[looking, 0]) & (copies[:, 4] != EMPTY)
            whole = (mix_many(copies, self._seed) == mix) & ~passed
            hit = whole & (copies[:, :4] == self._wanted[looking]).all(axis=1)
            hit &= copies[:, 4] & _NAME == self.name
            if len(self._rows):
                self._rows[looking[hit]] = copies[hit]
            found.tiers[looking[hit]] = copies[hit, 4] >> np.uint64(48) & np.uint64(0xFF)
            found.codes[looking[hit]] = HIT
            self.lossy[looking[hit]] = copies[hit, 7] & _LOSSY != 0
            end = (mix == EMPTY) & ~passed
            again = ~end & ~passed & ~whole
            onward.append(looking[~end & ~again & ~hit])
            looking = looking[again]
            torn += len(looking)
            if not len(looking):
                break
        found.codes[looking] = DOUBT
        return np.concatenate([*onward, looking]), torn


def _are_there(table: MappedTable, rows: Words) -> NDArray[np.bool_]:
    """Which rows lie somewhere in the table, whole as they are."""
    there = np.zeros(len(rows), np.bool_)
    mask = table.header.entries - 1
    places = _places(table, rows[:, :4], rows[:, 4] & _NAME)
    looking = np.arange(len(rows))
    for _ in range(PROBES_MAX):
        if not len(looking):
            break
        copies = table.entries[places[looking]]
        same = (copies == rows[looking]).all(axis=1)
        there[looking[same]] = True
        looking = looking[~same & (copies[:, 15] != EMPTY)]
        places[looking] = (places[looking] + 1) & mask
    return there


class _Owner:
    """The one that writes: entry by entry over native words."""

    def __init__(self, table: MappedTable) -> None:
        self.words = table.entries.reshape(-1).data
        self._file = table.words.data
        self._header = table.header
        self._mask = table.header.entries - 1

    def find(self, place: int, row: list[int]) -> tuple[int, int]:
        """(place, steps): of the entry of this name or the empty one for it, -1: neither."""
        words = self.words
        for step in range(PROBES_MAX):
            at = place * 16
            if words[at + 4] == EMPTY or (
                words[at : at + 4].tolist() == row[:4] and (words[at + 4] ^ row[4]) & NAME_BITS == 0
            ):
                return place, step + 1
            place = (place + 1) & self._mask
        return -1, PROBES_MAX

    def publish(self, place: int, row: list[int]) -> None:
        at = place * 16
        self.words[at + 15] = BUSY
        for word, value in enumerate(row):
            self.words[at + word] = value

    def clear(self, place: int) -> None:
        self.words[place * 16 + 15] = EMPTY
        self.words[place * 16 + 4] = EMPTY

    def close_up(self, hole: int) -> int:
        """Moves later entries of the run into the hole; the steps."""
        words, mask = self.words, self._mask
        words[hole * 16 + 15] = BUSY
        steps = 0
        is_moving = False
        place = (hole + 1) & mask
        while words[place * 16 + 4] != EMPTY:
            steps += 1
            row = words[place * 16 : place * 16 + 16].tolist()
            home = place_one(row, self._header.hash_seed, self._header.shift)
            # It may fill the hole unless its home lies strictly after the hole, cyclically.
            if ((place - home) & mask) >= ((place - hole) & mask):
                if not is_moving:
                    is_moving = True
                    self._file[SHIFTS_WORD] += 1
                self.publish(hole, row)
                hole = place
            place = (place + 1) & mask
        self.clear(hole)
        if is_moving:
            self._file[SHIFTS_WORD] += 1
        return steps
