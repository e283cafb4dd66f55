"""Residency events: what became findable or left, in order, with a sequence number.

Kept in a bounded ring that costs nothing while nobody watches. A watcher that falls behind the ring
is told so and starts again from a snapshot. The caller holds the store's lock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import IntEnum

from kvtier.core.page import Tier

__all__ = ["EventKind", "EventLog", "Residency", "WatcherBehind"]


class EventKind(IntEnum):
    """Numbers of proto WatchKind."""

    SNAPSHOT = 1
    SNAPSHOT_END = 2
    STORED = 3
    REMOVED = 4
    BUMPED = 5
    POOL = 6
    POOL_GONE = 7
    ALIVE = 8


@dataclass(frozen=True, slots=True)
class Residency:
    """One change. `keys` are 32-byte keys, concatenated; `lossy`: a codec has rounded them."""

    sequence: int
    kind: EventKind
    tier: Tier | None
    namespace: int
    shard: int
    keys: bytes
    lossy: bool = False


class WatcherBehind(Exception):
    """Events that this watcher has not read are gone."""


class EventLog:
    def __init__(self, events_max: int) -> None:
        self._ring: deque[Residency] = deque(maxlen=events_max)
        self._watchers = 0
        self.sequence = 0

    def subscribe(self) -> None:
        self._watchers += 1

    def unsubscribe(self) -> None:
        self._watchers -= 1
        if not self._watchers:
            self._ring.clear()

    def record(
        self,
        kind: EventKind,
        tier: Tier | None,
        namespace: int,
        shard: int,
        keys: bytes,
        *,
        lossy: bool = False,
    ) -> None:
        """Numbers the change, and keeps it while somebody watches."""
        self.sequence += 1
        if self._watchers:
            self._ring.append(Residency(self.sequence, kind, tier, namespace, shard, keys, lossy))

    @property
    def is_watched(self) -> bool:
        return self._watchers > 0

    def skip(self, changes: int) -> None:
        """Numbers changes that nobody watches."""
        assert not self._watchers
        self.sequence += changes

    def since(self, sequence: int, events_max: int) -> list[Residency]:
        """Up to `events_max` events after `sequence`, or WatcherBehind."""
        missing = self.sequence - sequence
        if missing > len(self._ring):
            raise WatcherBehind(f"{missing} events behind, {len(self._ring)} kept")
        start = len(self._ring) - missing
        stop = min(len(self._ring), start + events_max)
        return [self._ring[i] for i in range(start, stop)]
