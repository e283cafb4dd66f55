"""A queue of table rows from which any row can leave at no cost, for policies of several queues.

Rows wait in a plain array in the order of their arrival. A row's `queued` column says where in the
array it waits (place + 1), and the owner's `where` column which of its queues it is in; an entry
for which both do not agree is left over from earlier and is skipped. So leaving, and moving to the
end (a batch of pages used together, in a few vector operations), write columns alone, and the array
is put in order when it is full: O(1) amortised, and some 6 bytes a row.

Rows that were taken from the front, because something kept their pages, and come back wait in a
heap beside the array; of the fronts of the two the one whose last use is longer ago comes first.
Those in the heap are few (one for each chain that is being given up, and what leases let go of), so
the 40 bytes of each are too.

The caller holds the store's lock.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from kvtier.core.table import NO_ROW, CopyTable

__all__ = ["RowQueue"]

_ROW_BITS = 31
_ROW_MASK = (1 << _ROW_BITS) - 1
#: In the `queued` column: the row waits in the heap.
_CAME_BACK = 1 << 63
_ENTRIES_MIN = 64
#: After so many entries left over in a row they are looked at in pieces, by vector operations.
_SKIPPED_ONE_BY_ONE = 32
_PIECE = 512


class RowQueue:
    """Queue `number` (1 .. 255) of the owner of `where`, a byte for each row, 0 for no queue."""

    def __init__(self, table: CopyTable, where: npt.NDArray[np.uint8], number: int) -> None:
        self._table = table
        self._where_np = where
        self._where = where.data
        self.number = number
        #: Rows whose `where` is this queue, also those that something keeps. Its owner counts.
        self.members = 0
        self.clear()

    @property
    def nbytes(self) -> int:
        """Of the array; the heap is not counted."""
        return self._rows_np.nbytes

    def clear(self) -> None:
        """Drops the memory of a queue without members."""
        assert self.members == 0
        self._came_back: list[int] = []  # stamp << 31 | row
        self._resize(_ENTRIES_MIN)
        self._begin = 0
        self._end = 0

    def append(self, row: int) -> None:
        """Puts a row at the end, wherever it was before."""
        if self._end == len(self._rows):
            self._make_room(1)
        self._rows[self._end] = row
        self._end += 1
        self._table.queued[row] = self._end
        self._where[row] = self.number

    def extend(self, rows: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> None:
        """As `append` for each of `rows`; a row named twice ends at the first of its places."""
        n = len(rows)
        if self._end + n > len(self._rows):
            self._make_room(n)
        end = self._end
        self._rows_np[end : end + n] = rows
        # From the last to the first: of a row named twice, what is written last stays.
        self._table.column("queued")[rows[::-1]] = np.arange(end + n, end, -1)
        self._where_np[rows] = self.number
        self._end = end + n

    def put_back(self, row: int) -> None:
        """Puts a row of this queue, taken before, where its last use says."""
        table = self._table
        table.queued[row] = _CAME_BACK
        if len(self._came_back) > 2 * self.members + _ENTRIES_MIN:
            self._tidy_heap()
        heapq.heappush(self._came_back, (table.stamp[row] << _ROW_BITS) | row)

    def first(self) -> int:
        """The row at the front, or NO_ROW."""
        back, waiting = self._first_back(), self._first_waiting()
        if back == NO_ROW or waiting == NO_ROW:
            return max(back, waiting)
        stamp = self._table.stamp
        return back if stamp[back] < stamp[waiting] else waiting

    def take(self) -> int:
        """Removes and returns the row at the front, or NO_ROW. It stays a member."""
        row = self.first()
        if row != NO_ROW:
            if self._table.queued[row] == _CAME_BACK:
                heapq.heappop(self._came_back)
            else:
                self._begin += 1
            self._table.queued[row] = 0
        return row

    def _first_back(self) -> int:
        """The row at the front of the heap, or NO_ROW."""
        table, heap = self._table, self._came_back
        while heap:
            stamp, row = heap[0] >> _ROW_BITS, heap[0] & _ROW_MASK
            if table.queued[row] != _CAME_BACK or self._where[row] != self.number:
                heapq.heappop(heap)
            elif table.stamp[row] != stamp:
                heapq.heapreplace(heap, (table.stamp[row] << _ROW_BITS) | row)
            else:
                return row
        return NO_ROW

    def _first_waiting(self) -> int:
        """The row at the front of the array, or NO_ROW."""
        queued, where = self._table.queued, self._where
        skipped = 0
        while self._begin < self._end:
            row = self._rows[self._begin]
            if queued[row] == self._begin + 1 and where[row] == self.number:
                return row
            self._begin += 1
            skipped += 1
            if skipped == _SKIPPED_ONE_BY_ONE:
                self._skip()
        self._begin = self._end = 0
        return NO_ROW

    def _skip(self) -> None:
        """Moves the front past entries that are left over."""
        while self._begin < self._end:
            waits = self._waits(self._begin, min(self._begin + _PIECE, self._end))
            if bool(waits.any()):
                self._begin += int(waits.argmax())
                return
            self._begin += len(waits)

    def _waits(self, begin: int, end: int) -> npt.NDArray[np.bool_]:
        """Which entries of a part of the array are not left over."""
        rows = self._rows_np[begin:end]
        places = np.arange(begin + 1, end + 1, dtype=np.uint64)
        waits: npt.NDArray[np.bool_] = self._table.column("queued")[rows] == places
        waits &= self._where_np[rows] == self.number
        return waits

    def waiting(self) -> npt.NDArray[np.int32]:
        """The rows in the array in their order: all that wait but those that came back."""
        rows: npt.NDArray[np.int32] = self._rows_np[self._begin : self._end]
        return rows[self._waits(self._begin, self._end)]

    def rotate(self, n: int) -> None:
        """Puts the first `n` of `waiting()` at the end, in their order."""
        rows = self.waiting()
        self._refill(np.concatenate([rows[n:], rows[:n]]), 0)

    def is_among_last(self, row: int, n: int) -> bool:
        """The row waits here and at most `n` - 1 entries came after it."""
        place = self._table.queued[row]
        return self._where[row] == self.number and max(0, self._end - n) < place <= self._end

    def are_among_last(self, rows: npt.NDArray[np.int64], n: int) -> npt.NDArray[np.bool_]:
        """`is_among_last` for each of `rows`."""
        places = self._table.column("queued")[rows]
        found: npt.NDArray[np.bool_] = self._where_np[rows] == self.number
        found &= (places > max(0, self._end - n)) & (places <= self._end)
        return found

    def _make_room(self, n: int) -> None:
        """Drops the entries left over, and makes the array fit what remains and `n` more."""
        self._refill(self.waiting(), n)

    def _refill(self, rows: npt.NDArray[np.int32], more: int) -> None:
        self._begin, self._end = 0, len(rows)
        # Half as many again: so many can come before the next time.
        self._resize(max(_ENTRIES_MIN, len(rows) + len(rows) // 2 + more))
        self._rows_np[: self._end] = rows
        self._table.column("queued")[rows] = np.arange(1, self._end + 1)

    def _resize(self, entries: int) -> None:
        self._rows_np: npt.NDArray[np.int32] = np.empty(entries, np.int32)
        self._rows = self._rows_np.data

    def _tidy_heap(self) -> None:
        """Drops the entries left over."""
        table, where = self._table, self._where
        rows = {entry & _ROW_MASK for entry in self._came_back}
        self._came_back = [
            (table.stamp[row] << _ROW_BITS) | row
            for row in rows
            if table.queued[row] == _CAME_BACK and where[row] == self.number
        ]
        heapq.heapify(self._came_back)
