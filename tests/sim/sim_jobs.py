"""I/O of a simulated NVMe tier, one job at a time: it starts, is done and tells, each by an event
of its own, in any order with everything else, sometimes long after its waiter has given up.
"""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from enum import Enum, auto
from typing import Any, Generic, Protocol, TypeVar

from kvtier.core.page import Tier
from kvtier.errors import TierIOError
from kvtier.testing.faulty_tier import FaultyTier
from kvtier.tiers.base import SLOT_BYTES, Buffer, TierOperation, flat_bytes, tier_io_error
from tests.sim.scheduler import Scheduler

__all__ = ["Phase", "SimDevice", "SimJob"]

T = TypeVar("T")


class SimDevice:
    """A FaultyTier that knows when the machine is going down: then only parts of a write arrive."""

    def __init__(self, faulty: FaultyTier, rng: random.Random) -> None:
        self.faulty = faulty
        self.is_ending = False
        self._rng = rng

    @property
    def tier(self) -> Tier:
        return self.faulty.tier

    @property
    def capacity_bytes(self) -> int:
        return self.faulty.capacity_bytes

    def write(self, slot: int, parts: Sequence[Buffer], offset: int = 0) -> None:
        if not self.is_ending:
            self.faulty.write(slot, parts, offset)
            return
        data = b"".join(flat_bytes(part) for part in parts)
        for at in range(0, len(data), SLOT_BYTES):
            if self._rng.random() < 0.5:
                self.faulty.inner.write(slot, [data[at : at + SLOT_BYTES]], offset + at)

    def read(self, slot: int, offset: int, into: Buffer) -> None:
        if self.is_ending:
            raise _error(errno.EIO, slot)
        self.faulty.read(slot, offset, into)

    def sync(self) -> None:
        self.faulty.sync()

    def close(self) -> None:
        self.faulty.close()


class Owner(Protocol):
    """The lower tier, as its jobs see it."""

    scheduler: Scheduler

    def is_timeout(self) -> bool: ...
    def take_slow(self) -> bool: ...
    def watching(self, slot: int) -> AbstractContextManager[None]: ...
    def left_alone(self, job: SimJob[Any]) -> None: ...
    def ended(self, job: SimJob[Any]) -> None: ...


class Phase(Enum):
    WAITING = auto()
    STARTED = auto()
    ENDED = auto()


class SimJob(Generic[T]):
    """See io_pool.IoJob. Each step of its way is an event: it starts, it is done, it tells."""

    def __init__(self, owner: Owner, slot: int, work: Callable[[], T]) -> None:
        self.slot = slot
        self.phase = Phase.WAITING
        self._owner = owner
        self._work: Callable[[], T] | None = work
        self._value: T | None = None
        self._error: TierIOError | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._callbacks: list[Callable[[], None]] = []
        self._next = self._start
        self.event = owner.scheduler.add(self._go_on)

    @property
    def done(self) -> bool:
        return self.phase is Phase.ENDED

    @property
    def is_waited_for(self) -> bool:
        return bool(self._waiters)

    async def wait(self, timeout_s: float | None) -> T:
        if not self.done:
            waiter = self._owner.scheduler.loop.create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            finally:
                if waiter in self._waiters:
                    self._waiters.remove(waiter)
                    self._owner.left_alone(self)
        if not self.done:
            raise TimeoutError(f"an I/O job has not ended within {timeout_s} s")
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def cancel(self) -> bool:
        if self.phase is not Phase.WAITING:
            return False
        self.drop(errno.ECANCELED)
        return True

    def add_done(self, callback: Callable[[], None]) -> None:
        if self.done:
            self._owner.scheduler.loop.call_soon(callback)
        else:
            self._callbacks.append(callback)

    def delay(self) -> None:
        """Nobody waits any more, and it takes its time."""
        self._owner.scheduler.discard(self.event)
        self.event = self._owner.scheduler.add(self._go_on, late=True)

    def drop(self, number: int) -> None:
        """It never starts."""
        self._owner.scheduler.discard(self.event)
        self._error = _error(number, self.slot)
        self._end()

    def tear(self) -> None:
        """The machine goes down while it runs."""
        if self.phase is Phase.STARTED and self._work is not None:
            self._try(self._work)

    def _go_on(self) -> None:
        if self._waiters and self._owner.is_timeout():
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                _tell(waiter)
            self.delay()
        else:
            self._next()

    def _start(self) -> None:
        self.phase = Phase.STARTED
        self._then(self._run)

    def _run(self) -> None:
        assert self._work is not None
        with self._owner.watching(self.slot):
            self._try(self._work)
        self._work = None
        self._then(self._end)

    def _try(self, work: Callable[[], T]) -> None:
        try:
            self._value = work()
        except TierIOError as error:
            self._error = error

    def _then(self, step: Callable[[], None]) -> None:
        self._next = step
        self.event = self._owner.scheduler.add(self._go_on, late=self._owner.take_slow())

    def _end(self) -> None:
        self.phase = Phase.ENDED
        self._work = None
        self._owner.ended(self)
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            _tell(waiter)
        for callback in self._callbacks:
            self._owner.scheduler.loop.call_soon(callback)
        self._callbacks = []


def _tell(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _error(number: int, slot: int) -> TierIOError:
    cause = OSError(number, "simulated")
    return tier_io_error(Tier.NVME, TierOperation.WRITE, cause, slot=slot)
