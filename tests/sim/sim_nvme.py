"""The devices of a simulated NVMe tier, and what goes wrong with them.

`SimLower` is the mover's Lower over one FaultyTier, with the same manners as daemon/devices.py: a
device that does not answer goes offline with its pages, and comes back empty. What an injected
fault did to the bytes of a page is told to `hurt`, so that the oracle knows.
"""

from __future__ import annotations

import asyncio
import errno
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np

from kvtier.core.lifecycle import State
from kvtier.core.page import Tier
from kvtier.core.room import Lost
from kvtier.core.store import Store
from kvtier.daemon.durability import Durability
from kvtier.errors import Busy, DirectoryError, TierIOError
from kvtier.testing.faulty_tier import FaultKind, FaultyTier
from kvtier.tiers.base import SLOT_BYTES
from kvtier.tiers.io_pool import IoClass
from kvtier.tiers.nvme_geometry import slab_number, split_slab
from tests.sim.scheduler import Scheduler
from tests.sim.sim_disk import StateDisk
from tests.sim.sim_jobs import Phase, SimDevice, SimJob

__all__ = ["SEGMENT_BYTES", "Chances", "SimLower"]

SEGMENT_BYTES = 64 << 10
UNITS = SEGMENT_BYTES // SLOT_BYTES
_QUEUE_MAX = 16
_FAILURES_MAX = 4
#: Faults after which the bytes of a page are not what was written, or do not read as they are.
_HURTING = frozenset((FaultKind.FLIP, FaultKind.TORN))

T = TypeVar("T")
#: (namespace number, shard, key)
Name = tuple[int, int, bytes]


@dataclass(slots=True)
class Health:
    segments_max: int
    online: bool = True
    failures: int = 0
    has_no_room: bool = False
    segments: set[int] = field(default_factory=set)
    lost: list[Lost] = field(default_factory=list)
    stuck: list[SimJob[Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chances:
    """How often what happens to the devices, each a probability."""

    timeout: float = 0.0  # a step of a job takes too long
    no_room: float = 0.0  # a segment cannot be made
    slow: float = 0.0  # a step of a job takes its time


class SimLower:
    """kvtier.transfer.mover.Lower of one boot."""

    timeout_s = 1.0
    segment_bytes = SEGMENT_BYTES

    def __init__(
        self,
        store: Store,
        durability: Durability,
        device: SimDevice,
        scheduler: Scheduler,
        rng: random.Random,
        *,
        disk: StateDisk,
        segments_max: Sequence[int],
        chances: Chances,
        hurt: Callable[[Name], None],
        withdrawn: Callable[[], None],
        going: Callable[[int], None],
        returned: Callable[[int], None],
        absent: Collection[int],
    ) -> None:
        self.tier = device
        self.scheduler = scheduler
        self.jobs: list[SimJob[Any]] = []
        self.health = [
            Health(segments_max=count, online=number not in absent)
            for number, count in enumerate(segments_max)
        ]
        self.timeouts = 0
        self.offline_times = 0
        self.forgotten: Counter[bool] = Counter()
        self._store = store
        self._durability = durability
        self._rng = rng
        self._disk = disk
        self.chances = chances
        self._hurt = hurt
        self._withdrawn = withdrawn
        self._going = going
        self._returned = returned
        self._absent = absent  # in this boot
        self.spared: Collection[int] = ()  # segments that a start could not read
        self._growing = asyncio.Lock()
        self._is_slow = False

    # -- Lower -----------------------------------------------------------------------------------

    def submit(self, io_class: IoClass, slot: int, work: Callable[[], T]) -> SimJob[T]:
        waiting = sum(job.phase is Phase.WAITING for job in self.jobs)
        if not self.health[_device(slot)].online or waiting >= _QUEUE_MAX:
            raise Busy(f"{waiting} jobs wait", remedy="try again later")
        job = SimJob(self, slot, work)
        self.jobs.append(job)
        return job

    def serves(self, slot: int) -> bool:
        is_online = self.health[_device(slot)].online
        if not is_online:
            self._withdrawn()  # its pages are gone, also those that are still in the books
        return is_online

    def report(self, slot: int, error: TierIOError | TimeoutError | None) -> None:
        health = self.health[_device(slot)]
        if error is None:
            health.failures = 0
            return
        health.failures += 1
        if isinstance(error, TimeoutError) or health.failures >= _FAILURES_MAX:
            self.take_offline(_device(slot))

    async def grow(self, record_bytes: int) -> None:
        async with self._growing:
            while not self._store.room.has_free(Tier.NVME, record_bytes):
                number = self._next_to_grow()
                if number is None:
                    return
                await self._add_segment(number)

    async def prepare(self, slot: int, record_bytes: int) -> None:
        await self._durability.mark(slot // UNITS, record_bytes)

    async def forget(self, generation: int) -> None:
        try:
            await self._durability.forget([generation])
        except DirectoryError:
            self.forgotten[False] += 1
        else:
            self.forgotten[True] += 1

    # -- what a daemon does with its devices -----------------------------------------------------

    def adopt(self, slabs: Sequence[int]) -> None:
        """The segments that a start finds."""
        for slab in slabs:
            number, local = split_slab(slab)
            self.health[number].segments.add(local)
            self._store.room.grant(Tier.NVME, slab)

    async def sync(self, done: Callable[[], None]) -> None:
        """`done` is called in the moment that everything written is safe."""

        def sync() -> None:
            self.tier.sync()
            done()

        for number, health in enumerate(self.health):
            if health.online:
                try:
                    await self.submit(IoClass.DEMOTE, slab_number(number, 0) * UNITS, sync).wait(1)
                except Busy:
                    return
                except (TierIOError, TimeoutError):
                    self.take_offline(number)

    def take_offline(self, number: int) -> None:
        """What waits for the device fails now; what hangs in it keeps it offline."""
        health = self.health[number]
        if not health.online:
            return
        self._going(number)
        health.online, health.failures = False, 0
        self.offline_times += 1
        for job in [job for job in self.jobs if _device(job.slot) == number]:
            if job.phase is Phase.WAITING:
                job.drop(errno.EBADF)
            else:
                health.stuck.append(job)
        slabs = [slab_number(number, local) for local in sorted(health.segments)]
        lost = self._store.room.close(Tier.NVME, slabs)
        health.lost.append(lost)
        if len(lost):
            self._durability.wait_for({number: len(lost)})
        health.segments.clear()
        self._withdrawn()

    def sweep(self, pages_max: int) -> None:
        """Takes some of the pages of devices that went offline out of the books."""
        for health in self.health:
            if health.lost:
                if not self._store.room.clear(health.lost[0], pages_max):
                    del health.lost[0]
                self._withdrawn()

    def retry(self) -> None:
        """Devices come back, and have room again."""
        for number, health in enumerate(self.health):
            health.has_no_room = False
            health.stuck = [job for job in health.stuck if not job.done]
            if not (health.online or health.stuck or number in self._absent):
                health.online, health.failures = True, 0
                self._returned(number)

    def _next_to_grow(self) -> int | None:
        able = [
            number
            for number, health in enumerate(self.health)
            if health.online
            and not health.has_no_room
            and len(health.segments) < health.segments_max
        ]
        return min(able, key=lambda number: len(self.health[number].segments), default=None)

    async def _add_segment(self, number: int) -> None:
        health = self.health[number]
        local = self._free_number(number)
        if local is None:
            health.has_no_room = True  # something in all of them is still being read from before
            return
        slab = slab_number(number, local)
        await self.scheduler.pause()
        if self._rng.random() < self.chances.no_room:
            health.has_no_room = True
        else:
            self._disk.segments.add(slab)
            await self.scheduler.pause()
            if health.online:
                health.segments.add(local)
                self._store.room.grant(Tier.NVME, slab)

    def _free_number(self, number: int) -> int | None:
        health = self.health[number]
        for local in range(health.segments_max):
            slab = slab_number(number, local)
            is_taken = local in health.segments or slab in self.spared
            if not is_taken and self._store.room.can_grant(Tier.NVME, slab):
                return local
        return None

    @property
    def is_at_work(self) -> bool:
        """Bytes are being read or written now."""
        return any(job.phase is Phase.STARTED for job in self.jobs)

    # -- for the jobs ----------------------------------------------------------------------------

    def is_timeout(self) -> bool:
        is_it = self._rng.random() < self.chances.timeout
        self.timeouts += is_it
        return is_it

    def take_slow(self) -> bool:
        is_slow, self._is_slow = self._is_slow, False
        slow = self.chances.slow
        return is_slow or (slow > 0 and self._rng.random() < slow)

    def slow_down(self, _seconds: float) -> None:
        """The clock of the FaultyTier: its SLOW makes the rest of a job late."""
        self._is_slow = True

    def left_alone(self, job: SimJob[Any]) -> None:
        """Its waiter was cancelled."""
        is_open = not (job.done or job.is_waited_for or self.scheduler.is_over)
        if is_open and self._rng.random() < 0.7:
            job.delay()

    def ended(self, job: SimJob[Any]) -> None:
        if job in self.jobs:
            self.jobs.remove(job)

    def watching(self, slot: int) -> _Watching:
        """Around the work on a slot: its page is hurt if a fault is injected."""
        return _Watching(self.tier.faulty, partial(self._hurt_at, slot, 1))

    def land(self) -> None:
        """Writes that were delayed reach the device, whosever their slots are by now."""
        faulty = self.tier.faulty
        for slot, data, _ in faulty._delayed:
            self._hurt_at(slot, len(data) // SLOT_BYTES)
            if not self.health[_device(slot)].online:
                self._returned(_device(slot))  # nobody knows whose it is there
        faulty.land()

    def _hurt_at(self, slot: int, units: int) -> None:
        for name in self._owners(slot, units):
            self._hurt(name)

    def _owners(self, slot: int, units: int) -> Iterator[Name]:
        """The pages that have, or are being given, these slots."""
        table = self._store._table
        first = table.live("slot").astype(np.int64)
        after = first + (table.live("record") // SLOT_BYTES).astype(np.int64)
        is_there = (table.live("tier") == Tier.NVME) & (table.live("state") != State.FREE)
        for row in np.flatnonzero(is_there & (first < slot + units) & (slot < after)).tolist():
            yield table.namespace[row], table.shard[row], table.key(row)


class _Watching:
    def __init__(self, faulty: FaultyTier, hurt: Callable[[], None]) -> None:
        self._faulty = faulty
        self._hurt = hurt
        self._before = len(faulty.injected)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        if any(found.kind in _HURTING for found in self._faulty.injected[self._before :]):
            self._hurt()


def _device(slot: int) -> int:
    return split_slab(slot // UNITS)[0]
