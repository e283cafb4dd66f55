"""The scrub: every page of a tier read again, by a process of its own, and what fails condemned.

Promise: a page is condemned only after two bad readings, one by the scrub's process and one by this
one; a page on NVMe that neither can read counts as unreadable and is given up in the same way.
While a page is read its slot cannot be reused, and no lease outlives its batch, however the batch
ends: also when the process dies, hangs or answers nonsense, or the caller is cancelled. Then this
scrub ends with a typed error, and the next one starts a new process. One scrub at a time.

Event loop's thread. `last`, `totals` and `problems` may be read by any thread.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Final, TypeAlias

from kvtier.core.page import Tier
from kvtier.core.quarantine import Why
from kvtier.daemon.scrub_process import COMMAND, ScrubProcess
from kvtier.daemon.scrub_protocol import Answer, Finding, Setup
from kvtier.daemon.scrub_walk import (
    Holding,
    NvmeFiles,
    NvmeSegments,
    ScrubCounts,
    ScrubParts,
    Walk,
)
from kvtier.errors import Busy, KvtierError, LimitExceeded, TierIOError
from kvtier.tiers.base import SHORTAGE, errno_of
from kvtier.tiers.direct_file import DirectMode

__all__ = ["NvmeFiles", "NvmeSegments", "ScrubCounts", "ScrubParts", "ScrubReport", "Scrubber"]

log = logging.getLogger(__name__)

#: How long a process may be silent, beyond what its rate explains.
_SILENCE_S: Final = 30.0
_START_S: Final = 60.0
_WAIT_S: Final = 1.0
#: Errors of a second reading that say nothing of the page: also that its device has gone meanwhile.
_NOT_THE_PAGE: Final = SHORTAGE | {errno.EBADF, errno.ECANCELED}

OnProgress: TypeAlias = Callable[[ScrubCounts], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubReport:
    """How a scrub ended: `error` is empty when it read everything. Times are monotonic seconds."""

    tier: Tier
    counts: ScrubCounts
    started_at: float
    ended_at: float
    error: str = ""


class Scrubber:
    """Scrubs of one daemon. `command`, `start_s` and `silence_s` are for tests."""

    def __init__(
        self,
        parts: ScrubParts,
        *,
        command: Sequence[str] = COMMAND,
        start_s: float = _START_S,
        silence_s: float = _SILENCE_S,
    ) -> None:
        self._parts = parts
        self._command = command
        self._start_s = start_s
        self._silence_s = silence_s
        self._tier: Tier | None = None
        self._process: ScrubProcess | None = None
        #: How the last scrub of each tier ended.
        self.last: dict[Tier, ScrubReport] = {}
        #: The counts of all scrubs of each tier together.
        self.totals: dict[Tier, ScrubCounts] = {}
        #: What the last process asked of the system and was not given: words for a warning.
        self.problems: tuple[str, ...] = ()

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The tiers that can be scrubbed."""
        return (Tier.HOST,) if self._parts.nvme is None else (Tier.HOST, Tier.NVME)

    @property
    def running(self) -> Tier | None:
        """The tier that is being scrubbed now."""
        return self._tier

    @property
    def process_pid(self) -> int | None:
        """The process of the scrub that is under way."""
        return None if self._process is None else self._process.pid

    async def run(
        self, tier: Tier, *, bytes_per_second: int, on_progress: OnProgress | None = None
    ) -> ScrubReport:
        """Reads every page that is sealed in `tier` now. `on_progress` is awaited between batches,
        with nothing held; what it raises ends the scrub.

        Raises Busy, LimitExceeded (no such tier), DaemonUnavailable and DeadlineExceeded (the
        process).
        """
        name = tier.name.lower()
        if tier not in self.tiers:
            raise LimitExceeded(
                f"the {name} tier cannot be scrubbed here",
                remedy=f"Use one of {', '.join(known.name for known in self.tiers)}.",
            )
        if self._tier is not None:
            raise Busy(
                f"a scrub of the {self._tier.name.lower()} tier is under way",
                remedy="Try again when it has ended.",
            )
        started_at, error = time.monotonic(), "an unexpected error"
        walk = Walk(self._parts, tier, bytes_per_second)
        self._tier = tier
        try:
            await self._read_all(walk, bytes_per_second, on_progress)
            error = ""
        except KvtierError as failure:
            error = str(failure)
            log.warning("scrub.failed", extra={"tier": name, "error": error})
            raise
        except asyncio.CancelledError:
            error = "ended by its caller"
            raise
        finally:
            self._tier = None
            report = self._report(walk, started_at, error)
        log.info("scrub.ended", extra={"tier": name, **asdict(walk.counts)})
        return report

    async def scrub_forever(self, interval_s: float, *, bytes_per_second: int) -> None:
        """Scrubs every tier in turn, `interval_s` after the last one ended; returns at once for 0.

        A scrub that fails is logged; the next one comes all the same.
        """
        while interval_s > 0:
            await asyncio.sleep(interval_s)
            for tier in self.tiers:
                try:
                    await self.run(tier, bytes_per_second=bytes_per_second)
                except Busy as error:
                    log.info("scrub.skipped", extra={"tier": tier.name.lower(), "why": str(error)})
                except KvtierError:
                    continue  # `run` has logged it

    def _report(self, walk: Walk, started_at: float, error: str) -> ScrubReport:
        report = ScrubReport(
            tier=walk.tier,
            counts=walk.counts,
            started_at=started_at,
            ended_at=time.monotonic(),
            error=error,
        )
        self.last[walk.tier] = report
        self.totals[walk.tier] = self.totals.get(walk.tier, ScrubCounts()).plus(walk.counts)
        return report

    async def _read_all(
        self, walk: Walk, bytes_per_second: int, on_progress: OnProgress | None
    ) -> None:
        if walk.is_done():
            return
        process = await self._start(bytes_per_second)
        try:
            self._process, self.problems = process, process.hello.problems
            log.info(
                "scrub.started",
                extra={
                    "tier": walk.tier.name.lower(),
                    "pages": walk.counts.pages_total,
                    "pid": process.pid,
                    "nice": process.hello.nice,
                    "io_idle": process.hello.io_idle,
                    "problems": "; ".join(process.hello.problems),
                },
            )
            while not walk.is_done():
                owed_s = await self._read_batch(walk, process, bytes_per_second)
                if on_progress is not None:
                    await on_progress(walk.counts)
                # Waited for here, where nothing is held, and not by the process, where the next
                # batch would wait with its leases. Whoever is told of progress can end a long wait.
                while owed_s > 0 and not walk.is_done():
                    await asyncio.sleep(min(owed_s, _WAIT_S))
                    owed_s -= _WAIT_S
                    if owed_s > 0 and on_progress is not None:
                        await on_progress(walk.counts)
            await process.end()
        except BaseException:
            await process.kill()
            raise
        finally:
            self._process = None

    async def _start(self, bytes_per_second: int) -> ScrubProcess:
        arena, nvme = self._parts.arena, self._parts.nvme
        setup = Setup(
            parent_pid=os.getpid(),
            arena_fd=arena.fd,
            arena_bytes=arena.capacity_bytes,
            segment_bytes=0 if nvme is None else nvme.segment_bytes,
            direct=DirectMode.OFF if nvme is None else nvme.direct,
            bytes_per_second=bytes_per_second,
        )
        return await ScrubProcess.start(setup, command=self._command, start_s=self._start_s)

    async def _read_batch(self, walk: Walk, process: ScrubProcess, bytes_per_second: int) -> float:
        """Reads and judges the next batch; how long to wait before the one after it."""
        owed_s = 0.0
        with Holding() as holding:
            batch, counts = walk.take(holding)
            if batch.items:
                read_bytes = sum(item.record_bytes for item in batch.items)
                within_s = self._silence_s + 2 * read_bytes / bytes_per_second
                answer = await process.check(batch, within_s=within_s)
                await self._judge(walk, holding, answer)
                owed_s = min(answer.owed_s, within_s)
        walk.count(counts)
        return owed_s

    async def _give_up(self, holding: Holding, unread: Sequence[Finding]) -> None:
        """Pages on NVMe that the process could not read: who puts one again must not hear that it
        is there."""
        if self._parts.confirm is not None:
            await self._parts.confirm()
        for found in unread:
            held = holding.pages[found.index]
            check = self._parts.recheck(held.reading, held.identity, held.key)
            try:
                if await holding.finish(found.index, check):
                    continue  # it is the process that could not
            except (Busy, TimeoutError):
                continue  # the device is offline already, or too slow to tell
            except TierIOError as error:
                if errno_of(error) in _NOT_THE_PAGE:
                    continue
            if await self._condemn(holding, found.index, Why.UNREADABLE):
                log.error(
                    "page.unreadable", extra={"tier": "nvme", "pages": 1, "why": found.reason}
                )

    async def _condemn(self, holding: Holding, index: int, why: Why) -> bool:
        """Whether that allocation was still there to be condemned."""
        held = holding.pages[index]
        is_ours = await holding.finish(index, self._parts.condemn(held.reading, why))
        if is_ours and self._parts.lost is not None and held.reading.ref.tier is Tier.NVME:
            self._parts.lost(held.namespace, held.identity.shard, held.key)
        return is_ours

    async def _judge(self, walk: Walk, holding: Holding, answer: Answer) -> None:
        """Condemns what fails here too, and what nobody can read."""
        tier = walk.tier.name.lower()
        unread = [found.reason for found in answer.io_errors]
        if answer.io_errors and walk.tier is Tier.NVME:
            await self._give_up(holding, answer.io_errors)
        for found in answer.corrupt:
            held = holding.pages[found.index]
            check = self._parts.recheck(held.reading, held.identity, held.key)
            try:
                is_whole = await holding.finish(found.index, check)
            except (TierIOError, Busy, TimeoutError) as error:
                unread.append(str(error))
                continue
            if is_whole:
                log.warning("scrub.false_alarm", extra={"tier": tier, "why": found.reason})
            elif await self._condemn(holding, found.index, Why.SCRUB):
                walk.count(ScrubCounts(pages_corrupt=1))
                log.error("page.corrupt", extra={"tier": tier, "pages": 1, "why": found.reason})
        if unread:
            walk.count(ScrubCounts(io_errors=len(unread)))
            log.warning(
                "scrub.read_failed", extra={"tier": tier, "pages": len(unread), "error": unread[0]}
            )
