"""What is used, so that it stays; also what readers of a listing say they have used.

A part of the store, under its lock. Every public method is safe from any thread, but for `touch`,
whose caller holds the lock.
"""

from __future__ import annotations

import threading
from collections.abc import Container

import numpy as np
import numpy.typing as npt

from kvtier.core.counters import Counters
from kvtier.core.residents import Residents
from kvtier.core.table import NO_ROW

__all__ = ["Usage"]


class Usage:
    def __init__(
        self,
        lock: threading.Lock,
        residents: Residents,
        open_namespaces: Container[int],
        counters: Counters,
    ) -> None:
        self._lock = lock
        self._residents = residents
        self._open_namespaces = open_namespaces
        self._counters = counters

    def touch(self, rows: npt.NDArray[np.int64]) -> None:
        """Used together, the head of the chain first. The copies in lower tiers were used too: they
        are what stays when the better one goes."""
        while len(rows):
            self._residents.touch(rows)
            twins = self._residents.table.column("twin")[rows].astype(np.int64) - 1
            rows = twins[twins != NO_ROW]

    def used(
        self, namespace: int, shard: int, keys: npt.NDArray[np.uint8], *, hits: int, misses: int
    ) -> None:
        """Somebody has read the pages of `keys`, shape (n, 32), and looked up keys, by a listing.

        Pages that are gone, and namespaces that have ended, are passed over.
        """
        with self._lock:
            self._counters.lookup_hits += hits
            self._counters.lookup_misses += misses
            if len(keys) and namespace in self._open_namespaces:
                rows = self._residents.index.find_many(namespace, shard, keys)
                self.touch(rows[rows != NO_ROW])
