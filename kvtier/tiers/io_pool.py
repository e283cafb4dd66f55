"""Threads for blocking I/O, in order of urgency, waited for from asyncio.

Promise: a waiting job of a more urgent class starts before one of a less urgent class, but every
fourth start is the oldest waiting job's, so that none waits for ever. All threads but one at most
(with a single thread: that one) run classes from PREFETCH on, so a get does not wait behind a
demotion that hangs. A job ends exactly once: it returned, raised, was cancelled or was dropped by
`close`; only then does nothing use its buffers any more, however long ago its waiter gave up.

A job that hangs in the system keeps its thread until the system lets go. Threads are daemonic, so
that it cannot hold up the end of the process.

Thread rule: `submit` on the event loop's thread; what a job tells comes back on that thread.
`cancel`, `close` and the properties from any thread. Work runs on a thread of the pool and may not
touch the loop.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import Enum, IntEnum, auto
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Final, Generic, TypeVar, cast

from kvtier.core.page import Tier
from kvtier.errors import Busy
from kvtier.tiers.base import TierOperation, tier_io_error

__all__ = ["IoClass", "IoJob", "IoPool"]

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Every so many starts the oldest job goes first.
_OLDEST_EVERY: Final = 4


class IoClass(IntEnum):
    """What a job is for, the most urgent first."""

    GET = 0
    PUT = 1
    """A durable put or a Flush that someone waits for."""
    PREFETCH = 2
    DEMOTE = 3
    SCRUB = 4

    @property
    def is_background(self) -> bool:
        return self >= IoClass.PREFETCH


class _Phase(Enum):
    WAITING = auto()
    STARTED = auto()
    ENDED = auto()


class IoJob(Generic[T]):
    """Work on its way through a pool; made by `IoPool.submit`."""

    def __init__(self, pool: IoPool, io_class: IoClass, work: Callable[[], T], number: int) -> None:
        self.io_class = io_class
        self.number = number
        self._pool = pool
        self._work: Callable[[], T] | None = work
        self._phase = _Phase.WAITING
        self._started_at = 0.0
        self._value: T | None = None
        self._error: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        # Says that the job has ended, not how: nobody need look at an error in it.
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._callbacks: list[Callable[[], None]] = []

    @property
    def done(self) -> bool:
        """It has ended: nothing of it runs, now or later."""
        return self._phase is _Phase.ENDED

    def running_s(self, now: float) -> float:
        """Seconds since its start, by the monotonic clock; 0 before it and after its end."""
        return max(0.0, now - self._started_at) if self._phase is _Phase.STARTED else 0.0

    async def wait(self, timeout_s: float | None) -> T:
        """What the work returned. Several may wait.

        Raises what the work raised, TierIOError for a job that was cancelled (ECANCELED) or dropped
        (EBADF), and TimeoutError when it has run for `timeout_s`; the job goes on then. Waiting for
        its turn does not count: that is not the device's doing.
        """
        left_s = timeout_s
        while not self._ended.done():
            await asyncio.wait([self._ended], timeout=left_s)
            if timeout_s is not None and not self._ended.done():
                ran_s = self.running_s(time.monotonic())
                if ran_s >= timeout_s:
                    raise TimeoutError(f"an I/O job has not ended within {timeout_s} s")
                left_s = timeout_s - ran_s
        if self._error is not None:
            raise self._error
        return cast("T", self._value)

    def cancel(self) -> bool:
        """True: it had not started and never will. False: it runs, or has ended."""
        return self._pool.withdraw(self)

    def add_done(self, callback: Callable[[], None]) -> None:
        """Call it on the loop's thread once the job has ended, however, also if it already has.

        From the loop's thread. Nothing is called when the loop is closed before.
        """
        if self._ended.done():
            self._loop.call_soon(callback)
        else:
            self._callbacks.append(callback)

    def start(self) -> None:
        """For the pool, under its lock."""
        self._phase = _Phase.STARTED
        self._started_at = time.monotonic()

    def run(self) -> BaseException | None:
        """For the pool's thread: what the work raised, to be given to `end`."""
        assert self._work is not None, "a job runs once"
        outcome = _Outcome()
        with outcome:
            self._value = self._work()
        return outcome.error

    def end(self, error: BaseException | None) -> None:
        """For the pool: nothing will touch the job's buffers after this."""
        self._error = error
        self._work = None  # with all the memory that it holds
        self._phase = _Phase.ENDED
        try:
            self._loop.call_soon_threadsafe(self._settle)
        except RuntimeError:  # the loop is closed, and with it everybody who could wait
            log.info("io_pool.ended_unheard", extra={"job": self.number})

    def _settle(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._loop.call_soon(callback)


class _Outcome:
    """Takes whatever a block raises: it belongs to the waiter, and the thread must go on."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self.error = error
        return True


class IoPool:
    """`threads` daemon threads called `name`-0 and so on; at most `queue_max` jobs wait."""

    def __init__(self, threads: int, name: str, queue_max: int) -> None:
        assert threads > 0 < queue_max, (threads, queue_max)
        self._name = name
        self._queue_max = queue_max
        self._background_max = max(1, threads - 1)
        self._numbers = itertools.count()
        # Under the lock: who waits, who runs, and what was given to a thread.
        self._lock = threading.Lock()
        self._waiting: dict[IoClass, deque[IoJob[Any]]] = {kind: deque() for kind in IoClass}
        self._running: set[IoJob[Any]] = set()
        self._starts = 0
        self._is_closed = False
        self._given: SimpleQueue[IoJob[Any] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Jobs that have not started."""
        return sum(len(jobs) for jobs in self._waiting.values())

    @property
    def running(self) -> int:
        """Jobs that have started and not ended."""
        return len(self._running)

    def longest_s(self, now: float) -> float:
        """How long the oldest running job has been running, by the monotonic clock; 0 for none."""
        with self._lock:
            return max((job.running_s(now) for job in self._running), default=0.0)

    def submit(self, io_class: IoClass, work: Callable[[], T]) -> IoJob[T]:
        """Runs `work` as soon as a thread may. Raises Busy when too many jobs wait, or when closed.

        A job that can start at once never counts as waiting.
        """
        job = IoJob(self, io_class, work, next(self._numbers))
        with self._lock:
            if self._is_closed:
                raise Busy(f"{self._name} is closed", remedy="nothing: the tier is going away")
            if self.waiting >= self._queue_max and not self._can_start(io_class):
                raise Busy(
                    f"{self.waiting} jobs wait for {self._name}",
                    remedy="try again later, or raise nvme.queue_pages_max",
                )
            self._waiting[io_class].append(job)
            self._start_next()
        return job

    def withdraw(self, job: IoJob[Any]) -> bool:
        """See IoJob.cancel."""
        with self._lock:
            try:
                self._waiting[job.io_class].remove(job)
            except ValueError:
                return False
        cause = OSError(errno.ECANCELED, "the job was cancelled before it started")
        job.end(tier_io_error(Tier.NVME, TierOperation.OPEN, cause))
        return True

    def close(self, wait_s: float) -> bool:
        """Refuses new jobs, drops those that wait, waits so long for those that run.

        True if all threads have ended. Again waits again. A closed pool's late jobs are still
        told to their loop.
        """
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
            dropped = [job for jobs in self._waiting.values() for job in jobs]
            for jobs in self._waiting.values():
                jobs.clear()
        for job in dropped:
            cause = OSError(errno.EBADF, "the pool was closed before the job started")
            job.end(tier_io_error(Tier.NVME, TierOperation.OPEN, cause))
        if is_first:
            for _ in self._threads:
                self._given.put(None)
        deadline = time.monotonic() + wait_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _serve(self) -> None:
        while (job := self._given.get()) is not None:
            error = job.run()
            with self._lock:
                self._running.discard(job)
                self._start_next()
            job.end(error)  # after that: its waiter may find the thread free
            del job, error  # or their memory stays for as long as the thread is idle

    def _start_next(self) -> None:
        """Gives jobs to threads while both are free; under the lock."""
        while (job := self._take()) is not None:
            job.start()
            self._starts += 1
            self._running.add(job)
            self._given.put(job)

    def _take(self) -> IoJob[Any] | None:
        able = [jobs for kind, jobs in self._waiting.items() if jobs and self._can_start(kind)]
        if not able:
            return None
        if self._starts % _OLDEST_EVERY == _OLDEST_EVERY - 1:
            return min(able, key=lambda jobs: jobs[0].number).popleft()
        return able[0].popleft()

    def _can_start(self, io_class: IoClass) -> bool:
        if len(self._running) >= len(self._threads):
            return False
        background = sum(job.io_class.is_background for job in self._running)
        return not io_class.is_background or background < self._background_max
