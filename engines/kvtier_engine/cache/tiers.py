"""What lies below the device: prefixes are looked for in kvtier, and what was computed goes there.

Promise: the engine never waits here. A service that is absent, killed or stopped costs a request at
most `deadline_seconds`, once in `retry_seconds`; then prompts are computed as if there were none.
Whatever a transfer raises is counted and logged, and its pages are computed: an error of the client
(it is closed, say) as the outcome that it is, in a line; any other with its traceback. Only what
says that the service cannot be used (`transfers_broken`) keeps others from asking it; what one
request brings on itself, or a device raises (`transfers_failed`), does not.
Loads and offloads run in the threads of PageTransfer; methods are called by the engine's thread.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final, TypeVar

from kvtier import GetCode, PutCode
from kvtier.client import Connection, Namespace
from kvtier.client.device import (
    DevicePool,
    LayeredLoad,
    LoadResult,
    OffloadResult,
    PageNotHeld,
    PageTransfer,
    PoolReporter,
    Transfer,
)
from kvtier.client.device.streams import CopyStream
from kvtier.errors import InvalidInput, KvtierError, LayoutError
from kvtier_engine.errors import EngineInconsistent
from kvtier_engine.guard import attempted
from kvtier_engine.schedule.request import Request

__all__ = ["KvtierTiers"]

log = logging.getLogger(__name__)

R = TypeVar("R")

_AWAY: Final = frozenset({GetCode.UNAVAILABLE, GetCode.TIMEOUT})
_AWAY_PUT: Final = frozenset({PutCode.UNAVAILABLE, PutCode.TIMEOUT})


class KvtierTiers:
    """One namespace of one pool's layout. Owns neither connection nor pool; close it. Copies run on
    `stream`, by default one of the pool's device. Raises PoolNameTaken for a pool whose name
    another has on this connection.
    """

    def __init__(
        self,
        connection: Connection,
        pool: DevicePool,
        *,
        tenant: str = "default",
        deadline_seconds: float = 0.5,
        retry_seconds: float = 1.0,
        stream: CopyStream | None = None,
    ) -> None:
        self._namespace = connection.namespace(pool.layout, tenant=tenant)
        self._transfer = PageTransfer(
            pool, self._namespace, deadline=deadline_seconds, stream=stream
        )
        with contextlib.ExitStack() as undo:
            undo.callback(self._transfer.close)
            # So that the daemon's status shows the device tier beside its own.
            self._reporter = PoolReporter(connection, pool, fingerprint=self._namespace.fingerprint)
            undo.pop_all()
        self._retry_seconds = retry_seconds
        self._ask_again = 0.0
        self._loads: list[LayeredLoad] = []
        #: Given up, or known and used already: they may still write to their pages.
        self._ending: list[LayeredLoad] = []
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
    ) -> LayeredLoad | None:
        """Fills pages `ids`, in the background and layer by layer. None while the service is known
        to be away, and where the transfer cannot begin. Raises PageNotHeld.
        """
        if time.monotonic() < self._ask_again:
            self.counts["loads_skipped"] += 1
            return None
        transfer = self._started(
            partial(self._transfer.start_layered_load, keys, ids, session=request.session)
        )
        if transfer is not None:
            self._loads.append(transfer)
        return transfer

    def loaded(self, transfer: LayeredLoad, pages: int) -> LoadResult | None:
        """What a load of `pages` pages came to, None while that is not known. Layers of the hits
        may be on their way: the transfer's `hold` comes before the reading of each.
        """
        result = _outcome(transfer.arrived, "load")
        if result is None:
            return None
        self._loads.remove(transfer)
        # Also one that is done by now: it was not when its outcome was asked for, perhaps, and its
        # copies may have failed since. `poll` notes that; what is raised here is noted once, here.
        if not isinstance(result, Exception) or not transfer.is_done:
            self._ending.append(transfer)
        if isinstance(result, Exception):
            self._note(result)
            result = LoadResult.of_all(pages, GetCode.UNAVAILABLE)
        elif away := _AWAY.intersection(result.reasons):
            self._be_away(_names(away))
        for reason in result.reasons:
            self.counts[f"load_{reason.name.lower()}_pages"] += 1
        return result

    def give_up(self, transfer: LayeredLoad) -> None:
        """Nobody wants this load any more. Its pages may be written to until it has ended."""
        transfer.cancel()
        self._loads.remove(transfer)
        self._ending.append(transfer)

    def offload(self, keys: Sequence[bytes], ids: Sequence[int], request: Request) -> None:
        """Stores pages, in the background; they must not be written to any more. Raises
        PageNotHeld.
        """
        if not keys or time.monotonic() < self._ask_again:
            self.counts["offload_skipped_pages"] += len(keys)
            return
        transfer = self._started(
            partial(self._transfer.start_offload, keys, ids, session=request.session)
        )
        if transfer is None:
            self.counts["offload_skipped_pages"] += len(keys)
        else:
            self._offloads.append(transfer)

    def poll(self) -> None:
        """Counts offloads that have ended, and forgets loads of which nobody asks any more."""
        for load in [one for one in self._ending if one.is_done]:
            self._ending.remove(load)
            ended = _outcome(load.poll, "load")
            if isinstance(ended, Exception):
                self._note(ended)
        for transfer in [one for one in self._offloads if one.is_done]:
            self._offloads.remove(transfer)
            result = _outcome(transfer.poll, "offload")
            if isinstance(result, Exception):
                self._note(result)
            elif result is not None:
                for reason in result.reasons:
                    self.counts[f"offload_{reason.name.lower()}_pages"] += 1
                if away := _AWAY_PUT.intersection(result.reasons):
                    self._be_away(_names(away))

    def wait(self, seconds: float) -> bool:
        """Until a transfer is done, as far as can be told from the one longest under way, or that
        long. False, at once, when none is under way.
        """
        under_way: list[LayeredLoad | Transfer[OffloadResult]]
        under_way = [*self._loads, *self._ending, *self._offloads]
        if not under_way:
            return False
        if not any(transfer.is_done for transfer in under_way):
            attempted(partial(under_way[0].wait, seconds), None)  # `poll` says how it ended
        return True

    @property
    def is_idle(self) -> bool:
        """No offload is under way, as far as `poll` has seen."""
        return not self._offloads

    def drain(self, timeout_seconds: float) -> bool:
        """Waits for the offloads under way. False: some are not done in time."""
        until = time.monotonic() + timeout_seconds
        for transfer in list(self._offloads):
            attempted(partial(transfer.wait, max(0.0, until - time.monotonic())), None)
        self.poll()
        return self.is_idle

    def close(self) -> None:
        """Drops what has not begun; waits for what has, which keeps to its deadline."""
        self._reporter.close()
        self._transfer.close()
        self.poll()

    def _started(self, start: Callable[[], R]) -> R | None:
        transfer = _outcome(start, "transfer")
        if isinstance(transfer, PageNotHeld):  # nothing of the service: the caller's table is wrong
            raise transfer
        if isinstance(transfer, Exception):
            self._note(transfer)
            return None
        return transfer

    def _note(self, error: Exception) -> None:
        """Does this say that nobody can use the service (it is closed, or does not fit), or is it
        of one transfer alone?
        """
        if not isinstance(error, KvtierError):  # logged in full, where it was raised
            self.counts["transfers_failed"] += 1
            return
        why = f"{type(error).__name__}: {error}"
        if isinstance(error, InvalidInput) and not isinstance(error, LayoutError):
            self.counts["transfers_failed"] += 1
            log.warning("engine.transfer_refused", extra={"why": why})
        else:
            self.counts["transfers_broken"] += 1
            self._be_away(why)

    def _be_away(self, why: str) -> None:
        now = time.monotonic()
        if now >= self._ask_again:  # not again for each one that was under way
            self.counts["away"] += 1
            log.warning(
                "engine.tiers_away", extra={"why": why, "retry_seconds": self._retry_seconds}
            )
        self._ask_again = now + self._retry_seconds


def _outcome(work: Callable[[], R], what: str) -> R | Exception:
    """What `work` returns or raised. The client's errors are outcomes, which `_note` tells of;
    what is none of them is logged under `what`, as whatever crashes.
    """

    def told() -> R | KvtierError:
        try:
            return work()
        except EngineInconsistent:
            raise
        except KvtierError as error:
            return error

    return attempted(told, what)


def _names(codes: Iterable[enum.Enum]) -> str:
    return ", ".join(sorted(code.name for code in codes))
