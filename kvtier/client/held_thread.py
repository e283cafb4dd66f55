"""Work that uses the caller's memory, in one thread of the connection.

Promise: when `run` ends, however it ends, the work has ended or never began, so nothing of the
caller's is used any more. `run` belongs to the connection's event loop.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvtier.transfer.planes.deadline import Deadline

__all__ = ["HeldThread"]

T = TypeVar("T")


class HeldThread:
    """The thread is started by the first work."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None

    async def run(self, work: Callable[[threading.Event], T], deadline: Deadline) -> T | None:
        """What `work` gives; None when it did not begin within half of the time.

        The event that it gets is set when the time is over or the caller is cancelled: it must end
        soon then. More cancels do not make the wait for that any shorter.
        """
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="kvtier-put")
        stop = threading.Event()
        future = self._executor.submit(work, stop)
        done = asyncio.wrap_future(future)
        now = time.monotonic()
        begin_by = now + (deadline.at - now) / 2
        cancelled: asyncio.CancelledError | None = None
        while not done.done():
            until = deadline.at if future.running() else begin_by
            wait_s = None if stop.is_set() else max(0.0, until - time.monotonic())
            try:
                await asyncio.wait([done], timeout=wait_s)
            except asyncio.CancelledError as error:
                cancelled = error
                stop.set()
            if not done.done():
                if future.cancel():
                    break
                if deadline.has_passed:
                    stop.set()
        if cancelled is not None:
            raise cancelled
        return None if future.cancelled() else future.result()

    def close(self) -> None:
        """Ends the thread when it is done with what it does now."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)
