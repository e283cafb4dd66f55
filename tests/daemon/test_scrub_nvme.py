"""A scrub of segment files: the same finding of damage, and errors of the device kept apart."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest
from scrub_rig import FAST, PAGE, SLAB, Rig, key_of, record_of, rig, until

from kvtier.core.page import PutCode, Tier
from kvtier.daemon.scrub import ScrubCounts
from kvtier.packing.record import HEADER_BYTES
from kvtier.tiers.base import SLOT_BYTES, TierOperation, tier_io_error
from kvtier.tiers.direct_file import DirectMode
from kvtier.tiers.nvme_segment import SEGMENT_HEADER_BYTES
from kvtier.transfer.place import check

NVME = Tier.NVME
RECORD = HEADER_BYTES + PAGE
#: Two segments of the first device and one of another.
SEGMENTS = (0, 1, (1 << 20) | 5)
#: Records on NVMe name the boot that wrote them.
EARLIER_BOOT = 12


class Files:
    """Segment files below a directory, and pages in them."""

    segment_bytes = SLAB

    def __init__(self, made: Rig, directory: Path, direct: DirectMode) -> None:
        self.made = made
        self.directory = directory
        self.direct = direct
        self.offline: set[int] = set()
        for slab in SEGMENTS:
            self.path(slab).write_bytes(bytes(SEGMENT_HEADER_BYTES + SLAB))

    def path(self, slab: int) -> Path:
        return self.directory / f"segment-{slab}"

    def segment_path(self, slab: int) -> Path:
        if slab in self.offline:
            raise tier_io_error(NVME, TierOperation.READ, OSError(errno.EIO, "offline"))
        return self.path(slab)

    def put(self, n: object, length: int = PAGE) -> int:
        """Writes a page; its slab."""
        payload = self.made.random.randbytes(length)
        with self.made.reserve(n, payload, NVME) as filling:
            ref = filling.ref
            record = record_of(ref, payload, key_of(n), boot_id=EARLIER_BOOT)
            self.write(ref.slot, record)
            assert filling.seal() is PutCode.STORED
        self.made.refs[n] = ref
        return ref.slot * SLOT_BYTES // SLAB

    def write(self, slot: int, data: bytes, at: int = 0) -> None:
        slab, within = divmod(slot * SLOT_BYTES, SLAB)
        with self.path(slab).open("r+b") as file:
            os.pwrite(file.fileno(), data, SEGMENT_HEADER_BYTES + within + at)

    def read(self, slot: int, length: int) -> bytes:
        slab, within = divmod(slot * SLOT_BYTES, SLAB)
        with self.path(slab).open("rb") as file:
            return os.pread(file.fileno(), length, SEGMENT_HEADER_BYTES + within)

    def flip(self, n: object, at: int) -> None:
        slot = self.made.refs[n].slot
        byte = self.read(slot, at + 1)[at]
        self.write(slot, bytes([byte ^ (1 << self.made.random.randrange(8))]), at)

    async def recheck(self, reading, identity, key) -> bool:
        self.made.rechecks += 1
        record = memoryview(self.read(reading.ref.slot, HEADER_BYTES + reading.length))
        return check(record, identity, reading, key, check_payload=True) is not None

    def scrub(self, **options) -> ScrubCounts:
        scrubber = self.made.scrubber(nvme=self, **({"recheck": self.recheck} | options))
        report = asyncio.run(scrubber.run(NVME, bytes_per_second=FAST))
        assert report.counts.pages_done == report.counts.pages_total
        assert self.made.pinned() == 0
        return report.counts


@pytest.mark.parametrize("direct", [DirectMode.AUTO, DirectMode.OFF])
def test_whole_and_damaged_pages_of_all_segments(direct, tmp_path):
    with rig(1, segments=SEGMENTS) as made:
        files = Files(made, tmp_path, direct)
        slabs = {n: files.put(n) for n in range(40)}
        assert set(slabs.values()) == set(SEGMENTS)
        assert files.scrub().pages_corrupt == 0
        files.flip(3, made.random.randrange(HEADER_BYTES))
        files.flip(30, made.random.randrange(HEADER_BYTES, RECORD))
        counts = files.scrub()
        assert (counts.pages_corrupt, counts.io_errors, made.rechecks) == (2, 0, 2)
        assert made.present(*range(40)) == [n for n in range(40) if n not in (3, 30)]
        assert made.store.status()[NVME].quarantined == 2


@pytest.mark.parametrize("length", [1, 4095, 4096, 4097, 500_000])
def test_pages_of_any_length(length, tmp_path):
    with rig(length, segments=SEGMENTS) as made:
        files = Files(made, tmp_path, DirectMode.AUTO)
        for n in range(3):
            files.put(n, length)
        files.flip(1, HEADER_BYTES + length - 1)
        assert files.scrub().pages_corrupt == 1
        assert made.present(0, 1, 2) == [0, 2]


@pytest.mark.parametrize("others", ["can read it", "cannot either", "have no descriptor left"])
def test_a_file_that_cannot_be_read(tmp_path, caplog, others):
    """One is missing, one is cut off, one lies on a device that is offline. What nobody can read is
    given up, so that a put of it does not answer that it is there."""
    errors = {"cannot either": errno.EIO, "have no descriptor left": errno.EMFILE}
    confirmed = []

    async def recheck(reading, identity, key) -> bool:
        if others in errors:
            cause = OSError(errors[others], os.strerror(errors[others]))
            raise tier_io_error(NVME, TierOperation.READ, cause)
        return True

    async def confirm() -> None:
        confirmed.append(True)

    with rig(2, segments=SEGMENTS) as made:
        files = Files(made, tmp_path, DirectMode.AUTO)
        slabs = {n: files.put(n) for n in range(45)}
        missing, cut, offline = SEGMENTS
        files.path(missing).unlink()
        os.truncate(files.path(cut), SEGMENT_HEADER_BYTES)
        files.offline.add(offline)
        counts = files.scrub(recheck=recheck, confirm=confirm)
        assert (counts.io_errors, counts.pages_corrupt) == (45, 0)
        assert confirmed
        gone = (missing, cut) if others == "cannot either" else ()
        assert made.present(*range(45)) == [n for n in range(45) if slabs[n] not in gone]
        lost = sum(slab == offline for slab in slabs.values())
        assert counts.bytes_done == (45 - lost) * PAGE
    events = [record for record in caplog.records if record.message == "scrub.read_failed"]
    assert {record.levelname for record in events} == {"WARNING"}


def test_a_second_reading_that_fails_condemns_nothing(tmp_path):
    with rig(3, segments=SEGMENTS) as made:
        files = Files(made, tmp_path, DirectMode.AUTO)
        files.put(1)
        files.flip(1, 5000)

        async def broken(reading, identity, key):
            raise tier_io_error(NVME, TierOperation.READ, OSError(errno.EIO, "broken"))

        counts = files.scrub(recheck=broken)
        assert (counts.pages_corrupt, counts.io_errors) == (0, 1)
        assert made.present(1) == [1]


def test_both_tiers_are_scrubbed_in_turn(tmp_path):
    with rig(4, segments=SEGMENTS) as made:
        files = Files(made, tmp_path, DirectMode.AUTO)
        made.put("host")
        files.put("nvme")
        scrubber = made.scrubber(nvme=files, recheck=files.recheck)
        assert scrubber.tiers == (Tier.HOST, NVME)

        async def main():
            forever = asyncio.create_task(scrubber.scrub_forever(0.01, bytes_per_second=FAST))
            await until(lambda: NVME in scrubber.last)
            forever.cancel()
            await asyncio.wait([forever])

        asyncio.run(main())
        whole = ScrubCounts(pages_done=1, pages_total=1, bytes_done=PAGE)
        assert {tier: report.counts for tier, report in scrubber.last.items()} == {
            Tier.HOST: whole,
            NVME: whole,
        }
