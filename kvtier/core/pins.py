"""Leases over pages, as the store's clients see them: pin, renew, unpin, and what ends them
otherwise.

A part of the store, under the store's lock. A pinned page is not evicted; a page that is deleted or
bumped while pinned is a miss at once, and its slot is reused only after the last lease on it has
ended.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from kvtier.core.leases import LeaseBook
from kvtier.core.page import GetCode, LeaseCode
from kvtier.core.residents import Residents
from kvtier.core.table import NO_ROW

__all__ = ["Pins"]


class Pins:
    def __init__(
        self, lock: threading.Lock, residents: Residents, open_namespaces: Mapping[int, int]
    ) -> None:
        self._lock = lock
        self._residents = residents
        self._open_namespaces = open_namespaces
        self._book = LeaseBook()

    def pin(
        self,
        session: int,
        namespace: int,
        shard: int,
        keys: npt.NDArray[np.uint8],
        *,
        deadline: float,
    ) -> tuple[int, npt.NDArray[np.uint8]]:
        """(lease id, GetCode for each key): one lease over every key that is there; id 0 when none
        is."""
        with self._lock:
            if namespace not in self._open_namespaces:
                return 0, np.full(len(keys), GetCode.STALE, np.uint8)
            rows = self._residents.index.find_many(namespace, shard, keys)
            there = rows != NO_ROW
            codes = np.where(there, np.uint8(GetCode.HIT), np.uint8(GetCode.MISS))
            held = rows[there]
            if not len(held):
                return 0, codes
            self._residents.touch(held)
            self._residents.hold_many(held)
            return self._book.open(session, held.tolist(), deadline), codes

    def renew(
        self, session: int, lease_ids: Iterable[int], *, deadline: float, now: float
    ) -> list[LeaseCode]:
        """HELD with the new deadline; EXPIRED or UNKNOWN otherwise."""
        with self._lock:
            self._expire(now)
            return [self._book.renew(session, lease_id, deadline) for lease_id in lease_ids]

    def unpin(self, session: int, lease_ids: Iterable[int], *, now: float) -> list[LeaseCode]:
        """RELEASED; EXPIRED or UNKNOWN (also the second time) otherwise, and then nothing
        changes."""
        with self._lock:
            self._expire(now)
            codes = []
            for lease_id in lease_ids:
                code, rows = self._book.close(session, lease_id)
                self._release(rows)
                codes.append(code)
            return codes

    def expire(self, now: float) -> int:
        """Ends leases whose deadline has passed; how many."""
        with self._lock:
            return self._expire(now)

    def end_session(self, session: int) -> int:
        """Ends every lease of a session; how many."""
        with self._lock:
            ended = self._book.end_session(session)
            for rows in ended:
                self._release(rows)
            return len(ended)

    def count(self, session: int | None = None) -> int:
        """Live leases of a session, or of all."""
        with self._lock:
            return len(self._book) if session is None else self._book.count(session)

    def _expire(self, now: float) -> int:
        ended = self._book.expire(now)
        for rows in ended:
            self._release(rows)
        return len(ended)

    def _release(self, rows: array[int]) -> None:
        self._residents.release_many(np.array(rows, np.int64))
