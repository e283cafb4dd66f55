"""Least recently used, giving up the tail of a chain before its head.

A page is a candidate only while it has no lease and no page after it is resident, so a prefix stays
usable as long as anything of it is left. All pages wait in the order of their last use; one that a
page after it keeps is set aside at once, one that a lease keeps when it is met at the front, and
`ready` puts it back where its last use says. Work and memory of a call are those of `use_order`.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvtier.core.policy.use_order import UseOrder
from kvtier.core.table import NO_ROW, CopyTable

__all__ = ["NEVER", "Clock", "LruTailFirst"]

NEVER = 1 << 63
#: A clock remembers so many times that it was told, so far apart, and of older ones so many for
#: each length of time since.
_TOLD_MAX = 4096
_TOLD_APART_S = 1.0
_TOLD_PARTS = 64
#: After so many pages in a row that something keeps they are looked at by vector operations.
_KEPT_ONE_BY_ONE = 16


class Clock:
    """Logical time shared by all queues of a store: one tick a touched page. Beside it, for those
    who go by time, the seconds that the store was last told (monotonic; 0: never)."""

    __slots__ = ("_stamps", "_times", "now", "seconds")

    def __init__(self) -> None:
        self.now = 1
        self.seconds = 0.0
        # What `now` was when it was told the time.
        self._stamps = array("Q")
        self._times = array("d")

    def ticks(self, n: int) -> int:
        """Reserves `n` stamps and returns the first."""
        first = self.now
        self.now += n
        return first

    def tell(self, seconds: float) -> None:
        """The time; an earlier one than before changes nothing."""
        if seconds <= self.seconds:
            return
        self.seconds = seconds
        stamps, times = self._stamps, self._times
        if stamps and stamps[-1] == self.now:
            times[-1] = seconds  # nothing was used since
        elif not stamps or seconds - times[-1] >= _TOLD_APART_S:
            stamps.append(self.now)
            times.append(seconds)
            if len(stamps) > _TOLD_MAX:
                self._thin_out()

    def seconds_of(self, stamp: int) -> float:
        """When a stamp was given out: not more than _TOLD_APART_S, or a part of _TOLD_PARTS of the
        time since, later than this; 0 before the time was told first."""
        at = bisect_right(self._stamps, stamp) - 1
        return self._times[at] if at >= 0 else 0.0

    def _thin_out(self) -> None:
        """Of what is long ago less is known."""
        times, last = self._times, self.seconds
        kept = [len(times) - 1]
        for at in range(len(times) - 2, 0, -1):
            if last - times[at] >= (self.seconds - last) / _TOLD_PARTS:
                kept.append(at)
                last = times[at]
        kept = [0, *reversed(kept)]
        self._stamps = array("Q", [self._stamps[at] for at in kept])
        self._times = array("d", [times[at] for at in kept])


class LruTailFirst:
    def __init__(self, table: CopyTable, clock: Clock) -> None:
        self._table = table
        self._clock = clock
        self._order = UseOrder(table)

    @property
    def looked_at(self) -> int:
        """Entries looked at in its life."""
        return self._order.looked_at

    @property
    def nbytes(self) -> int:
        """Of the order of its rows, without the place of each."""
        return self._order.nbytes

    def admit(self, row: int) -> None:
        """See Policy."""
        self._table.stamp[row] = self._clock.ticks(1)
        self._order.append(row, waits=self._table.children[row] == 0)

    def admit_many(self, rows: npt.NDArray[np.int64]) -> None:
        """See Policy."""
        first = self._clock.ticks(len(rows))
        self._table.column("stamp")[rows] = np.arange(first, first + len(rows))
        self._order.append_many(rows, self._table.column("children")[rows] == 0)

    def touch(self, rows: npt.NDArray[np.int64]) -> None:
        """See Policy."""
        # The head gets the highest stamp: of pages used together, the tail is the older.
        n = len(rows)
        first = self._clock.ticks(n)
        self._table.column("stamp")[rows] = np.arange(first + n - 1, first - 1, -1)
        self._order.use(rows[::-1])

    def lead(self, row: int) -> None:
        """See Policy."""
        self.touch(np.array([row]))

    def keep(self, row: int) -> None:
        """See Policy."""
        if self._table.queued[row] and row in self._order:
            self._order.set_aside(row)

    def ready(self, row: int) -> None:
        """See Policy."""
        if not self._table.queued[row] and row in self._order:
            self._order.put_back(row)

    def forget(self, row: int) -> None:
        """See Policy."""
        if row in self._order:
            self._order.remove(row)

    def evict(self, evictable: Callable[[int], bool]) -> int:
        """See Policy."""
        while (row := self._settle()) != NO_ROW:
            if evictable(row):
                self._order.remove(row)
                return row
            self._order.set_aside(row)  # it waits for `ready`
        return NO_ROW

    def coldest(self) -> int:
        """See Policy."""
        row = self._settle()
        return NEVER if row == NO_ROW else self._table.stamp[row]

    def _settle(self) -> int:
        """Sets aside what something keeps until the first row is one that may go; it, or NO_ROW."""
        order, table = self._order, self._table
        kept = 0
        while (row := order.first()) != NO_ROW:
            if not (table.children[row] or table.leases[row]):
                return row
            kept += 1
            if kept < _KEPT_ONE_BY_ONE:
                order.set_aside(row)
            else:
                rows = order.first_block()
                stays = table.column("children")[rows] != 0
                stays |= table.column("leases")[rows] != 0
                order.set_aside_block(rows[: int(np.append(stays, False).argmin())])
        return NO_ROW
