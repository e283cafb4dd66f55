"""Residency events for watchers: a snapshot of what is there, then every change after it, in order.

A part of the store, under the store's lock.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import numpy as np

from kvtier.core.events import EventKind, Residency
from kvtier.core.lifecycle import State
from kvtier.core.page import Tier
from kvtier.core.residents import Residents

__all__ = ["Watching"]


class Watching:
    def __init__(
        self, lock: threading.Lock, residents: Residents, open_namespaces: Mapping[int, int]
    ) -> None:
        self._lock = lock
        self._residents = residents
        self._open_namespaces = open_namespaces

    def start(self) -> tuple[int, list[Residency]]:
        """Starts recording; (sequence, the present pages as SNAPSHOT events of that sequence)."""
        with self._lock:
            self._residents.events.subscribe()
            return self._residents.events.sequence, self._snapshot()

    def stop(self) -> None:
        """Ends what `start` began."""
        with self._lock:
            self._residents.events.unsubscribe()

    def since(self, sequence: int, events_max: int) -> list[Residency]:
        """Up to `events_max` events after `sequence`. Raises WatcherBehind when some of them are
        gone."""
        with self._lock:
            return self._residents.events.since(sequence, events_max)

    def _snapshot(self) -> list[Residency]:
        table, sequence = self._residents.table, self._residents.events.sequence
        sealed = table.rows_where(state=State.SEALED)
        places = np.stack(
            [
                table.column(name)[sealed].astype(np.int64)
                for name in ("tier", "namespace", "shard", "lossy")
            ],
            axis=1,
        )
        found = []
        for tier, namespace, shard, lossy in np.unique(places, axis=0).tolist():
            if namespace not in self._open_namespaces:
                continue
            rows = sealed[(places == (tier, namespace, shard, lossy)).all(axis=1)]
            keys = table.key_np[rows].tobytes()
            found.append(
                Residency(
                    sequence, EventKind.SNAPSHOT, Tier(tier), namespace, shard, keys, bool(lossy)
                )
            )
        return found
