"""What ARC and S3-FIFO have in common: two queues of pages, and a memory of pages evicted.

A page stays in its queue while a lease or a page after it keeps it: met at the front then, it is
set aside, and `ready` puts it back. So every page is looked at once for each time it was admitted,
used or made ready: O(1) amortised, O(log n) in the number of those that came back.

Three things are as no text about caches has them, because of what the pages here are:

* The pages of one chain are stored one after the other, and each is used by the page after it, at
  once. A use of a page that is among the youngest `burst_share` of those used once is therefore no
  second use: it belongs to the one that brought it. 0 counts every use.
* The page that was used last of all is not named while another can go: it may be the parent of the
  page that needs the room.
* The shards of a page are evicted together, when the first of them is named: all of them are
  remembered.

The capacity of a queue is not fixed: it is the pages there are, and those evicted whose successors
are not admitted yet. The caller holds the store's lock.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvtier.core.policy.ghosts import Ghosts
from kvtier.core.policy.lru import NEVER, Clock
from kvtier.core.policy.row_queue import RowQueue
from kvtier.core.table import NO_ROW, CopyTable

__all__ = ["BURST_SHARE", "TwoQueues"]

BURST_SHARE = 1 / 32

_NO_PAGE = (-1, b"")
#: Below so many rows the scalar loop is faster than the vector one.
_VECTOR_FROM = 32


class TwoQueues(ABC):
    """`young` has the pages admitted without a history, `old` those that have one."""

    def __init__(
        self, table: CopyTable, clock: Clock, *, ghosts: Ghosts, burst_share: float
    ) -> None:
        self.ghosts = ghosts
        self._table = table
        self._clock = clock
        self._burst_share = burst_share
        # Zeros, which cost no memory until a row of this queue is used.
        self._where_np: npt.NDArray[np.uint8] = np.zeros(table.rows_max, np.uint8)
        self._where = self._where_np.data
        self._young = RowQueue(table, self._where_np, 1)
        self._old = RowQueue(table, self._where_np, 2)
        self._awaited = 0  # pages evicted that nothing has been admitted for
        self._named = _NO_PAGE  # (namespace, key) of the last victim

    def admit(self, row: int) -> None:
        """See Policy."""
        self._named = _NO_PAGE
        self._awaited = max(0, self._awaited - 1)
        self._table.stamp[row] = self._clock.ticks(1)
        queue = self._queue_for(row)
        queue.append(row)
        queue.members += 1
        self._bound_memory()

    def admit_many(self, rows: npt.NDArray[np.int64]) -> None:
        """See Policy."""
        if self._pages() or len(self.ghosts):
            for row in rows.tolist():
                self.admit(row)
            return
        n = len(rows)
        first = self._clock.ticks(n)
        self._table.column("stamp")[rows] = np.arange(first, first + n)
        self._young.extend(rows)
        self._young.members += n
        self._awaited = 0

    def touch(self, rows: npt.NDArray[np.int64]) -> None:
        """See Policy. A page named twice in one call is used once."""
        self._named = _NO_PAGE
        # The head gets the highest stamp: of pages used together, the tail is the older.
        n = len(rows)
        first = self._clock.ticks(n)
        burst = self._burst()
        if n < _VECTOR_FROM:
            for at, row in enumerate(dict.fromkeys(rows[::-1].tolist()), first):
                self._table.stamp[row] = at
                if self._where[row] and not self._young.is_among_last(row, burst):
                    self._use(row)
            return
        self._table.column("stamp")[rows] = np.arange(first + n - 1, first - 1, -1)
        rows = rows[::-1]
        is_new = self._where_np[rows] != 0
        is_new &= ~self._young.are_among_last(rows, burst)
        self._use_many(rows[is_new])

    def lead(self, row: int) -> None:
        """See Policy."""
        self.touch(np.array([row]))

    def keep(self, row: int) -> None:
        """See Policy."""
        return  # it is set aside when it is met at the front

    def ready(self, row: int) -> None:
        """See Policy."""
        if self._where[row] and not self._table.queued[row]:
            self._queue_of(row).put_back(row)

    def forget(self, row: int) -> None:
        """See Policy."""
        if not self._where[row]:
            return
        table, queue = self._table, self._queue_of(row)
        queue.members -= 1
        self._where[row] = 0
        table.queued[row] = 0
        if not queue.members:
            queue.clear()
        if self._named == (table.namespace[row], table.key(row)):
            self._awaited += 1
            self._remember(row, queue)
        self._bound_memory()

    def victim(self, evictable: Callable[[int], bool]) -> int:
        """The row to evict next, or NO_ROW. What is forgotten of its page before another one is
        admitted or used is remembered.
        """
        row = self._next(evictable)
        if row != NO_ROW and self._table.stamp[row] == self._clock.now - 1:
            other = self._next(evictable)
            if other != NO_ROW:
                self._queue_of(row).append(row)
                row = other
        self._named = _NO_PAGE
        if row != NO_ROW:
            self._named = self._table.namespace[row], self._table.key(row)
        return row

    def evict(self, evictable: Callable[[int], bool]) -> int:
        """See Policy."""
        row = self.victim(evictable)
        if row != NO_ROW:
            self.forget(row)
        return row

    def coldest(self) -> int:
        """See Policy."""
        queue = self._settle()
        return NEVER if queue is None else self._table.stamp[queue.first()]

    def capacity(self) -> int:
        """Pages that the queue is taken to have room for."""
        pages = self._pages()
        return pages + min(self._awaited, max(1, pages))

    def _next(self, evictable: Callable[[int], bool]) -> int:
        """Takes the next page that may go, or NO_ROW. Those refused wait for `ready`."""
        while (queue := self._settle()) is not None:
            if evictable(row := queue.take()):
                return row
        return NO_ROW

    def _pages(self) -> int:
        return self._young.members + self._old.members

    def _burst(self) -> int:
        return math.ceil(self._burst_share * self._pages())

    def _queue_of(self, row: int) -> RowQueue:
        return self._young if self._where[row] == self._young.number else self._old

    def _is_kept(self, row: int) -> bool:
        return bool(self._table.children[row] or self._table.leases[row])

    @abstractmethod
    def _queue_for(self, row: int) -> RowQueue:
        """The queue to admit a page to, from what is remembered of it."""

    @abstractmethod
    def _use(self, row: int) -> None:
        """A page of either queue was used."""

    @abstractmethod
    def _use_many(self, rows: npt.NDArray[np.int64]) -> None:
        """As `_use` for each of `rows`, in this order; for one named twice, the first time."""

    @abstractmethod
    def _settle(self) -> RowQueue | None:
        """The queue whose first row goes next; it is not kept. None: every page is."""

    @abstractmethod
    def _remember(self, row: int, queue: RowQueue) -> None:
        """The page was evicted from this queue."""

    @abstractmethod
    def _bound_memory(self) -> None:
        """Forgets evicted pages until their number fits the capacity."""
