"""Verify: a whole tier read and checked by the daemon, watched report by report.

It may take hours, so its deadline is no end but the longest silence between two reports. Whoever
stops watching ends the call.

`reports` belongs to the event loop of its connection; `watch` runs in any thread.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, Final, TypeAlias

from kvtier.client.arguments import checked_tier, whole
from kvtier.client.link import Link
from kvtier.client.settings import checked_seconds
from kvtier.core.page import Tier
from kvtier.errors import ClientClosed, ForkedClient
from kvtier.transfer.planes.values import VerifyProgress

__all__ = ["NOTHING_READ", "SILENCE_S", "OnProgress", "reports", "watch"]

OnProgress: TypeAlias = Callable[[VerifyProgress], object]

#: A daemon starts a process before its first report, and may read slowly by request.
SILENCE_S: Final = 120.0

_RATE_MAX: Final = 2**63 - 1

#: What an empty tier comes to.
NOTHING_READ: Final = VerifyProgress(pages_done=0, pages_total=0, bytes_done=0, pages_corrupt=0)


def reports(
    link: Link, tier: Tier | str, *, bytes_per_second: int, deadline: float | None
) -> AsyncGenerator[VerifyProgress, None]:
    """The daemon's reports as they come. Raises LimitExceeded at once for wrong arguments."""
    known = checked_tier(tier)
    rate = whole("bytes_per_second", bytes_per_second, 0, _RATE_MAX)
    silence_s = SILENCE_S if deadline is None else checked_seconds(deadline)
    link.check_usable()
    return _reports(link, known, rate, silence_s)


async def _reports(
    link: Link, tier: Tier, rate: int, silence_s: float
) -> AsyncGenerator[VerifyProgress, None]:
    # Silence of a reader of disks says nothing against the daemon.
    with link.watched(counts_silence=False):
        async with aclosing(link.plane.verify(tier, rate, silence_s=silence_s)) as progress:
            async for report in progress:
                yield report


def watch(
    run: Callable[[Coroutine[Any, Any, Any]], Any],
    progress: AsyncGenerator[VerifyProgress, None],
    on_progress: OnProgress | None,
) -> VerifyProgress:
    """Takes the reports one by one through `run`, so that `on_progress` is called in this thread
    and may itself call the connection. The last one.
    """
    last = NOTHING_READ
    try:
        while (report := run(_next(progress))) is not None:
            last = report
            if on_progress is not None:
                on_progress(report)
    finally:
        with suppress(ClientClosed, ForkedClient):
            run(progress.aclose())
    return last


async def _next(progress: AsyncGenerator[VerifyProgress, None]) -> VerifyProgress | None:
    return await anext(progress, None)
