"""What lies below the device: prefixes are looked for in kvtier, and what was computed goes there.

Promise: the engine never waits here. A service that is absent, killed or stopped costs a request at
most `deadline_seconds`, once in `retry_seconds`; then prompts are computed as if there were none.
Loads and offloads run in the threads of PageTransfer; methods are called by the engine's thread.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final

import kvtier
from kvtier import GetCode
from kvtier.client import Connection, Namespace
from kvtier.client.device import (
    DevicePool,
    LoadResult,
    OffloadResult,
    PageTransfer,
    PoolReporter,
    Transfer,
)
from kvtier.errors import KvtierError
from kvtier_engine.schedule.request import Request

__all__ = ["KvtierTiers"]

log = logging.getLogger(__name__)

_AWAY: Final = frozenset({GetCode.UNAVAILABLE, GetCode.TIMEOUT})


class KvtierTiers:
    """One namespace of one pool's layout. Owns neither connection nor pool; close it."""

    def __init__(
        self,
        connection: Connection,
        pool: DevicePool,
        *,
        tenant: str = "default",
        deadline_seconds: float = 0.5,
        retry_seconds: float = 1.0,
    ) -> None:
        self._namespace = connection.namespace(pool.layout, tenant=tenant)
        self._transfer = PageTransfer(pool, self._namespace, deadline=deadline_seconds)
        # So that the daemon's status shows the device tier beside its own.
        self._reporter = PoolReporter(connection, pool, fingerprint=self._namespace.fingerprint)
        self._retry_seconds = retry_seconds
        self._ask_again = 0.0
        self._offloads: list[Transfer[OffloadResult]] = []
        self.counts: Counter[str] = Counter()

    @property
    def namespace(self) -> Namespace:
        return self._namespace

    def keys(self, tokens: Sequence[int]) -> Sequence[bytes]:
        """One key for each full page of `tokens`."""
        return self._namespace.keys(tokens)

    def start_load(
        self, keys: Sequence[bytes], ids: Sequence[int], request: Request
    ) -> Transfer[LoadResult] | None:
        """Fills pages `ids`, in the background. None while the service is known to be away."""
        if time.monotonic() < self._ask_again:
            self.counts["loads_skipped"] += 1
            return None
        try:
            return self._transfer.start_load(keys, ids, session=request.session)
        except kvtier.ClientClosed as error:
            self._broken(error)
            return None

    def loaded(self, transfer: Transfer[LoadResult], pages: int) -> LoadResult | None:
        """What a load of `pages` pages came to, None while it goes on."""
        try:
            result = transfer.poll()
        except KvtierError as error:
            self._broken(error)
            result = LoadResult.of_all(pages, GetCode.UNAVAILABLE)
        if result is not None:
            for reason in result.reasons:
                self.counts[f"load_{reason.name.lower()}_pages"] += 1
            if _AWAY.intersection(result.reasons):
                self._be_away()
        return result

    def offload(self, keys: Sequence[bytes], ids: Sequence[int], request: Request) -> None:
        """Stores pages, in the background; they must not be written to any more."""
        if not keys or time.monotonic() < self._ask_again:
            self.counts["offload_skipped_pages"] += len(keys)
            return
        try:
            started = self._transfer.start_offload(keys, ids, session=request.session)
        except kvtier.ClientClosed as error:
            self._broken(error)
            return
        self._offloads.append(started)

    def poll(self) -> None:
        """Counts offloads that have ended."""
        for transfer in list(self._offloads):
            try:
                result = transfer.poll()
            except KvtierError as error:
                self._broken(error)
                result = OffloadResult(reasons=())
            if result is None:
                continue
            self._offloads.remove(transfer)
            for reason in result.reasons:
                self.counts[f"offload_{reason.name.lower()}_pages"] += 1
            if {reason.name for reason in result.reasons} & {code.name for code in _AWAY}:
                self._be_away()

    @property
    def is_idle(self) -> bool:
        """No offload is under way, as far as `poll` has seen."""
        return not self._offloads

    def drain(self, timeout_seconds: float) -> bool:
        """Waits for the offloads under way. False: some are not done in time."""
        until = time.monotonic() + timeout_seconds
        for transfer in list(self._offloads):
            try:
                transfer.wait(max(0.0, until - time.monotonic()))
            except kvtier.DeadlineExceeded:
                return False
        self.poll()
        return True

    def close(self) -> None:
        """Drops what has not begun; waits for what has, which keeps to its deadline."""
        self._reporter.close()
        self._transfer.close()
        self.poll()

    def _broken(self, error: KvtierError) -> None:
        """The connection is closed, or does not fit any more: prompts are computed from then on."""
        self.counts["transfers_broken"] += 1
        log.warning("engine.tiers_broken", extra={"error": str(error)})
        self._be_away()

    def _be_away(self) -> None:
        now = time.monotonic()
        if now >= self._ask_again:  # not again for each one that was under way
            self.counts["away"] += 1
            log.warning("engine.tiers_away", extra={"retry_seconds": self._retry_seconds})
        self._ask_again = now + self._retry_seconds
