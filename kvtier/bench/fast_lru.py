"""LruTailFirst with its loops compiled, for callers that name many pages a call.

State, order and outcome of every call are those of LruTailFirst, whose methods it inherits and
whose arrays it works on; a call that is given many rows at once is compiled (use_kernels.py), and
`evict_many` names many at once. Importing this needs numba (extra `fast`). One thread.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.bench import use_kernels
from kvtier.core.policy.lru import Clock, LruTailFirst
from kvtier.core.policy.use_order import BLOCK_BITS, Part, UseOrder
from kvtier.core.table import CopyTable

__all__ = ["FastLru"]

Rows = npt.NDArray[np.int64]

_NO_ENTRIES: Final = np.zeros(0, np.int32)
_NO_COUNTS: Final = np.zeros(0, np.int64)


class _FastOrder(UseOrder):
    def __init__(self, table: CopyTable) -> None:
        super().__init__(table)
        self._marks_np: Rows = np.zeros(use_kernels.MARKS, np.int64)
        self._marks_np[use_kernels.BITS] = BLOCK_BITS
        self._marks = self._marks_np.data
        self._stamps = table.column("stamp")
        self._children = table.column("children")
        self._leases = table.column("leases")
        self._parents = table.column("parent")

    def touch(self, rows: Rows, stamp: int) -> None:
        """`use` of the rows from the last to the first, with rising stamps."""
        self._make_room(len(rows))
        older, old_counts = self._enter()
        newer = self._newer
        use_kernels.touch(
            rows, stamp, self._stamps, self._place_np, self._queued_np, self._marks_np,
            newer.entries_np, newer.counts_np, older, old_counts,
        )  # fmt: skip
        self._leave()

    def arrive(self, rows: Rows, stamp: int) -> None:
        """`append` of each row, with rising stamps; it waits if no page after it is here."""
        self._make_room(len(rows))
        self._enter()
        newer = self._newer
        use_kernels.append(
            rows, stamp, self._stamps, self._children, self._place_np, self._queued_np,
            self._marks_np, newer.entries_np, newer.counts_np,
        )  # fmt: skip
        self._leave()
        self.members += len(rows)

    def evict(self, count: int) -> Rows:
        """Up to `count` rows leave; each is cut off from the page before it."""
        gone = np.empty(count, np.int64)
        older, old_counts = self._enter()
        newer = self._newer
        found = use_kernels.evict(
            gone, self._children, self._leases, self._parents, self._place_np, self._queued_np,
            self._marks_np, newer.entries_np, newer.counts_np, older, old_counts,
        )  # fmt: skip
        self._leave()
        self.members -= found
        if found and not self.members:
            self._begin_anew()
        return gone[:found]

    def _bring_over(self, old: Part, steps: int) -> None:
        new, begin = self._newer, max(old.begin, old.end - steps)
        moved, waiting = use_kernels.bring_over(
            begin - old.first, old.end - old.first, old.entries_np, old.counts_np, new.entries_np,
            new.counts_np, new.begin - new.first, new.first, self._place_np,
            BLOCK_BITS,
        )  # fmt: skip
        self.looked_at += old.end - begin
        new.begin -= moved
        new.waiting += waiting
        old.waiting -= waiting
        old.end = begin
        if old.begin == begin:
            self._older = None

    def _enter(self) -> tuple[npt.NDArray[np.int32], Rows]:
        """Writes the marks; entries and counts of the older part."""
        marks, newer, older = self._marks, self._newer, self._older
        marks[0] = self._front
        marks[1], marks[2], marks[3], marks[4] = newer.first, newer.begin, newer.end, newer.waiting
        marks[8] = self.looked_at
        if older is None:
            marks[5] = marks[6] = marks[7] = 0
            return _NO_ENTRIES, _NO_COUNTS
        marks[5], marks[6], marks[7] = older.first, older.begin, older.waiting
        return older.entries_np, older.counts_np

    def _leave(self) -> None:
        """Reads the marks."""
        marks, newer, older = self._marks, self._newer, self._older
        self._front, newer.end, newer.waiting = marks[0], marks[3], marks[4]
        self.looked_at = marks[8]
        if older is not None:
            older.waiting = marks[7]


class FastLru(LruTailFirst):
    def __init__(self, table: CopyTable, clock: Clock) -> None:
        super().__init__(table, clock)
        self._order: _FastOrder = _FastOrder(table)

    def admit_many(self, rows: Rows) -> None:
        """See Policy."""
        self._order.arrive(rows, self._clock.ticks(len(rows)))

    def touch(self, rows: Rows) -> None:
        """See Policy."""
        self._order.touch(rows, self._clock.ticks(len(rows)))

    def evict_many(self, count: int) -> Rows:
        """As `evict` of up to `count` rows, any of which may go; after each the page before it in
        column `parent` loses its child and, if nothing else keeps it, is `ready`. Theirs are the
        columns `parent` and `children` of these rows and the pages before them."""
        return self._order.evict(count)
