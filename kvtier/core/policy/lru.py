"""Least recently used, giving up the tail of a chain before its head.

A page is a candidate only while it has no lease and no page after it is resident, so a prefix stays
usable as long as anything of it is left. Candidates wait in a heap by the stamp they had when they
were queued. A touch only writes a new stamp; an entry found to be out of date is put back with its
present stamp, so every touch costs at most one heap operation, later. Amortised O(log n) an
eviction; 40 bytes a queued page (an integer in a list: nothing for the collector).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvtier.core.table import NO_ROW, CopyTable

__all__ = ["Clock", "LruTailFirst"]

_ROW_BITS = 31
_ROW_MASK = (1 << _ROW_BITS) - 1
NEVER = 1 << 63


class Clock:
    """Logical time shared by all queues of a store: one tick a touched page."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 1

    def ticks(self, n: int) -> int:
        """Reserves `n` stamps and returns the first."""
        first = self.now
        self.now += n
        return first


class LruTailFirst:
    def __init__(self, table: CopyTable, clock: Clock) -> None:
        self._table = table
        self._clock = clock
        self._heap: list[int] = []
        self._queued = 0

    def admit(self, row: int) -> None:
        self._table.stamp[row] = self._clock.ticks(1)
        if self._table.children[row] == 0:
            self._push(row)

    def admit_many(self, rows: npt.NDArray[np.int64]) -> None:
        """As `admit` of each, in order, into a queue that is empty."""
        assert not self._heap
        first = self._clock.ticks(len(rows))
        stamps = np.arange(first, first + len(rows), dtype=np.uint64)
        self._table.column("stamp")[rows] = stamps
        is_tail = self._table.column("children")[rows] == 0
        self._table.column("queued")[rows[is_tail]] = stamps[is_tail]
        # Rising numbers are a heap.
        self._heap = (
            (stamps[is_tail] << np.uint64(_ROW_BITS)) | rows[is_tail].astype(np.uint64)
        ).tolist()
        self._queued = len(self._heap)

    def touch(self, rows: npt.NDArray[np.int64]) -> None:
        # The head gets the highest stamp: of pages used together, the tail is the older.
        n = len(rows)
        first = self._clock.ticks(n)
        self._table.column("stamp")[rows] = np.arange(first + n - 1, first - 1, -1)

    def ready(self, row: int) -> None:
        if not self._table.queued[row]:
            self._push(row)

    def forget(self, row: int) -> None:
        if self._table.queued[row]:
            self._table.queued[row] = 0
            self._queued -= 1
            if len(self._heap) > 2 * self._queued + 1024:
                self._rebuild()

    def victim(self, evictable: Callable[[int], bool]) -> int:
        while (row := self._settle_top()) != NO_ROW:
            heapq.heappop(self._heap)
            self._table.queued[row] = 0
            self._queued -= 1
            if evictable(row):
                return row  # a refused one waits outside the queue until `ready`
        return NO_ROW

    def coldest(self) -> int:
        row = self._settle_top()
        return NEVER if row == NO_ROW else self._table.stamp[row]

    def _settle_top(self) -> int:
        """Drops and refreshes entries until the top one is true; its row, or NO_ROW."""
        heap, table = self._heap, self._table
        while heap:
            stamp, row = heap[0] >> _ROW_BITS, heap[0] & _ROW_MASK
            if table.queued[row] != stamp:
                heapq.heappop(heap)  # of an earlier life of the row
            elif table.children[row] or table.leases[row]:
                heapq.heappop(heap)  # `ready` queues it again
                table.queued[row] = 0
                self._queued -= 1
            elif table.stamp[row] != stamp:
                table.queued[row] = table.stamp[row]
                heapq.heapreplace(heap, (table.stamp[row] << _ROW_BITS) | row)
            else:
                return row
        return NO_ROW

    def _push(self, row: int) -> None:
        stamp = self._table.stamp[row]
        self._table.queued[row] = stamp
        self._queued += 1
        heapq.heappush(self._heap, (stamp << _ROW_BITS) | row)

    def _rebuild(self) -> None:
        queued = self._table.queued
        self._heap = [e for e in self._heap if queued[e & _ROW_MASK] == e >> _ROW_BITS]
        heapq.heapify(self._heap)
