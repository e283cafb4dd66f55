"""An event loop in a thread of its own, for callers without asyncio.

Any thread may call `run`, several at once. An interrupt in a waiting call ends that call first, so
that nothing is written to the caller's memory afterwards.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from kvtier.errors import ClientClosed

__all__ = ["Runner"]

T = TypeVar("T")

_STOP_S_MAX: Final = 2.0
_CALLS_S_MAX: Final = 0.5


class Runner:
    """One event loop in one daemon thread; runs coroutines for any thread and waits for them."""

    def __init__(self) -> None:
        # Between taking a call and beginning to stop; a handler of a signal may call in between.
        self._lock = threading.RLock()
        self._is_stopping = False
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_ignore_lost_race)
        self._thread = threading.Thread(target=self._serve, name="kvtier-client", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        ended = threading.Event()

        async def run() -> T:
            try:
                return await coroutine
            finally:
                ended.set()

        with self._lock:
            if self._is_stopping:
                coroutine.close()
                raise _closed()
            future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise _closed() from None
        finally:
            if not ended.is_set():
                # An interrupt: the call must not write to the caller's memory after it.
                future.cancel()
                ended.wait(_STOP_S_MAX)

    def stop(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs `last`, then ends loop and thread. Once."""
        with self._lock:
            self._is_stopping = True
        ending = asyncio.run_coroutine_threadsafe(self._wind_up(last), self._loop)
        if threading.current_thread() is self._thread:
            return  # the collector dropped the connection here: nothing to wait for
        try:
            ending.result(_STOP_S_MAX)
        except TimeoutError:
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_S_MAX)

    async def _wind_up(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await last()
            # Calls of other threads that this has just ended: let them say so.
            left = asyncio.all_tasks() - {asyncio.current_task()}
            if left:
                _, left = await asyncio.wait(left, timeout=_CALLS_S_MAX)
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left, timeout=_CALLS_S_MAX)
        finally:
            self._loop.call_soon(self._loop.stop)


def _closed() -> ClientClosed:
    return ClientClosed("the connection is closed", remedy="connect again")


def _ignore_lost_race(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """grpc wakes every loop of the process for one event; all but one find it taken already."""
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)
