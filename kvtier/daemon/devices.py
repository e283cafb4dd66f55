"""The devices of the NVMe tier as they fare: which are online, how busy, how full.

A device that fails often in a row, or does not answer in time, goes offline alone: its pages are
misses from that moment on. It is tried again after `nvme.retry_s`, and comes back empty; its pages
come back with the next start. A device without room is not grown for so long; what is on it stays.
One that is read-only serves what is on it, and is written to again when it can be.

`Devices` is what transfer/mover.py calls Lower. Event loop's thread; files are worked on by the
threads of one pool a device.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from kvtier.config import NvmeConfig
from kvtier.core.page import Tier
from kvtier.core.store import Store
from kvtier.daemon.device_health import DeviceHealth, check, probe
from kvtier.daemon.durability import Durability
from kvtier.errors import Busy, DirectoryError, TierIOError
from kvtier.tiers.base import NO_NEW_FILES, SHORTAGE, errno_of
from kvtier.tiers.crash_points import crash_point
from kvtier.tiers.io_pool import IoClass, IoJob, IoPool
from kvtier.tiers.nvme import NvmeTier
from kvtier.tiers.nvme_device import NvmeDevice
from kvtier.tiers.nvme_geometry import Plan, slab_number, split_slab

__all__ = ["DeviceHealth", "Devices"]

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Failures in a row after which a device is given up for a while: one bad block is no bad device.
_FAILURES_MAX = 8
_WRITERS = frozenset((IoClass.PUT, IoClass.DEMOTE))
_IN_THE_WAY = frozenset((errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY))
_CLOSE_WAIT_S = 2.0
#: Pages taken out of the books between two turns for others.
_SWEEP_PAGES = 256


class Devices:
    """See the module docstring, and `Lower` for what the methods of that name promise."""

    def __init__(
        self, tier: NvmeTier, store: Store, durability: Durability, plan: Plan, config: NvmeConfig
    ) -> None:
        self._tier = tier
        self._store = store
        self._durability = durability
        self._plan = plan
        self._config = config
        self._growing = asyncio.Lock()
        self._units = tier.segment_bytes // 4096
        self.health = {
            device.number: DeviceHealth(device=device, pool=self._new_pool(device))
            for device in tier.devices
        }
        self.io_errors = 0
        self.no_room = 0

    # -- what the mover needs --------------------------------------------------------------------

    @property
    def tier(self) -> NvmeTier:
        return self._tier

    @property
    def segment_bytes(self) -> int:
        return self._tier.segment_bytes

    @property
    def timeout_s(self) -> float:
        return self._config.io_timeout_ms / 1000

    def submit(self, io_class: IoClass, slot: int, work: Callable[[], T]) -> IoJob[T]:
        health = self._health_of(slot)
        if not health.online:
            raise Busy(
                f"{health.device.path} is offline: {health.reason}",
                remedy="Check the device; it is tried again by itself.",
            )
        job = health.pool.submit(io_class, work)
        if io_class in _WRITERS:
            health.writes += 1
            job.add_done(lambda: self._wrote(health))
        return job

    def serves(self, slot: int) -> bool:
        return self._health_of(slot).online

    def report(self, slot: int, error: TierIOError | TimeoutError | None) -> None:
        health = self._health_of(slot)
        if error is None:
            health.failures = 0
            return
        self.io_errors += 1
        if isinstance(error, TimeoutError):
            self._take_offline(health, f"no answer within {self.timeout_s:g} s")
            return
        log.error("nvme.io_error", extra={"path": str(health.device.path), "error": str(error)})
        if errno_of(error) in SHORTAGE:
            return
        if errno_of(error) == errno.EROFS:
            self._set_read_only(health, str(error))
            return
        health.failures += 1
        if errno_of(error) == errno.ENOENT or health.failures >= _FAILURES_MAX:
            self._take_offline(health, str(error))

    async def grow(self, record_bytes: int) -> None:
        async with self._growing:
            while not self._store.room.has_free(Tier.NVME, record_bytes):
                health = self._next_to_grow()
                if health is None:
                    return
                await self._add_segment(health)

    async def prepare(self, slot: int, record_bytes: int) -> None:
        await self._durability.mark(slot // self._units, record_bytes)

    async def forget(self, generation: int) -> None:
        try:
            await self._durability.forget([generation])
        except DirectoryError as error:
            # The copy is out of sight for this boot; the next checkpoint makes that last.
            log.error("nvme.journal_failed", extra={"error": str(error)})

    # -- growing ---------------------------------------------------------------------------------

    def adopt(self, slabs: Iterable[int], *, spared: Iterable[int] = ()) -> None:
        """Segments that a restart found: they may be used; but not those that are `spared`."""
        for number, local in map(split_slab, spared):
            self.health[number].occupied.add(local)
        for slab in slabs:
            number, local = split_slab(slab)
            self.health[number].segments.add(local)
            self._store.room.grant(Tier.NVME, slab)

    def _next_to_grow(self) -> DeviceHealth | None:
        """The device with the fewest segments of those that may have one more."""
        now = time.monotonic()
        able = [
            health
            for health in self.health.values()
            if health.online
            and not health.read_only
            and now >= health.grow_at
            and len(health.segments) < self._plan.segments_per_device
        ]
        return min(able, key=lambda health: len(health.segments), default=None)

    async def _add_segment(self, health: DeviceHealth) -> None:
        can_grant = self._store.room.can_grant
        local = health.free_number(
            self._plan.segments_per_device, lambda slab: can_grant(Tier.NVME, slab)
        )
        if local is None:
            # Something in all of them is still named from before.
            health.grow_at = time.monotonic() + self._config.retry_s
            return
        slab = slab_number(health.device.number, local)
        pool = health.pool
        try:
            job = pool.submit(IoClass.PUT, lambda: self._create(health, slab))
            await job.wait(max(self.timeout_s, 10.0))
        except Busy:
            health.grow_at = time.monotonic() + 0.1
        except TimeoutError:
            self._take_offline(health, "a new segment was not made in time")
        except TierIOError as error:
            health.grow_at = time.monotonic() + self._config.retry_s
            if errno_of(error) == errno.EROFS:
                self._set_read_only(health, str(error))
            elif errno_of(error) in NO_NEW_FILES:
                self._cannot_grow(health, str(error))
            elif errno_of(error) in SHORTAGE:
                health.reason = str(error)
            elif errno_of(error) in _IN_THE_WAY:
                health.reason, health.grow_at = str(error), 0.0
                health.occupied.add(local)
            else:
                self._take_offline(health, str(error))
        else:
            if health.online and health.pool is pool:  # else it went offline meanwhile
                health.reason = ""
                health.segments.add(local)
                self._store.room.grant(Tier.NVME, slab)
                if health.read_only:  # since it was begun
                    self._store.room.freeze(Tier.NVME, [slab])

    def _create(self, health: DeviceHealth, slab: int) -> None:
        """A thread of the pool. A segment that is there already is used again: from before, or one
        that is being made for a caller who did not wait for it."""
        try:
            if slab not in self._tier.slabs():
                self._tier.create_segment(slab)
        except TierIOError:
            if slab not in self._tier.slabs():
                raise
        crash_point("segment.created")
        health.disk_bytes = health.device.disk_bytes()

    async def probe_all(self) -> None:
        """At the start, after `adopt`: a device that fails goes offline alone, one that only takes
        no new file serves what is there."""
        for health in self.health.values():
            try:
                refusal = await asyncio.to_thread(probe, health)
            except TierIOError as error:
                self._take_offline(health, str(error))
            else:
                self._note_refusal(health, refusal)

    def _note_refusal(self, health: DeviceHealth, refusal: TierIOError | None) -> None:
        """What a probe has said of new files."""
        if refusal is not None and errno_of(refusal) == errno.EROFS:
            self._set_read_only(health, str(refusal))
            return
        if health.read_only:
            health.read_only = False
            self._store.room.thaw(Tier.NVME, health.slabs)
            log.info("nvme.device_writable", extra={"path": str(health.device.path)})
        self._cannot_grow(health, str(refusal) if refusal is not None else "")

    def _set_read_only(self, health: DeviceHealth, reason: str) -> None:
        health.reason = reason
        health.grow_at = time.monotonic() + self._config.retry_s
        if health.online and not health.read_only:
            health.read_only = True
            self._store.room.freeze(Tier.NVME, health.slabs)
            extra = {"path": str(health.device.path), "reason": reason}
            log.warning("nvme.device_read_only", extra=extra)

    def _cannot_grow(self, health: DeviceHealth, reason: str) -> None:
        """`reason` is "" where it can."""
        health.reason = reason
        if reason:
            self.no_room += 1
            health.grow_at = time.monotonic() + self._config.retry_s
            extra = {"path": str(health.device.path), "reason": reason}
            log.warning("nvme.no_room", extra=extra)

    # -- going and coming back -------------------------------------------------------------------

    def _take_offline(self, health: DeviceHealth, reason: str) -> None:
        health.retry_at = time.monotonic() + self._config.retry_s
        if not health.online:
            return
        health.online, health.reason, health.failures = False, reason, 0
        # Those who wait in its queue hear of it now; a thread that hangs is kept until it comes
        # back, and keeps the device offline so long.
        if not health.pool.close(0):
            health.stuck = health.pool
        health.pool = self._new_pool(health.device)
        health.read_only = False
        lost = self._store.room.close(Tier.NVME, health.slabs)
        health.lost.append(lost)
        health.pages_lost += len(lost)
        if len(lost):
            # They lie on it as before: a start that finds the device finds them.
            self._durability.wait_for({health.device.number: len(lost)})
        health.segments.clear()
        log.error(
            "nvme.device_offline",
            extra={"path": str(health.device.path), "reason": reason, "pages": len(lost)},
        )

    async def sweep(self) -> None:
        """Takes the pages of devices that went offline out of the books."""
        for health in self.health.values():
            while health.lost:
                if not self._store.room.clear(health.lost[0], _SWEEP_PAGES):
                    del health.lost[0]
                await asyncio.sleep(0)

    async def retry(self) -> None:
        """Tries devices that are offline again, those whose time has come; and takes those offline
        where an access hangs that nobody waits for any more, for others wait behind it."""
        now = time.monotonic()
        for health in self.health.values():
            if health.online and health.pool.longest_s(now) > self.timeout_s:
                self._take_offline(health, f"no answer within {self.timeout_s:g} s")
            elif health.read_only and now >= health.grow_at:
                await self._try_writing(health)
            elif not health.online and now >= health.retry_at:
                await self._try_again(health)

    async def _try_writing(self, health: DeviceHealth) -> None:
        health.grow_at = time.monotonic() + self._config.retry_s
        pool = health.pool
        try:
            refusal = await pool.submit(IoClass.PUT, lambda: check(health)).wait(self.timeout_s)
        except Busy:
            return
        except (TierIOError, TimeoutError) as error:
            if health.pool is pool:
                self._take_offline(health, str(error) or "no answer to a probe")
            return
        if health.online and health.pool is pool:
            self._note_refusal(health, refusal)

    async def _try_again(self, health: DeviceHealth) -> None:
        health.retry_at = time.monotonic() + self._config.retry_s
        if health.stuck is not None:
            if not health.stuck.close(0):
                return
            health.stuck = None
        try:
            job = health.pool.submit(IoClass.PUT, lambda: check(health))
            refusal = await job.wait(self.timeout_s)
        except TierIOError as error:
            health.reason = str(error)
            return
        except TimeoutError:
            health.reason = "no answer to a probe"
            health.pool.close(0)
            health.stuck, health.pool = health.pool, self._new_pool(health.device)
            return
        # Those that failed late, while it was offline, say nothing of it now.
        health.online, health.failures = True, 0
        self._note_refusal(health, refusal)
        log.info("nvme.device_online", extra={"path": str(health.device.path)})

    async def check_files(self) -> None:
        """Takes devices offline whose directory or segments are not there any more: what lies in a
        file without a name ends with this process, whatever was said of it."""
        async with asyncio.TaskGroup() as group:
            for health in self.health.values():
                if health.online:
                    group.create_task(self._check_files(health))

    async def _check_files(self, health: DeviceHealth) -> None:
        pool = health.pool
        try:
            await pool.submit(IoClass.GET, health.device.check_files).wait(self.timeout_s)
        except Busy:
            pass  # it has much to do: next time
        except TimeoutError:
            if health.pool is pool:
                self._take_offline(health, f"no answer within {self.timeout_s:g} s")
        except TierIOError as error:
            if health.pool is pool and errno_of(error) not in SHORTAGE:
                self._take_offline(health, str(error))

    async def sync(self) -> None:
        """Makes what is written survive a power cut; no device waits for another."""
        async with asyncio.TaskGroup() as group:
            for health in self.health.values():
                writes = health.writes
                if health.online and writes != health.synced:
                    group.create_task(self._sync(health, writes))

    async def _sync(self, health: DeviceHealth, writes: int) -> None:
        try:
            job = health.pool.submit(IoClass.DEMOTE, health.device.sync)
            await job.wait(self.timeout_s)
            health.synced = writes
        except Busy:
            pass  # next time
        except TimeoutError:
            self._take_offline(health, "a sync was not done in time")
        except TierIOError as error:
            if errno_of(error) == errno.EROFS:
                self._set_read_only(health, str(error))
            elif errno_of(error) not in SHORTAGE:
                self._take_offline(health, str(error))

    @staticmethod
    def _wrote(health: DeviceHealth) -> None:
        health.writes += 1

    def close(self) -> bool:
        """Ends the threads; False when one of them hangs in the system."""
        ended = [health.pool.close(_CLOSE_WAIT_S) for health in self.health.values()]
        return all(ended)

    def _health_of(self, slot: int) -> DeviceHealth:
        return self.health[split_slab(slot // self._units)[0]]

    def _new_pool(self, device: NvmeDevice) -> IoPool:
        return IoPool(
            threads=self._config.io_threads,
            name=f"kvtier-nvme{device.number}",
            queue_max=self._config.queue_pages_max,
        )
