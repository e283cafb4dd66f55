"""ARC, the adaptive replacement cache, giving up the tail of a chain before its head.

After N. Megiddo and D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", USENIX FAST
2003. Pages used once (T1) and pages used again (T2) are two queues in the order of use, and what
was evicted from each is remembered (B1, B2). `target` (p in the paper) is how much of the capacity
T1 is to have: a page that comes back after it was evicted from T1 raises it, one from T2 lowers it.
So a scan passes through T1 alone, and a working set that outgrows T1 claims more.

Unlike the paper a victim is named before it is known which page comes in its place, so `target`
learns from that page after the eviction and not before it. Of the rest `two_queues` tells.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.core.policy.ghosts import NO_LIST, Ghosts, mark_of
from kvtier.core.policy.lru import Clock
from kvtier.core.policy.row_queue import RowQueue
from kvtier.core.policy.two_queues import BURST_SHARE, TwoQueues
from kvtier.core.table import NO_ROW, CopyTable

__all__ = ["Arc"]

_ONCE, _AGAIN = 0, 1  # lists of the evicted: B1 and B2


class Arc(TwoQueues):
    """T1 is `young`, T2 is `old`."""

    def __init__(self, table: CopyTable, clock: Clock, *, burst_share: float = BURST_SHARE) -> None:
        super().__init__(table, clock, ghosts=Ghosts(2), burst_share=burst_share)
        self.target = 0.0

    def _queue_for(self, row: int) -> RowQueue:
        once, again = self.ghosts.counts
        came_from = self.ghosts.remove(mark_of(self._table, row))
        if came_from == NO_LIST:
            return self._young
        if came_from == _ONCE:
            self.target = min(self.target + max(1.0, again / once), float(self.capacity() + 1))
        else:
            self.target = max(self.target - max(1.0, once / again), 0.0)
        return self._old

    def _use(self, row: int) -> None:
        if self._where[row] == self._young.number:
            self._young.members -= 1
            self._old.members += 1
        if self._table.queued[row]:
            self._old.append(row)
        else:  # set aside; `ready` puts it where its last use says
            self._where[row] = self._old.number

    def _use_many(self, rows: npt.NDArray[np.int64]) -> None:
        moved = len(set(rows[self._where_np[rows] == self._young.number].tolist()))
        self._young.members -= moved
        self._old.members += moved
        is_aside = self._table.column("queued")[rows] == 0
        self._where_np[rows[is_aside]] = self._old.number
        self._old.extend(rows[~is_aside])

    def _settle(self) -> RowQueue | None:
        queues = (self._young, self._old)
        for queue in queues if self._young.members > self.target else reversed(queues):
            while (row := queue.first()) != NO_ROW:
                if not self._is_kept(row):
                    return queue
                queue.take()
        return None

    def _remember(self, row: int, queue: RowQueue) -> None:
        self.ghosts.add(mark_of(self._table, row), _ONCE if queue is self._young else _AGAIN)

    def _bound_memory(self) -> None:
        """Of all pages with one use, and of all pages, as many as fit once, and twice."""
        ghosts, capacity, pages = self.ghosts, self.capacity(), self._pages()
        self.target = min(self.target, float(capacity))
        while ghosts.counts[_ONCE] and self._young.members + ghosts.counts[_ONCE] > capacity:
            ghosts.drop_oldest(_ONCE)
        while len(ghosts) and pages + len(ghosts) > 2 * capacity:
            ghosts.drop_oldest(_AGAIN if ghosts.counts[_AGAIN] else _ONCE)
        ghosts.fit(capacity)
