"""What damage to the files of the NVMe tier costs a start: what it hits and no more, and counted;
what cannot be read or is of others is refused by name, and nothing is wiped.
"""

from __future__ import annotations

import errno
import random
import shutil
from pathlib import Path

import pytest
from recovery_model import (
    SLABS,
    UNITS,
    World,
    check_exact,
    check_sound,
    flipped,
    full_world,
    page,
    record_of,
    resize,
    slots_of,
)

from kvtier.errors import DirectoryError
from kvtier.packing.checksum import header_sum
from kvtier.packing.record import decode_header
from kvtier.testing.faulty_tier import Fault, FaultKind, FaultyTier
from kvtier.tiers import nvme_state
from kvtier.tiers.base import TierOperation
from kvtier.tiers.nvme_recovery import Base

FIRST_READ_FAILS = Fault(kind=FaultKind.EIO, operation=TierOperation.READ, nth=1)


# -- damage ---------------------------------------------------------------------------------------


@pytest.fixture
def world(tmp_path) -> World:
    return World(tmp_path, random.Random(1))


def test_kind_11_restart_any_flipped_byte_of_the_newest_checkpoint(tmp_path):
    world = full_world(tmp_path)
    before = check_exact(world, world.recover())
    assert world.recover().report.base is Base.NEWEST
    path = tmp_path / "checkpoint"
    whole = path.read_bytes()
    rng = random.Random(11)
    for at in [*range(128), *rng.sample(range(128, len(whole)), 60)]:
        flipped(path, at, rng.randrange(8))
        recovered = world.recover()
        assert recovered.report.base is Base.OLD, at
        assert len(recovered.report.bad_checkpoints) == 1
        assert recovered.base_number == world.number - 1
        assert recovered.next_number == world.number + 1
        assert check_exact(world, recovered).keys() == before.keys(), at
        path.write_bytes(whole)


@pytest.mark.parametrize("size", ["0", "1", "half", "size-1", "size+1"])
@pytest.mark.parametrize("both", [False, True])
def test_kind_17_torn_checkpoint_file(tmp_path, size, both):
    world = full_world(tmp_path)
    before = check_exact(world, world.recover())
    for name in ("checkpoint", "checkpoint.old")[: 1 + both]:
        resize(tmp_path / name, size)
    recovered = world.recover()
    assert len(recovered.report.bad_checkpoints) == 1 + both
    assert recovered.report.is_lost is both
    assert recovered.next_number == world.number + 1
    if both:
        assert recovered.report.why == "there is no whole checkpoint"
        assert len(recovered.pages) == 0
        assert recovered.classes == {}
    else:
        assert check_exact(world, recovered).keys() == before.keys()


@pytest.mark.parametrize("size", ["0", "1", "half", "size-1", "size+1"])
def test_kind_17_torn_journal_file(tmp_path, size):
    world = full_world(tmp_path)
    resize(world.journal, size)
    recovered = world.recover()
    found = check_sound(world, recovered)
    assert {page(0), page(1), page(2), page(4), page(5), page(6)} <= found.keys()
    assert not {copy.generation for copy in found.values()} & world.gone
    assert recovered.report.torn_bytes == {"0": 0, "1": 1, "size-1": 63, "size+1": 1}.get(
        size, recovered.report.torn_bytes
    )


def test_kind_11_restart_any_flipped_byte_of_a_journal_frame(tmp_path):
    """Three drops, the middle one damaged: its page alone is back, and it is counted."""
    world = World(tmp_path, random.Random(4))
    copies = [world.put(page(number), 8192) for number in range(4)]
    start = world.journal.stat().st_size
    for copy in copies[:3]:
        world.condemn(copy.id)
    whole = world.journal.read_bytes()
    frame = (len(whole) - start) // 3
    rng = random.Random(12)
    for at in range(start + frame, start + 2 * frame):
        flipped(world.journal, at, rng.randrange(8))
        recovered = world.recover()
        found = {copy.generation for copy in check_sound(world, recovered).values()}
        is_padding = found == {copies[3].generation}
        assert found in ({copies[3].generation}, {copies[1].generation, copies[3].generation})
        assert recovered.report.bad_frames == (0 if is_padding else 1), at
        assert recovered.report.torn_bytes == 0
        world.journal.write_bytes(whole)


def test_kind_11_restart_any_flipped_byte_of_a_header(tmp_path):
    world = World(tmp_path, random.Random(6))
    copies = [world.put(page(number), 8192) for number in range(6)]
    world.checkpoint()
    world.put(page(6), 8192)  # marks the slab of some of them
    marked = next(iter(world.marks))
    hit = next(copy for copy in world.live.values() if copy.slot // UNITS == marked)
    assert hit in copies
    block = bytearray(4096)
    world.tier.read(hit.slot, 0, block)
    rng = random.Random(13)
    for at in [*range(240), *rng.sample(range(240, 4088), 60), *range(4088, 4096)]:
        damaged = bytearray(block)
        damaged[at] ^= 1 << rng.randrange(8)
        world.tier.write(hit.slot, [damaged])
        recovered = world.recover()
        assert set(check_sound(world, recovered)) == set(world.live) - {hit.id}, at
        assert recovered.report.damaged == 1, at
        assert recovered.report.misplaced == 0
    world.tier.write(hit.slot, [block])
    assert set(check_exact(world, world.recover())) == set(world.live)


def test_a_record_in_the_place_of_another_is_none(world):
    copy = world.put(page(1), 8192)
    other = next(slot for slot in slots_of(copy.slot // UNITS, 8192) if slot != copy.slot)
    world.tier.write(other, record_of(copy))
    recovered = world.recover()
    assert check_sound(world, recovered) == {page(1): copy}
    assert recovered.report.misplaced == 1


def test_kind_17_torn_write_that_a_power_cut_undid(world):
    """A page is listed and its record lost: the deleted one before it is in its place again."""
    deleted = world.put(page(1), 8192)
    old = record_of(deleted)
    world.delete([page(1)])
    listed = world.put(page(2), 8192)
    while listed.slot != deleted.slot:
        world.evict(page(2))
        listed = world.put(page(2), 8192)
    world.checkpoint()
    world.mark(listed.slot // UNITS)
    world.tier.write(listed.slot, old)
    recovered = world.recover()
    assert len(recovered.pages) == 0
    assert recovered.report.stale >= 1


@pytest.mark.parametrize("is_listed", [False, True])
@pytest.mark.parametrize("torn", [1, 2])
def test_kind_17_torn_copy_is_not_in_the_way_of_the_one_before_it(world, torn, is_listed):
    """The process ended while one more copy of a page that was there was being written."""
    whole = world.put(page(1), 16384)
    if is_listed:
        world.checkpoint()
    for _ in range(torn):
        cut = world.begin(page(1), 16384)
        header, payload, padding = record_of(cut)
        world.tier.write(cut.slot, [header, payload[:4096], bytes(len(payload) - 4096), padding])
        world.written[cut.generation] = cut
    recovered = world.recover()
    assert check_exact(world, recovered) == {page(1): whole}
    assert (recovered.report.torn, recovered.report.superseded) == (torn, 0)
    assert recovered.last_generation == cut.generation


def test_a_copy_that_cannot_be_read_is_not_in_the_way_of_the_one_before_it(world):
    before = world.put(page(1), 16384)
    after = world.put(page(1), 16384)
    scans = len({copy.slot // UNITS for copy in (before, after)})
    fault = Fault(kind=FaultKind.EIO, operation=TierOperation.READ, nth=scans + 1)
    recovered = world.recover(tier=FaultyTier(world.tier, [fault], seed=1))
    assert check_sound(world, recovered) == {page(1): before}


def test_the_only_copy_of_a_page_is_taken_unread(world):
    """Whoever reads it finds out; a start that reads every payload takes too long."""
    cut = world.begin(page(1), 16384)
    world.tier.write(cut.slot, record_of(cut)[:1])
    world.written[cut.generation] = cut
    recovered = world.recover()
    assert check_sound(world, recovered) == {page(1): cut}
    assert recovered.report.torn == 0


@pytest.mark.parametrize(("at", "added"), [(168, 1), (210, 2)], ids=["generation", "shard"])
def test_a_sound_header_that_contradicts_itself_is_damaged(world, at, added):
    """Generation and sequence differ, or a shard above 65535: a faulty writer made it."""
    copy = world.put(page(1), 8192)
    block = bytearray(record_of(copy)[0])
    block[at] += added
    block[4088:] = header_sum(block[:4088]).to_bytes(8, "little")
    decode_header(block)
    world.tier.write(copy.slot, [block])
    recovered = world.recover()
    assert len(recovered.pages) == 0
    assert recovered.report.damaged == 1


def test_a_segment_that_cannot_be_read_is_skipped_and_named(world):
    small = world.put(page(1), 8192)
    big = world.put(page(2), 16384)
    assert small.slot // UNITS != big.slot // UNITS
    slabs = sorted(copy.slot // UNITS for copy in (small, big))
    recovered = world.recover(tier=FaultyTier(world.tier, [FIRST_READ_FAILS], seed=1))
    assert len(recovered.pages) == 1
    assert recovered.report.segments_scanned == 1
    (words,) = recovered.report.skipped
    assert words.startswith(f"slab {slabs[0]}: nvme tier: read failed")
    # Its page waits for a start that can read it, in a place that nobody uses until then.
    assert recovered.unread == {slabs[0]}
    assert recovered.waits == {0: 0}, "no checkpoint lists it: its number is not known"
    assert set(recovered.classes) == {slabs[1]}
    assert any(words in said for said in recovered.report.warnings())


def test_a_mark_that_makes_no_sense_is_skipped_and_named(world):
    world.put(page(1), 8192)
    world.classes[SLABS[-1]] = 5000
    world.mark(SLABS[-1])
    recovered = world.recover()
    assert set(check_exact(world, recovered)) == {page(1)}
    assert recovered.report.skipped == (f"slab {SLABS[-1]}: it cannot hold records of 5000 bytes",)


# -- files that are missing, unreadable, or of others ---------------------------------------------


def listing(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint.old", "journal-0000000003"])
def test_kind_11_restart_eio_is_an_error_and_wipes_nothing(tmp_path, monkeypatch, name):
    world = full_world(tmp_path)
    assert world.journal.name == "journal-0000000003"
    if name == "checkpoint.old":
        (tmp_path / "checkpoint").unlink()
    before = listing(tmp_path)
    read_plain = nvme_state.read_plain

    def failing(path: Path) -> bytes:
        if path.name == name:
            raise OSError(errno.EIO, "Input/output error")
        return read_plain(path)

    with monkeypatch.context() as patch:
        patch.setattr(nvme_state, "read_plain", failing)
        with pytest.raises(DirectoryError, match=f"{name} cannot be read: Input/output") as caught:
            world.recover()
    assert "nothing was changed" in caught.value.remedy
    assert listing(tmp_path) == before
    check_exact(world, world.recover())


def test_kind_11_restart_a_directory_that_cannot_be_listed(world):
    shutil.rmtree(world.directory)
    with pytest.raises(DirectoryError, match="cannot be read"):
        world.recover()


def test_a_crash_between_the_two_renames(tmp_path):
    """`checkpoint` has become `checkpoint.old`, the new one has not its name yet."""
    world = full_world(tmp_path)
    (tmp_path / "checkpoint").replace(tmp_path / "checkpoint.old")
    recovered = world.recover()
    check_exact(world, recovered)
    assert recovered.report.base is Base.OLD
    assert recovered.report.bad_checkpoints == ()
    assert recovered.base_number == world.number


@pytest.mark.parametrize(
    ("gone", "why"),
    [
        (["checkpoint", "checkpoint.old"], "there is no whole checkpoint"),
        (["journal-0000000003"], "journal 3 is missing"),
        (["checkpoint", "journal-0000000002"], "journal 2 is missing (journal 3 is there)"),
    ],
)
def test_what_could_bring_back_deleted_pages_brings_back_none(tmp_path, gone, why):
    world = full_world(tmp_path)
    for name in gone:
        (tmp_path / name).unlink()
    recovered = world.recover()
    assert len(recovered.pages) == 0
    assert (recovered.report.is_lost, recovered.report.why) == (True, why)
    assert recovered.base_number is None
    assert recovered.next_number > 3 or gone == ["journal-0000000003"]
    assert any(why in said for said in recovered.report.warnings())


def test_files_of_another_directory_are_refused(tmp_path):
    world = full_world(tmp_path)
    with pytest.raises(DirectoryError, match="belongs to another daemon directory") as caught:
        world.recover(directory_id=bytes(16))
    assert "--discard-cache" in caught.value.remedy


def test_what_is_no_file_of_the_tier_is_left_alone(tmp_path):
    world = full_world(tmp_path)
    for name in ("journal-1", "journal-00000000099", "checkpoint.bak", "journal-0000000099~"):
        (tmp_path / name).write_bytes(b"?")
    check_exact(world, world.recover())
