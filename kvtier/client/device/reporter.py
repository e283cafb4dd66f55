"""PoolReporter: tells the daemon of a pool, so that status, metrics and Watch have all tiers.

A thread looks at the pool once a second at most and tells what has changed, and every ten seconds
that it is still there. A daemon that was absent is told when it is back; one that has begun anew,
when the engine's next call has opened the session there. Nothing of the engine waits for it.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from types import TracebackType
from typing import Final

from kvtier.client.device.errors import PoolNameTaken
from kvtier.client.device.pool import DevicePool
from kvtier.client.sync import Connection
from kvtier.errors import ClientClosed, KvtierError, NotImplementedYet
from kvtier.transfer.planes.values import PoolReport

__all__ = ["PoolReporter"]

_EVERY_S: Final = 1.0
#: So many looks without a change go by before the same is told again.
_UNCHANGED_MAX: Final = 10
_DEADLINE_S: Final = 0.5


class PoolReporter:
    """Tells of `pool` under its name until closed, over a connection that has a namespace open.
    `fingerprint` is that of the namespace. `every` in seconds, not below 1. Raises PoolNameTaken
    while another reporter tells of a pool of that name over this connection.
    """

    def __init__(
        self,
        connection: Connection,
        pool: DevicePool,
        *,
        fingerprint: bytes = b"",
        every: float = _EVERY_S,
    ) -> None:
        if not connection.claim_pool_name(pool.name):
            raise PoolNameTaken(
                f"a pool named {pool.name!r} is told of over this connection already",
                remedy="give the pools names that differ, or none; close its reporter first",
            )
        self._connection = connection
        self._pool = pool
        self._fingerprint = fingerprint
        self._every_s = max(_EVERY_S, every)
        self._ended = threading.Event()
        self._is_closed = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._tell, name="kvtier-pool", daemon=True)
        self._thread.start()

    def __enter__(self) -> PoolReporter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Takes the pool back, if the daemon answers soon. Closing twice is no error."""
        self._ended.set()
        if self._pid == os.getpid() and not self._is_closed:
            self._thread.join()
            self._is_closed = True
            self._connection.give_back_pool_name(self._pool.name)

    def report(self) -> PoolReport:
        """What is told now."""
        now = self._pool.occupancy
        return PoolReport(
            name=self._pool.name,
            device=str(self._pool.device),
            fingerprint=self._fingerprint,
            page_bytes=self._pool.form.nbytes,
            pages=now.pages,
            held=now.held,
            draining=now.draining,
            pinned=now.pinned,
        )

    def _tell(self) -> None:
        told: PoolReport | None = None
        unchanged = 0
        while True:
            report = self.report()
            unchanged = unchanged + 1 if report == told else 0
            if not unchanged or unchanged >= _UNCHANGED_MAX:
                try:
                    self._connection.report_pool(report, deadline=_DEADLINE_S)
                    told, unchanged = report, 0
                except (ClientClosed, NotImplementedYet):
                    return
                except KvtierError:
                    told = None  # absent, or it has forgotten us: told again next time
            if self._ended.wait(self._every_s):
                break
        with suppress(KvtierError):
            self._connection.report_pool(report, is_gone=True, deadline=_DEADLINE_S)
