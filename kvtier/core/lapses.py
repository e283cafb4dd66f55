"""Pages that are worth keeping for a time only, by when that time is over.

A page's time is its maker's `ttl`, and begins anew with each use. When it is over nothing happens:
the page is found and served as before. But when room is needed it goes before all whose time is not
over and those that have none, the tail of a chain before its head. Times are kept to the second.

Work of a call: LOOKS_MAX pages at most. A page is looked at when its time may be over, and one that
something keeps then again after a part of its time. Memory: 24 bytes for each that has a time. The
caller holds the store's lock.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Sequence
from typing import Final

from kvtier.core.lifecycle import State
from kvtier.core.page import Tier
from kvtier.core.policy.lru import Clock
from kvtier.core.table import NO_ROW, CopyTable

__all__ = ["LOOKS_MAX", "LapseQueue", "Lapses"]

LOOKS_MAX: Final = 64
#: Of its time, and at least so many seconds: after that a page is looked at again that had to stay.
_AGAIN: Final = 0.25
_AGAIN_MIN_S: Final = 1.0


class LapseQueue:
    """Those of one eviction queue. A row may be noted once while its page is there."""

    def __init__(
        self, table: CopyTable, clock: Clock, is_there: Callable[[int, int], bool]
    ) -> None:
        """`is_there(row, name)`: the page that was noted under this name is in its row still."""
        self._table = table
        self._clock = clock
        self._is_there = is_there
        # (row, name, milliseconds) of each, one after the other, by the second when it is due.
        self._by_second: dict[int, array[int]] = {}
        self._seconds: list[int] = []  # a heap of the keys
        self._due: array[int] = array("Q")
        self._at = 0

    def note(self, row: int, name: int, ttl_ms: int) -> None:
        """A page comes whose time is not 0. Of a chain the last one is noted first."""
        self._push(self._clock.seconds + ttl_ms / 1000, row, name, ttl_ms)

    def next(self, evictable: Callable[[int], bool]) -> int:
        """A row whose time is over, or NO_ROW: none with a lease, a resident child, or that
        `evictable` refuses. It is noted no more; its eviction queue still has it."""
        now, table = self._clock.seconds, self._table
        for _ in range(LOOKS_MAX):
            if self._at == len(self._due):
                if not self._seconds or self._seconds[0] > now:
                    return NO_ROW
                self._due, self._at = self._by_second.pop(heapq.heappop(self._seconds)), 0
            row, name, ttl_ms = self._due[self._at : self._at + 3]
            self._at += 3
            if not self._is_there(row, name):
                continue
            until = self._clock.seconds_of(table.stamp[row]) + ttl_ms / 1000
            if until > now:
                self._push(until, row, name, ttl_ms)
            elif table.children[row] or table.leases[row] or not evictable(row):
                wait = max(_AGAIN_MIN_S, _AGAIN * ttl_ms / 1000)
                self._push(now + wait, row, name, ttl_ms)
            else:
                return row
        return NO_ROW

    def _push(self, until: float, row: int, name: int, ttl_ms: int) -> None:
        second = int(until) + 1
        entries = self._by_second.get(second)
        if entries is None:
            entries = self._by_second[second] = array("Q")
            heapq.heappush(self._seconds, second)
        entries.extend((row, name, ttl_ms))


class Lapses:
    """Those of host memory, by size class."""

    def __init__(self, table: CopyTable, clock: Clock) -> None:
        self._table = table
        self._clock = clock
        self._queues: dict[int, LapseQueue] = {}

    def note(self, rows: Sequence[int], ttls_ms: Sequence[int]) -> None:
        """Copies have been sealed, those of a chain from its head to its tail; 0: no time."""
        if not any(ttls_ms):
            return
        table = self._table
        noted = [(row, ttl_ms) for row, ttl_ms in zip(rows, ttls_ms, strict=True) if ttl_ms]
        for row, ttl_ms in reversed(noted):
            if table.tier[row] == Tier.HOST:
                queue = self._queues.get(table.record[row])
                if queue is None:
                    queue = LapseQueue(table, self._clock, self._is_there)
                    self._queues[table.record[row]] = queue
                queue.note(row, table.generation[row], ttl_ms)

    def next(self, tier: Tier, record_bytes: int, evictable: Callable[[int], bool]) -> int:
        """See LapseQueue."""
        queue = self._queues.get(record_bytes) if tier is Tier.HOST else None
        return NO_ROW if queue is None else queue.next(evictable)

    def _is_there(self, row: int, generation: int) -> bool:
        table = self._table
        return table.generation[row] == generation and table.state[row] == State.SEALED
