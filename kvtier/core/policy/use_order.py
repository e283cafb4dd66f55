"""Table rows in the order of their last use: any of them can be left out and put back in its place.

Every row has a place, a number that rises with every arrival; one that is used gets the next and
leaves a hole behind. A row that is set aside keeps its place, so putting it back costs as little,
whatever came meanwhile. The first row is found by counts of the rows that wait in each block of
places.

Places lie in an array. When it is full the next begins a second one, with room for the rows of the
first below its own, and every arrival from then on brings some of these over, from the last to the
first; so holes go, and order and work are kept: a call looks at a few entries for each row that it
names, at the counts, and at two blocks, however many rows there are and however often they were
used. (A copying collector in small steps, after H. G. Baker, "List Processing in Real Time on a
Serial Computer", Communications of the ACM 21(4), 1978.) A row costs 8 bytes for its place and 8 in
the array, 16 while rows come over.

The caller holds the store's lock.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.core.table import NO_ROW, CopyTable

__all__ = ["BLOCK_BITS", "Part", "UseOrder"]

#: Places of a block: 2 to the power of it.
BLOCK_BITS: Final = 10
_BLOCK = 1 << BLOCK_BITS
#: Entries of the older array that come over with every row that arrives, and with every call.
_STEPS_PER_ROW = 4
_STEPS_MIN = 256
_ROOM_MIN = 64
#: Below so many rows the scalar loop is faster than the vector one.
_VECTOR_FROM = 16
_LOOKED_AT_ONE_BY_ONE = 8


class Part:
    """Places `first` and up; those from `begin` to before `end` are in use.

    An entry is row + 1; below 0, of a row that is set aside; 0, a hole.
    """

    __slots__ = (
        "_counts",
        "begin",
        "counts_np",
        "end",
        "entries",
        "entries_np",
        "first",
        "waiting",
    )

    def __init__(self, first: int, *, below: int, above: int) -> None:
        # Zeros, which cost neither time nor memory until they are used.
        self.entries_np: npt.NDArray[np.int32] = np.zeros(below + above, np.int32)
        self.entries = self.entries_np.data
        self.counts_np: npt.NDArray[np.int64] = np.zeros(1 + (below + above) // _BLOCK, np.int64)
        self._counts = self.counts_np.data
        self.waiting = 0
        self.first = first
        self.begin = self.end = first + below

    @property
    def after(self) -> int:
        """The first place that is not in this part any more."""
        return self.first + len(self.entries)

    @property
    def nbytes(self) -> int:
        return self.entries_np.nbytes + self.counts_np.nbytes

    def write(self, place: int, entry: int) -> None:
        at = place - self.first
        change = (entry > 0) - (self.entries[at] > 0)
        self.entries[at] = entry
        if change:
            self._counts[at >> BLOCK_BITS] += change
            self.waiting += change

    def write_many(self, places: npt.NDArray[np.int64], entries: npt.NDArray[np.int32]) -> None:
        """Writes at places that all differ."""
        at = places - self.first
        blocks, size = at >> BLOCK_BITS, len(self._counts)
        before, after = blocks[self.entries_np[at] > 0], blocks[entries > 0]
        self.counts_np += np.bincount(after, minlength=size) - np.bincount(before, minlength=size)
        self.waiting += len(after) - len(before)
        self.entries_np[at] = entries

    def clear_many(self, places: npt.NDArray[np.int64]) -> None:
        self.write_many(places, np.zeros(len(places), np.int32))

    def first_waiting(self, front: int) -> int:
        """The place of the first row that waits; there is one, and none before `front`."""
        at = max(front, self.begin) - self.first
        for near in range(at, min(at + _LOOKED_AT_ONE_BY_ONE, len(self.entries))):
            if self.entries[near] > 0:
                return self.first + near
        block = at >> BLOCK_BITS
        block += int((self.counts_np[block:] != 0).argmax())
        entries = self.entries_np[block << BLOCK_BITS :][:_BLOCK]
        return self.first + (block << BLOCK_BITS) + int((entries > 0).argmax())

    def block(self, place: int) -> npt.NDArray[np.int32]:
        """The entries of the block of the place."""
        begin = (place - self.first) >> BLOCK_BITS << BLOCK_BITS
        return self.entries_np[begin : begin + _BLOCK]


class UseOrder:
    """`queued` of a row of the table is 1 while it waits here, 0 while it is set aside."""

    def __init__(self, table: CopyTable) -> None:
        self._queued_np = table.column("queued")
        self._queued = table.queued
        # Zeros, which cost no memory until a row of this order is used. 0: not of this order.
        self._place_np: npt.NDArray[np.int64] = np.zeros(table.rows_max, np.int64)
        self._place = self._place_np.data
        self._older: Part | None = None
        self._newer = Part(1, below=0, above=_ROOM_MIN)
        self._front = 1  # no row before this place waits
        self.members = 0
        #: Entries looked at in its life: what bounds the time of a call.
        self.looked_at = 0

    def __contains__(self, row: int) -> bool:
        return self._place[row] != 0

    @property
    def nbytes(self) -> int:
        """Of the arrays of places."""
        return self._newer.nbytes + (self._older.nbytes if self._older else 0)

    def append(self, row: int, *, waits: bool) -> None:
        """A row that is not here arrives at the end."""
        self._make_room(1)
        self._put_last(row, waits=waits)
        self.members += 1

    def append_many(self, rows: npt.NDArray[np.int64], waits: npt.NDArray[np.bool_]) -> None:
        """As `append` for each of `rows`, all different."""
        self._make_room(len(rows))
        self._put_all_last(rows, waits)
        self.members += len(rows)

    def use(self, rows: npt.NDArray[np.int64]) -> None:
        """Moves the rows to the end, in their order; one named twice goes to the first of its
        places, and one that is set aside stays so. Rows that are not here are passed over."""
        self._make_room(len(rows))
        if len(rows) < _VECTOR_FROM:
            for row in dict.fromkeys(rows.tolist()):
                if place := self._place[row]:
                    self._part_of(place).write(place, 0)
                    self._put_last(row, waits=self._queued[row] != 0)
            return
        places = self._place_np[rows]
        rows, places = rows[places != 0], places[places != 0]
        # Of a row named twice what is written last stays, and that is its first place.
        numbers = np.arange(len(rows))
        self._place_np[rows[::-1]] = numbers[::-1]
        is_first = self._place_np[rows] == numbers
        rows, places = rows[is_first], places[is_first]
        for part in self._parts():
            part.clear_many(places[(places >= part.first) & (places < part.after)])
        self._put_all_last(rows, self._queued_np[rows] != 0)

    def remove(self, row: int) -> None:
        """The row leaves. It must be here."""
        self._at_place(row, 0)
        self._place[row] = self._queued[row] = 0
        self.members -= 1
        if not self.members:
            self._begin_anew()

    def set_aside(self, row: int) -> None:
        """The row is not the first until it is put back. It must wait."""
        self._at_place(row, -row - 1)
        self._queued[row] = 0

    def put_back(self, row: int) -> None:
        """A row that was set aside waits again, in its place."""
        self._queued[row] = 1
        place = self._at_place(row, row + 1)
        if place < self._front:
            self._front = place

    def first(self) -> int:
        """The row that was used longest ago of all that wait, or NO_ROW."""
        for part in self._parts():
            if part.waiting:
                front = self._front
                if front < part.begin or (entry := part.entries[front - part.first]) <= 0:
                    self._front = part.first_waiting(front)
                    entry = part.entries[self._front - part.first]
                self.looked_at += min(self._front - front + 1, _BLOCK)
                return entry - 1
        return NO_ROW

    def first_block(self) -> npt.NDArray[np.int32]:
        """The row of `first()`, just asked for, and those that wait after it in its block."""
        entries = self._part_of(self._front).block(self._front)
        self.looked_at += len(entries)
        rows: npt.NDArray[np.int32] = entries[entries > 0] - 1
        return rows

    def set_aside_block(self, rows: npt.NDArray[np.int32]) -> None:
        """As `set_aside` for each of `rows`, which `first_block` has given."""
        self._part_of(self._front).write_many(self._place_np[rows], -rows - 1)
        self._queued_np[rows] = 0

    def _begin_anew(self) -> None:
        self._older, self._newer = None, Part(1, below=0, above=_ROOM_MIN)
        self._front = 1

    def _parts(self) -> tuple[Part, ...]:
        return (self._newer,) if self._older is None else (self._older, self._newer)

    def _at_place(self, row: int, entry: int) -> int:
        """Writes at the place of the row; it."""
        place, part = self._place[row], self._newer
        if self._older is not None and place < part.first:
            part = self._older
        part.write(place, entry)
        return place

    def _part_of(self, place: int) -> Part:
        if self._older is not None and place < self._newer.first:
            return self._older
        return self._newer

    def _put_last(self, row: int, *, waits: bool) -> None:
        part = self._newer
        self._place[row] = part.end
        part.write(part.end, row + 1 if waits else -row - 1)
        part.end += 1
        self._queued[row] = waits

    def _put_all_last(self, rows: npt.NDArray[np.int64], waits: npt.NDArray[np.bool_]) -> None:
        part, n = self._newer, len(rows)
        places = np.arange(part.end, part.end + n)
        part.write_many(places, np.where(waits, rows + 1, -rows - 1).astype(np.int32))
        part.end += n
        self._place_np[rows] = places
        self._queued_np[rows] = waits

    def _make_room(self, n: int) -> None:
        """For `n` more entries, and does the part of the moving that is theirs."""
        self.looked_at += n
        if self._older is not None:
            self._bring_over(self._older, _STEPS_MIN + _STEPS_PER_ROW * n)
        if self._newer.end + n > self._newer.after:
            # All have come over by now: after these `n` there was room for half as many.
            assert self._older is None
            old = self._newer
            above = n + max(_ROOM_MIN, self.members, (old.end - old.begin) // 2)
            self._older = old
            self._newer = Part(old.after, below=self.members, above=above)

    def _bring_over(self, old: Part, steps: int) -> None:
        begin = max(old.begin, old.end - steps)
        entries = old.entries_np[begin - old.first : old.end - old.first]
        self.looked_at += len(entries)
        held = np.flatnonzero(entries)
        new, entries = self._newer, entries[held]
        places = np.arange(new.begin - len(held), new.begin)
        new.write_many(places, entries)
        new.begin -= len(held)
        self._place_np[np.abs(entries) - 1] = places
        old.clear_many(held + begin)
        old.end = begin
        if old.begin == begin:
            self._older = None
