"""Devices that grow, go offline and come back, while callers give up and pages are in use."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
from device_rig import FIT, NS, RECORD, SEGMENT, Rig, rig_on, slow_to_make

from kvtier.core.handles import Reading
from kvtier.core.page import Codec, PutCode, Tier
from kvtier.tiers.base import TierOperation
from kvtier.tiers.host import HostArena
from kvtier.tiers.io_pool import IoClass
from kvtier.tiers.nvme import NvmeDevice
from kvtier.transfer.lower import MoveCode, Subject
from kvtier.transfer.mover import Mover
from kvtier.transfer.place import Identity
from tests.faults.kinds_rig import key_of, on_loop, rows, until


@on_loop
async def test_a_caller_who_goes_away_while_a_segment_is_made_harms_nobody(base: Path) -> None:
    async with rig_on(base) as rig:
        devices, health = rig.devices, rig.health()
        await devices.grow(RECORD)
        rig.put(range(FIT))
        with slow_to_make(health.device) as gate:
            first = asyncio.create_task(devices.grow(RECORD))
            await until(lambda: health.pool.running == 1)
            first.cancel()
            await asyncio.wait([first])
            second = asyncio.create_task(devices.grow(RECORD))
            await until(lambda: health.pool.running == 2)
            gate.set()
            await second
        assert (health.online, health.reason) == (True, "")
        assert health.segments == set(health.device.segments) == {0, 1}
        assert rig.granted == 2
        assert rig.store.status()[Tier.NVME].sealed == FIT, "nothing was lost"
        rig.put(["one more"])
        assert rig.store.status()[Tier.NVME].sealed == FIT + 1


@on_loop
async def test_a_segment_that_nobody_waited_for_is_used_by_the_next_who_needs_one(
    base: Path,
) -> None:
    async with rig_on(base) as rig:
        health = rig.health()
        with slow_to_make(health.device) as gate:
            grow = asyncio.create_task(rig.devices.grow(RECORD))
            await until(lambda: health.pool.running == 1)
            grow.cancel()
            await asyncio.wait([grow])
            gate.set()
            await until(lambda: health.pool.running == 0)
        assert (rig.granted, set(health.device.segments)) == (0, {0})
        await rig.devices.grow(RECORD)
        assert (rig.granted, set(health.device.segments)) == (1, {0})


def leased(rig: Rig) -> Reading:
    (reading,) = rig.store.acquire(NS, 0, rows([key_of(0)]))
    assert isinstance(reading, Reading)
    return reading


@pytest.mark.parametrize(
    ("is_leased", "condemned"),
    [(False, "before"), (False, "after"), (True, "never"), (True, "before"), (True, "after")],
)
@on_loop
async def test_a_device_with_a_page_that_stays_in_its_first_segment_comes_back(
    base: Path, is_leased: bool, condemned: str
) -> None:
    """A page that is being read, or was condemned before or after the device went offline."""
    async with rig_on(base) as rig:
        devices, store = rig.devices, rig.store
        await devices.grow(RECORD)
        first = rig.put([0, 1])[0]
        reading = leased(rig) if is_leased else None
        if condemned == "before":
            assert store.condemn(first)
        rig.lose()
        assert rig.granted == 0
        if condemned == "after":
            assert store.condemn(first)
        await rig.come_back()
        await devices.grow(RECORD)
        assert store.room.has_free(Tier.NVME, RECORD)
        rig.put([2, 3])
        assert store.lookup(NS, 0, rows([key_of(n) for n in range(4)]))[0].tolist() == [2, 2, 1, 1]
        if reading is not None:
            assert rig.health().segments == {1}, "what is being read keeps its place"
            reading.release()
        rig.put(range(10, 10 + FIT - 2))
        await devices.grow(RECORD)
        assert 0 in rig.health().segments, "it can be used again, sooner or later"
        store.survey.check()


@on_loop
async def test_a_segment_that_is_ready_after_its_device_went_offline_is_not_used(
    base: Path,
) -> None:
    async with rig_on(base, devices=2) as rig:
        with slow_to_make(rig.health(0).device) as gate:
            grow = asyncio.create_task(rig.devices.grow(RECORD))
            await until(lambda: rig.health(0).pool.running == 1)
            rig.lose(0)
            gate.set()
            await grow
        assert rig.health(0).segments == set()
        assert rig.health(1).segments == {0}, "the other device grows in its place"
        assert rig.granted == 1
        slots = [ref.slot for ref in rig.put(range(FIT))]
        assert min(slots) >= rig.first_slot(1), "nothing goes to the one that is offline"
        await rig.come_back()
        await rig.devices.grow(RECORD)
        assert [rig.health(number).segments for number in (0, 1)] == [{0}, {0}]


@on_loop
async def test_a_copy_that_was_being_made_is_lost_with_its_device(base: Path) -> None:
    """Also if the device is back, and its segment in use, before the copy is sealed."""
    async with rig_on(base) as rig:
        await rig.devices.grow(RECORD)
        early, late = rig.reserve("early"), rig.reserve("late")
        rig.lose()
        assert early.seal() is PutCode.STALE_GENERATION
        await rig.come_back()
        await rig.devices.grow(RECORD)
        assert late.seal() is PutCode.STALE_GENERATION
        assert rig.store.status()[Tier.NVME].filling == 0
        rig.store.survey.check()


@on_loop
async def test_pages_of_an_offline_device_leave_the_books_in_slices(base: Path) -> None:
    async with rig_on(base) as rig:
        await rig.devices.grow(RECORD)
        rig.put(range(FIT))
        reading = leased(rig)
        sizes = []
        clear = rig.store.room.clear

        def counting(lost, pages_max: int) -> int:
            sizes.append(clear(lost, pages_max))
            return sizes[-1]

        with (
            mock.patch("kvtier.daemon.devices._SWEEP_PAGES", 5),
            mock.patch.object(rig.store.room, "clear", counting),
        ):
            rig.lose()
            await rig.devices.sweep()
        assert sizes == [5, 5, 5, 1, 0]
        counts = rig.store.status()[Tier.NVME]
        assert (counts.sealed, counts.retiring) == (0, 1)
        reading.release()
        assert rig.store.status()[Tier.NVME].used_bytes == 0


@on_loop
async def test_pages_of_an_offline_device_are_gone_before_they_leave_the_books(base: Path) -> None:
    """BUSY would say: ask again. There is nothing to ask for."""
    async with rig_on(base) as rig:
        await rig.devices.grow(RECORD)
        rig.put([0])
        first, second = leased(rig), leased(rig)
        rig.lose()
        rig.store.room.grant(Tier.HOST, 0)
        place = Identity(fingerprint=bytes(32), generation=1, shard=0)
        page = Subject(namespace=NS, key=key_of(0), identity=place, layout=None)
        arena = HostArena(SEGMENT, slab_bytes=SEGMENT, huge_pages=False)
        try:
            mover = Mover(rig.store, arena, rig.devices, codec=Codec.RAW)
            with first:
                assert await mover.read_through(first, page) is MoveCode.GONE
            assert await mover.promote(second, page, IoClass.GET) is MoveCode.GONE
        finally:
            arena.close()
        assert rig.store.status()[Tier.HOST].filling == 0


@on_loop
async def test_the_loop_never_asks_a_device_what_its_files_take(base: Path) -> None:
    """A device that hangs would hold up everything; what it said last is good enough."""
    loop_thread, asked = threading.current_thread(), []
    ask = NvmeDevice.disk_bytes

    def spying(device: NvmeDevice) -> int:
        asked.append(threading.current_thread())
        return ask(device)

    with mock.patch.object(NvmeDevice, "disk_bytes", spying):
        async with rig_on(base) as rig:
            health = rig.health()
            await rig.devices.probe_all()
            empty = health.disk_bytes
            assert 0 < empty < SEGMENT
            await rig.devices.grow(RECORD)
            assert SEGMENT < health.disk_bytes - empty < SEGMENT + 64 * 1024
            rig.lose()
            health.disk_bytes = 0
            await rig.come_back()
            assert health.disk_bytes == ask(health.device)
    assert len(asked) == 3
    assert loop_thread not in asked


@on_loop
async def test_an_access_that_hangs_takes_its_device_offline_and_its_end_brings_it_back(
    base: Path,
) -> None:
    """Also when the caller has gone away; nobody who waits behind it waits for ever."""
    async with rig_on(base) as rig:
        await rig.devices.grow(RECORD)
        rig.put([0])
        gate = threading.Event()
        jobs = [rig.devices.submit(IoClass.PUT, rig.first_slot(0), gate.wait) for _ in range(2)]
        waiters = [asyncio.create_task(job.wait(60)) for job in jobs]
        await asyncio.sleep(0)
        for waiter in waiters:
            waiter.cancel()
        syncing = asyncio.create_task(rig.devices.sync())
        rig.lose()
        await syncing
        await rig.devices.sweep()
        await rig.devices.retry()
        assert not rig.health().online, "its threads still hang"
        gate.set()
        await rig.come_back()
        await rig.devices.grow(RECORD)
        assert rig.granted == 1


@on_loop
async def test_a_device_that_hangs_keeps_no_other_from_being_synced(base: Path) -> None:
    """As at the end of the daemon, where syncs have some seconds in all."""
    async with rig_on(base, devices=2) as rig:
        gate = threading.Event()
        hanging = [rig.devices.submit(IoClass.PUT, rig.first_slot(0), gate.wait) for _ in range(2)]
        written = rig.devices.submit(IoClass.PUT, rig.first_slot(1), lambda: None)
        await written.wait(5)
        await until(lambda: rig.health(1).writes == 2)
        syncing = asyncio.create_task(rig.devices.sync())
        await until(lambda: rig.health(1).synced == rig.health(1).writes)
        assert not syncing.done()
        syncing.cancel()
        await asyncio.wait([syncing])
        assert rig.health(0).online
        assert rig.health(0).synced == 0
        gate.set()
        await asyncio.gather(*(job.wait(5) for job in hanging))


@pytest.mark.parametrize(
    ("number", "is_online"),
    [
        (errno.ENOSPC, True),
        (errno.EDQUOT, True),
        (errno.EACCES, True),
        (errno.EROFS, True),
        (errno.EIO, False),
    ],
)
@on_loop
async def test_a_device_that_takes_no_file_at_the_start(
    base: Path, number: int, is_online: bool
) -> None:
    """It is named, and the other one is as it would be alone; what is there stays, unless the
    device fails."""
    async with rig_on(base, devices=2) as rig:
        for slab in (0, 1 << 20):
            rig.devices.tier.create_segment(slab)
        rig.devices.adopt(rig.devices.tier.slabs())
        rig.put(range(2 * FIT))
        probe = NvmeDevice.probe

        def failing(device: NvmeDevice) -> None:
            if device.number == 0:
                error = OSError(number, os.strerror(number))
                raise device.failed(TierOperation.WRITE, error)
            probe(device)

        began = time.monotonic()
        with mock.patch.object(NvmeDevice, "probe", failing):
            await rig.devices.probe_all()
        await rig.devices.sweep()
        first, second = rig.health(0), rig.health(1)
        assert (first.online, second.online, second.reason) == (is_online, True, "")
        assert os.strerror(number) in first.reason
        left = 2 * FIT if is_online else FIT
        assert rig.store.status()[Tier.NVME].sealed == left
        assert (first.grow_at > began) == is_online, "it is not grown for a while"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
@on_loop
async def test_no_new_file_is_no_reason_to_stay_offline(base: Path, number: int) -> None:
    async with rig_on(base) as rig:
        await rig.devices.grow(RECORD)
        rig.lose()

        def failing(device: NvmeDevice) -> None:
            error = OSError(number, os.strerror(number))
            raise device.failed(TierOperation.WRITE, error)

        with mock.patch.object(NvmeDevice, "probe", failing):
            await rig.come_back()
        assert os.strerror(number) in rig.health().reason


@on_loop
async def test_a_segment_that_is_made_while_its_device_becomes_read_only(base: Path) -> None:
    """It is no place for pages either."""
    async with rig_on(base) as rig:
        with slow_to_make(rig.health().device) as gate:
            growing = asyncio.create_task(rig.devices.grow(RECORD))
            await asyncio.sleep(0.05)
            error = OSError(errno.EROFS, os.strerror(errno.EROFS))
            failed = rig.health().device.failed(TierOperation.WRITE, error)
            rig.devices.report(rig.first_slot(0), failed)
            assert rig.health().read_only
            gate.set()
            await growing
        assert rig.granted == 1
        assert not rig.store.room.has_free(Tier.NVME, RECORD)
        rig.health().grow_at = 0.0
        await rig.devices.retry()
        assert not rig.health().read_only
        assert rig.store.room.has_free(Tier.NVME, RECORD)
