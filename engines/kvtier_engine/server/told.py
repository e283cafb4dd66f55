"""From the engine's thread to the event loop: what is said of one request, in order.

`put` is for the engine's thread, everything else for the loop in which the object was made.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

from kvtier.errors import KvtierError
from kvtier_engine.errors import RequestCancelled
from kvtier_engine.handle import Outcome
from kvtier_engine.schedule.request import Completion, Delta

__all__ = ["Told"]


class Told:
    """Counts how the request ended in `counts`, which belongs to the loop."""

    def __init__(self, counts: Counter[str]) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Outcome] = asyncio.Queue()
        self._counts = counts

    def put(self, outcome: Outcome) -> None:
        """Called in the engine's thread. After the loop has ended nobody listens."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._take, outcome)

    def end_with(self, error: KvtierError) -> None:
        """The request's end for those who wait, whatever the engine will say of it."""
        self._queue.put_nowait(error)

    async def next(self) -> Outcome:
        return await self._queue.get()

    async def end(self) -> Completion:
        """Skips the deltas. Raises the request's error."""
        while isinstance(outcome := await self._queue.get(), Delta):
            pass
        if isinstance(outcome, KvtierError):
            raise outcome
        return outcome

    def _take(self, outcome: Outcome) -> None:
        if isinstance(outcome, Completion):
            self._counts["requests_done"] += 1
        elif isinstance(outcome, RequestCancelled):
            self._counts["requests_cancelled"] += 1
        elif isinstance(outcome, KvtierError):
            self._counts["requests_failed"] += 1
        self._queue.put_nowait(outcome)
