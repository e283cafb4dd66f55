"""The NVMe tier as a TierDevice: sparse slots, several devices, whole records without copies."""

from __future__ import annotations

import errno
import random
import threading

import numpy as np
import pytest
from file_faults import CountedCalls, SparseCalls, address
from nvme_parts import SEGMENT_BYTES, UNITS, device, opened, record, slot_of, tier_of

from kvtier.core.page import Tier
from kvtier.errors import TierIOError
from kvtier.testing.faulty_tier import Fault, FaultKind, FaultyTier
from kvtier.testing.tier_suite import TierSuite, read_back
from kvtier.tiers import nvme_files
from kvtier.tiers.base import SLOT_BYTES, TierOperation, errno_of
from kvtier.tiers.direct_file import DirectMode
from kvtier.tiers.host import HostArena
from kvtier.tiers.nvme_geometry import slab_number


class TestNvmeDirect(TierSuite):
    """One segment, so that the suite's slots, which are not sparse, all exist."""

    mode = DirectMode.AUTO

    def make_tier(self, capacity_bytes, directory):
        disk = device(directory / "device", segment_bytes=capacity_bytes, mode=self.mode)
        return tier_of(disk, segment_bytes=capacity_bytes, slabs=[0])


class TestNvmeBuffered(TestNvmeDirect):
    mode = DirectMode.OFF


@pytest.fixture
def calls():
    return CountedCalls()


@pytest.fixture
def tier(tmp_path, calls):
    """Devices 0 and 5; segments 0 and 2 of the one, 70,000 of the other."""
    made = tier_of(
        device(tmp_path / "a", 0, calls=calls),
        device(tmp_path / "b", 5, calls=calls),
        slabs=[0, 2, slab_number(5, 70_000)],
    )
    yield made
    made.close()


# -- numbers ---------------------------------------------------------------------------------------


def test_what_it_says_of_itself(tier):
    assert tier.tier is Tier.NVME
    assert tier.segment_bytes == SEGMENT_BYTES
    assert tier.capacity_bytes == 3 * SEGMENT_BYTES
    assert tier.slabs() == [0, 2, (5 << 20) + 70_000]
    assert [disk.number for disk in tier.devices] == [0, 5]
    high = slot_of(5, 70_000, 17)
    assert tier.slab_of(high) == (5 << 20) + 70_000
    assert tier.first_slot((5 << 20) + 70_000) == high - 17
    assert tier.device_of(tier.slab_of(high)).number == 5


def test_every_slot_is_a_place_of_its_own(tier):
    page = record(3 * SLOT_BYTES)
    step = page.nbytes // SLOT_BYTES
    slots = [
        slot_of(number, local, unit)
        for number, local in ((0, 0), (0, 2), (5, 70_000))
        for unit in range(0, UNITS - step, step)
    ]
    source = random.Random(5)
    source.shuffle(slots)
    for slot in slots:
        tier.write(slot, [record(3 * SLOT_BYTES, seed=slot)])
    source.shuffle(slots)
    for slot in slots:
        assert read_back(tier, slot, 0, page.nbytes) == record(3 * SLOT_BYTES, slot).tobytes(), slot


def test_kind_22_int32_slots_beyond_4_gib(tier):
    """The same number in 32 bits, as a byte of the tier, is another place."""
    high = slot_of(5, 70_000, 3)
    tier.create_segment(tier.slab_of(high * SLOT_BYTES % (1 << 32) // SLOT_BYTES))
    wrapped = high * SLOT_BYTES % (1 << 32) // SLOT_BYTES
    assert wrapped != high
    tier.write(wrapped, [b"low"])
    tier.write(np.uint32(high), [b"high"])
    assert read_back(tier, wrapped, 0, 4) == b"low\0"
    assert read_back(tier, np.int64(high), 0, 4) == b"high"


@pytest.mark.parametrize("mode", [DirectMode.AUTO, DirectMode.OFF])
def test_kind_22_int32_the_last_slab_and_offsets_in_it_beyond_4_gib(tmp_path, mode):
    segment_bytes, slab = 6 << 30, slab_number(15, (1 << 20) - 1)
    disk = device(tmp_path / "d", 15, segment_bytes=segment_bytes, calls=SparseCalls(), mode=mode)
    tier = tier_of(disk, segment_bytes=segment_bytes, slabs=[slab])
    first, units = tier.first_slot(slab), segment_bytes // SLOT_BYTES
    page = record()
    slots = [first + unit for unit in (1 << 19, 1 << 20, 5 << 18, units - page.nbytes // 4096)]
    assert min(slots) > 1 << 32
    for slot in slots:
        tier.write(slot, [record(seed=slot)])
    for slot in slots:
        assert read_back(tier, slot, 0, page.nbytes) == record(seed=slot).tobytes()
        back = bytearray(4096)
        tier.read(first, (slot - first) * SLOT_BYTES, back)  # the same place as an offset
        assert back == record(seed=slot).tobytes()[:4096]
    for unit in (0, 1 << 18):  # where 31 and 32 bits of the offsets would lead
        assert read_back(tier, first + unit, 0, 4096) == bytes(4096)
    tier.close()
    with opened(tmp_path / "d", number=15, segment_bytes=segment_bytes) as disk:
        assert disk.segments == {(1 << 20) - 1}


@pytest.mark.parametrize(
    ("slot", "offset", "length"),
    [
        (UNITS - 1, 0, SLOT_BYTES + 1),
        (0, SEGMENT_BYTES, 1),
        (0, SEGMENT_BYTES - 1, 2),
        (UNITS, 0, 1),
        (slot_of(0, 1), 0, 1),
        (slot_of(0, 3), 0, 1),
        (slot_of(0, 2), -1, 1),
        (slot_of(0, 2), -SEGMENT_BYTES, 1),
        (slot_of(5, 69_999), 0, 1),
        (slot_of(5, 70_000, UNITS - 2), 8191, 2),
        (-1, 0, 1),
        (-UNITS, SEGMENT_BYTES, 1),
    ],
)
def test_no_access_leaves_its_segment(tier, slot, offset, length):
    for call in (
        lambda: tier.write(slot, [b"x" * length], offset),
        lambda: tier.read(slot, offset, bytearray(length)),
    ):
        with pytest.raises(TierIOError, match=f"at slot {slot}:") as caught:
            call()
        assert errno_of(caught.value) == errno.ERANGE
    for first in (slot_of(0, 0), slot_of(0, 2), slot_of(5, 70_000)):
        assert read_back(tier, first, 0, SEGMENT_BYTES) == bytes(SEGMENT_BYTES)


# -- one write, no copies --------------------------------------------------------------------------


def test_a_record_is_one_pwritev_and_its_payload_is_not_copied(tier, calls):
    page = record()
    with HostArena(1 << 20, huge_pages=False) as arena:
        arena.write(3, [page])
        header = arena.view(3, 0, SLOT_BYTES)
        payload = arena.view(3, SLOT_BYTES, page.nbytes - SLOT_BYTES)
        if not tier.devices[0].is_direct:
            pytest.skip(f"no O_DIRECT in the test directory: {tier.devices[0].io_reason}")
        for head in (header, bytes(header)):
            calls.log.clear()
            tier.write(7, [head, payload])
            assert [name for name in calls.log if name not in ("open", "direct")] == ["pwritev"]
            assert calls.moved[1] == (address(payload), payload.nbytes)
            assert len(calls.moved) == 2
        del header, payload, head
    assert read_back(tier, 7, 0, page.nbytes) == page.tobytes()


def test_a_read_goes_straight_into_the_arena(tier, calls):
    page = record()
    tier.write(9, [page])
    with HostArena(1 << 20, huge_pages=False) as arena:
        into = arena.view(5, 0, page.nbytes)
        calls.log.clear()
        tier.read(9, 0, into)
        assert calls.log == ["preadv"]
        assert calls.moved == [(address(into), page.nbytes)]
        assert into == page.tobytes()
        del into


@pytest.mark.parametrize("files_max", [1, 3, 64])
def test_threads_that_open_files_at_once_and_more_than_stay_open(tmp_path, monkeypatch, files_max):
    monkeypatch.setattr(nvme_files, "OPEN_FILES_MAX", files_max)
    made = tier_of(device(tmp_path / "a"), slabs=range(8))
    made.devices[0].close()
    again = tier_of(device(tmp_path / "a"))
    failures = []

    def work(number):
        for local in range(8):
            slot = slot_of(0, local, number * 30)
            page = record(seed=slot)
            again.write(slot, [page])
            if read_back(again, slot, 0, page.nbytes) != page.tobytes():
                failures.append(slot)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    again.sync()
    again.close()
    assert failures == []


# -- errors, devices that come and go --------------------------------------------------------------


@pytest.mark.parametrize(
    "number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOENT]
)
def test_every_error_of_the_system_is_a_tier_error(tier, calls, tmp_path, number):
    page = record()
    tier.write(0, [page])
    calls.faults = dict.fromkeys(("pwritev", "preadv", "fdatasync"), number)
    for operation, call in (
        (TierOperation.WRITE, lambda: tier.write(0, [page])),
        (TierOperation.READ, lambda: tier.read(0, 0, bytearray(1))),
        (TierOperation.SYNC, tier.sync),
    ):
        with pytest.raises(TierIOError, match=f"nvme tier: {operation} failed") as caught:
            call()
        assert errno_of(caught.value) == number
        assert str(tmp_path / "a") in str(caught.value)
    calls.faults = {"open": number}
    with pytest.raises(TierIOError):
        tier.read(slot_of(5, 70_000), 0, bytearray(1))
    calls.faults.clear()
    tier.write(0, [page])
    assert read_back(tier, 0, 0, page.nbytes) == page.tobytes()


def test_a_detached_device_is_offline_and_the_others_go_on(tier, tmp_path, calls):
    high = slot_of(5, 70_000)
    tier.write(high, [b"high"])
    tier.write(0, [b"low"])
    tier.detach(5).close()
    for call in (
        lambda: tier.write(high, [b"x"]),
        lambda: tier.read(high, 0, bytearray(1)),
        lambda: tier.sync(5),
        lambda: tier.create_segment(5 << 20),
        lambda: tier.remove_segment((5 << 20) + 70_000),
        lambda: tier.device_of(5 << 20),
    ):
        with pytest.raises(TierIOError, match="device 5 is not attached") as caught:
            call()
        assert errno_of(caught.value) == errno.ENODEV
    assert tier.slabs() == [0, 2]
    assert read_back(tier, 0, 0, 3) == b"low"
    tier.sync()
    tier.attach(device(tmp_path / "b", 5, calls=calls))
    assert read_back(tier, high, 0, 4) == b"high"


def test_a_sync_of_all_tries_each(tier, calls):
    tier.write(0, [b"x"])
    tier.write(slot_of(5, 70_000), [b"x"])
    calls.faults["fdatasync"] = errno.EIO
    calls.log.clear()
    with pytest.raises(TierIOError):
        tier.sync()
    assert calls.count("fdatasync") == 2
    calls.faults.clear()
    tier.sync(5)
    assert calls.count("fdatasync") == 3
    tier.sync()
    assert calls.count("fdatasync") == 4


def test_segments_are_made_and_removed_by_slab(tier):
    tier.create_segment(1)
    tier.create_segment((5 << 20) + 3)
    tier.remove_segment(0)
    assert tier.slabs() == [1, 2, (5 << 20) + 3, (5 << 20) + 70_000]
    tier.write(slot_of(0, 1), [b"x"])
    with pytest.raises(TierIOError, match="there is no segment 0 on device 0"):
        tier.write(0, [b"x"])


def test_a_faulty_tier_goes_around_it(tier):
    fault = Fault(kind=FaultKind.EIO, operation=TierOperation.READ, nth=2)
    faulty = FaultyTier(tier, [fault], seed=1)
    faulty.write(slot_of(5, 70_000), [b"abc"])
    assert read_back(faulty, slot_of(5, 70_000), 0, 3) == b"abc"
    with pytest.raises(TierIOError):
        read_back(faulty, slot_of(5, 70_000), 0, 3)
