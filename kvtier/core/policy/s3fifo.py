"""S3-FIFO, three queues without any order of use, giving up the tail of a chain before its head.

After J. Yang, Y. Zhang, Z. Qiu, Y. Yue and R. Vinayak, "FIFO Queues are All You Need for Cache
Eviction", SOSP 2023. A new page waits in a small queue of a tenth of the capacity. At its end it
goes on to the main queue if it was used more than once there, else it is evicted and remembered; a
page that comes back while it is remembered goes to the main queue at once. At the end of the main
queue a page that was used goes round once more for each use, of three at most, and an unused one is
evicted. So what is used once passes quickly, and a use costs a counter.

As many evicted pages are remembered as the main queue has room for. After every page that goes on
from the small queue it is asked anew which of the two has to give one up. Of the rest `two_queues`
tells.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.core.policy.ghosts import NO_LIST, Ghosts, mark_of
from kvtier.core.policy.lru import Clock
from kvtier.core.policy.row_queue import RowQueue
from kvtier.core.policy.two_queues import BURST_SHARE, TwoQueues
from kvtier.core.table import NO_ROW, CopyTable

__all__ = ["S3Fifo"]

_USES_MAX = 3
_USES_TO_GO_ON = 2
_SMALL_PART = 10  # of the capacity: one in so many
#: Steps one by one for one victim: so many, and one in so many of the pages. That is about what
#: `_many_steps` costs.
_STEPS_MIN = 256
_STEPS_PART = 64


class S3Fifo(TwoQueues):
    """The small queue is `young`, the main queue is `old`."""

    def __init__(self, table: CopyTable, clock: Clock, *, burst_share: float = BURST_SHARE) -> None:
        super().__init__(table, clock, ghosts=Ghosts(1), burst_share=burst_share)
        self._uses_np: npt.NDArray[np.uint8] = np.zeros(table.rows_max, np.uint8)
        self._uses = self._uses_np.data

    def admit_many(self, rows: npt.NDArray[np.int64]) -> None:
        """See Policy."""
        self._uses_np[rows] = 0
        super().admit_many(rows)

    def _queue_for(self, row: int) -> RowQueue:
        self._uses[row] = 0
        is_back = self.ghosts.remove(mark_of(self._table, row)) != NO_LIST
        return self._old if is_back else self._young

    def _use(self, row: int) -> None:
        self._uses[row] = min(self._uses[row] + 1, _USES_MAX)

    def _use_many(self, rows: npt.NDArray[np.int64]) -> None:
        self._uses_np[rows] = np.minimum(self._uses_np[rows] + 1, _USES_MAX)

    def _settle(self) -> RowQueue | None:
        small, main = self._young, self._old
        steps = 0
        while True:
            queue = small if self._gives_small() else main
            if (row := queue.first()) == NO_ROW:
                queue = main if queue is small else small
                if (row := queue.first()) == NO_ROW:
                    return None
            if queue is small and self._uses[row] >= _USES_TO_GO_ON:
                small.take()
                small.members -= 1
                main.append(row)
                main.members += 1
                self._uses[row] = 0
            elif self._is_kept(row):
                queue.take()
            elif queue is main and self._uses[row]:
                main.take()
                main.append(row)
                self._uses[row] -= 1
            else:
                return queue
            steps += 1
            if steps > _STEPS_MIN + self._pages() // _STEPS_PART:
                self._many_steps()
                steps = 0

    def _gives_small(self) -> bool:
        return self._young.members * _SMALL_PART >= self.capacity()

    def _many_steps(self) -> None:
        """What many turns of `_settle` come to, in one pass: a million pages of three uses each
        would keep the lock for seconds."""
        if self._gives_small():
            self._go_on()
        else:
            self._go_round()

    def _go_on(self) -> None:
        """The small queue up to the first page to evict, or until it is small."""
        small, main, uses = self._young, self._old, self._uses_np
        rows = small.waiting()
        is_popular = uses[rows] >= _USES_TO_GO_ON
        surplus = small.members - (self.capacity() - 1) // _SMALL_PART
        ends = np.flatnonzero(~(is_popular | self._are_kept(rows)))
        ends = np.append(ends, np.flatnonzero(np.cumsum(is_popular) > surplus))
        end = int(ends.min(initial=len(rows)))
        rows, is_popular = rows[:end], is_popular[:end]
        popular = rows[is_popular]
        self._table.column("queued")[rows[~is_popular]] = 0  # kept: `ready` puts them back
        uses[popular] = 0
        main.extend(popular)
        small.members -= len(popular)
        main.members += len(popular)

    def _go_round(self) -> None:
        """The main queue up to the first page without uses left. A full round leaves the order as
        it was and takes a use from all, so full rounds are taken at once."""
        main, uses = self._old, self._uses_np
        rows = main.waiting()
        free = ~self._are_kept(rows)
        if not bool(free.any()):
            return
        least = uses[rows[free]].min()
        uses[rows] -= np.minimum(uses[rows], least)
        passed = rows[: int(np.argmax(free & (uses[rows] == 0)))]
        uses[passed] -= np.minimum(uses[passed], np.uint8(1))
        main.rotate(len(passed))

    def _are_kept(self, rows: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        table = self._table
        kept: npt.NDArray[np.bool_] = table.column("children")[rows] != 0
        kept |= table.column("leases")[rows] != 0
        return kept

    def _remember(self, row: int, queue: RowQueue) -> None:
        if queue is self._young:
            self.ghosts.add(mark_of(self._table, row), 0)

    def _bound_memory(self) -> None:
        capacity = self.capacity()
        while len(self.ghosts) > capacity - capacity // _SMALL_PART:
            self.ghosts.drop_oldest(0)
        self.ghosts.fit(capacity)
