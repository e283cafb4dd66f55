"""Pins with an owner and a deadline. A lease ends at its deadline, when given back, or with its
session.

Rows are held in compact arrays, so a lease over 10,000 pages is one object. Which ids expired is
remembered for a while, so that using one late says EXPIRED and not UNKNOWN. The caller holds the
store's lock and applies the returned rows; time comes in as an argument (monotonic seconds).
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from kvtier.core.page import LeaseCode

__all__ = ["Lease", "LeaseBook"]

_REMEMBERED_MAX = 65_536


@dataclass(slots=True)
class Lease:
    session: int
    deadline: float
    rows: array[int]
    queued_at: float = 0.0


class LeaseBook:
    def __init__(self) -> None:
        self._leases: dict[int, Lease] = {}
        self._of_session: dict[int, set[int]] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._expired: OrderedDict[int, int] = OrderedDict()  # lease id -> session
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._leases)

    def count(self, session: int) -> int:
        return len(self._of_session.get(session, ()))

    def open(self, session: int, rows: Iterable[int], deadline: float) -> int:
        """A lease over `rows`; the caller has raised their lease counts."""
        self._last_id += 1
        lease_id = self._last_id
        lease = self._leases[lease_id] = Lease(session, deadline, array("i", rows))
        self._of_session.setdefault(session, set()).add(lease_id)
        self._queue(lease_id, lease)
        return lease_id

    def renew(self, session: int, lease_id: int, deadline: float) -> LeaseCode:
        """Moves a live lease's deadline. Call `expire` first."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.session != session:
            return self._gone(session, lease_id)
        lease.deadline = deadline
        if deadline < lease.queued_at:  # a later one is queued when the present entry comes up
            self._queue(lease_id, lease)
        return LeaseCode.HELD

    def close(self, session: int, lease_id: int) -> tuple[LeaseCode, array[int]]:
        """Ends a lease of this session; the caller lowers the lease counts of the returned rows."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.session != session:
            return self._gone(session, lease_id), array("i")
        self._drop(lease_id)
        return LeaseCode.RELEASED, lease.rows

    def expire(self, now: float) -> list[array[int]]:
        """Ends every lease whose deadline has passed; rows of each."""
        ended = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, lease_id = heapq.heappop(self._deadlines)
            lease = self._leases.get(lease_id)
            if lease is None:
                continue  # given back
            if lease.deadline > now:  # renewed
                self._queue(lease_id, lease)
                continue
            ended.append(lease.rows)
            self._expired[lease_id] = lease.session
            if len(self._expired) > _REMEMBERED_MAX:
                self._expired.popitem(last=False)
            self._drop(lease_id)
        return ended

    def end_session(self, session: int) -> list[array[int]]:
        """Ends every lease of a session; rows of each."""
        ids = list(self._of_session.get(session, ()))
        return [self._drop(lease_id).rows for lease_id in ids]

    def _queue(self, lease_id: int, lease: Lease) -> None:
        lease.queued_at = lease.deadline
        heapq.heappush(self._deadlines, (lease.deadline, lease_id))

    def _drop(self, lease_id: int) -> Lease:
        lease = self._leases.pop(lease_id)
        owned = self._of_session[lease.session]
        owned.discard(lease_id)
        if not owned:
            del self._of_session[lease.session]
        return lease

    def _gone(self, session: int, lease_id: int) -> LeaseCode:
        if self._expired.get(lease_id) == session:
            return LeaseCode.EXPIRED
        return LeaseCode.UNKNOWN
