"""Recovery: what was deleted, dropped or bumped never comes back, what was sealed and not evicted
does, whatever the moment of the crash; damage costs what it hits and no more, and is counted.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from recovery_model import (
    DIRECTORY_ID,
    FAMILIES,
    SEGMENT_BYTES,
    SIZES,
    SLABS,
    UNITS,
    World,
    check_exact,
    check_sound,
    copies_of,
    key_of,
    page,
    record_of,
)

from kvtier.packing.checksum import verify_payload
from kvtier.packing.record import decode_header
from kvtier.testing.faulty_tier import Fault, FaultKind, FaultyTier
from kvtier.tiers.base import TierOperation
from kvtier.tiers.nvme_recovery import Base, recover

SEEDS = range(14)
FIRST_READ_FAILS = Fault(kind=FaultKind.EIO, operation=TierOperation.READ, nth=1)


@pytest.fixture
def world(tmp_path) -> World:
    return World(tmp_path, random.Random(1))


def step(world: World) -> None:
    """One random event."""
    rng = world.rng
    id_ = (rng.choice(FAMILIES), rng.randrange(2), key_of(rng.randrange(12)))
    parent = key_of(rng.randrange(12)) if rng.random() < 0.5 else b""
    event = rng.choices(
        ["put", "begin", "finish", "evict", "delete", "condemn", "bump", "checkpoint"],
        [30, 10, 10, 12, 8, 6, 2, 5],
    )[0]
    match event:
        case "put":
            world.put(id_, rng.choice(SIZES), parent)
        case "begin" if len(world.filling) < 4:
            world.begin(id_, rng.choice(SIZES), parent)
        case "finish" if world.filling:
            world.finish(rng.choice(world.filling), seal=rng.random() < 0.8)
        case "evict" if world.live:
            world.evict(rng.choice(list(world.live)))
        case "delete":
            others = [(*id_[:2], key_of(rng.randrange(12))) for _ in range(rng.randrange(3))]
            world.delete([id_, *others])
        case "condemn" if world.live:
            world.condemn(rng.choice(list(world.live)))
        case "bump":
            world.bump(id_[0])
        case "checkpoint":
            world.checkpoint()


# -- the rule, on histories -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_kind_11_restart_brings_back_exactly_what_is_whole(tmp_path, seed):
    """Random histories over several boots, recovered after each boot and at times within."""
    world = World(tmp_path, random.Random(seed))
    for _ in range(4):
        for _ in range(world.rng.randrange(50)):
            step(world)
            if world.rng.random() < 0.1:
                check_exact(world, world.recover())
        recovered = world.recover()
        check_exact(world, recovered)
        assert recovered.report.is_lost is False
        assert recovered.report.damaged == recovered.report.bad_frames == 0
        world.restart(recovered)


@pytest.mark.parametrize("seed", SEEDS)
def test_kind_17_torn_journal_at_any_byte(tmp_path, seed):
    """The newest journal cut anywhere: nothing that was told to be gone before comes back."""
    world = World(tmp_path, random.Random(seed))
    for _ in range(world.rng.randrange(10, 80)):
        step(world)
    whole = world.journal.read_bytes()
    cuts = {len(whole), 0, 1, *(world.rng.randrange(len(whole) + 1) for _ in range(15))}
    for cut in sorted(cuts):
        world.journal.write_bytes(whole[:cut])
        recovered = world.recover()
        found = check_sound(world, recovered)
        told = [
            generations
            for number, size, generations in world.forgotten
            if number < world.number or size <= cut
        ]
        assert not {copy.generation for copy in found.values()} & set().union(*told)
        assert recovered.report.torn_bytes == cut % 64 if cut < 64 else True
        assert recovered.report.bad_frames == 0


@pytest.mark.parametrize("seed", range(10))
def test_kind_17_torn_entry_that_nobody_was_told_of(tmp_path, seed):
    """A crash inside an append: the event happened or it did not, everything before it did."""
    world = World(tmp_path, random.Random(seed))
    for _ in range(40):
        step(world)
    gone = world.put(page(98), 8192)
    before = world.journal.stat().st_size
    live = dict(world.live)
    world.condemn(gone.id)
    whole = world.journal.read_bytes()
    for cut in range(before, len(whole)):
        world.journal.write_bytes(whole[:cut])
        recovered = world.recover()
        found = check_sound(world, recovered)
        assert live.keys() <= found.keys()
        assert found[gone.id].generation == gone.generation
        assert recovered.report.torn_bytes == cut - before
    world.journal.write_bytes(whole)
    assert gone.id not in check_exact(world, world.recover())


def test_recovered_payloads_verify(tmp_path):
    world = World(tmp_path, random.Random(5))
    for _ in range(120):
        step(world)
    for copy in check_exact(world, world.recover()).values():
        if world.live.get(copy.id) is None:
            continue  # evicted: its payload may be partly overwritten, which its sum tells
        record = bytearray(copy.length + 4096)
        world.tier.read(copy.slot, 0, record)
        header = decode_header(record)
        fields = ("key", "fingerprint", "namespace_generation", "shard", "codec", "length")
        assert verify_payload(
            bytes(record[4096:]), header.payload_sum, **{f: getattr(header, f) for f in fields}
        )


# -- the rule, case by case -----------------------------------------------------------------------


def test_a_new_directory_is_empty(tmp_path, world):
    empty = tmp_path / "new"
    empty.mkdir()
    recovered = recover(
        empty,
        directory_id=DIRECTORY_ID,
        tier=world.tier,
        slabs=(),
        segment_bytes=SEGMENT_BYTES,
        generations={},
        generation_floor=0,
    )
    assert len(recovered.pages) == 0
    assert (recovered.base_number, recovered.next_number) == (None, 1)
    assert recovered.report.base is Base.NONE
    assert not recovered.report.is_lost


def test_pages_of_a_checkpoint_are_taken_without_reading(world):
    for number in range(5):
        world.put(page(number), 8192)
    world.checkpoint()
    faulty = FaultyTier(world.tier, [FIRST_READ_FAILS], seed=1)
    recovered = world.recover(tier=faulty)
    assert not faulty.injected
    assert set(check_exact(world, recovered)) == {page(number) for number in range(5)}
    assert (recovered.report.listed, recovered.report.found) == (5, 0)


def test_the_order_is_kept_coldest_first(world):
    world.put(page(1), 8192)
    world.put(page(2), 8192)
    world.checkpoint()
    world.put(page(3), 8192)
    world.put(page(4), 16384)
    assert [bytes(key) for key in world.recover().pages.key] == [key_of(n) for n in (1, 2, 3, 4)]


def test_parents_are_found_again(world):
    world.put(page(1), 8192)
    world.put(page(2), 8192, key_of(1))
    world.checkpoint()
    world.put(page(3), 8192, key_of(2))
    world.put(page(3, shard=1), 8192, key_of(2))
    pages = world.recover().pages
    ids = zip(pages.shard.tolist(), map(bytes, pages.key), strict=False)
    place = {id_: row for row, id_ in enumerate(ids)}
    parent = {who: int(pages.parent[row]) for who, row in place.items()}
    assert parent[0, key_of(1)] == -1
    assert parent[0, key_of(2)] == place[0, key_of(1)]
    assert parent[0, key_of(3)] == place[0, key_of(2)]
    assert parent[1, key_of(3)] >= len(pages), "another shard is another chain"
    assert [bytes(key) for key in pages.key[len(pages) :]] == [key_of(2)]


def test_the_keys_of_parents_that_are_not_there_are_known(world):
    """Of pages in the checkpoint, of pages found, and of one whose parent was deleted since."""
    world.put(page(1), 8192)
    world.put(page(2), 8192, key_of(1))
    world.put(page(3), 8192, key_of(71))
    world.checkpoint()
    world.delete([page(1)])
    world.put(page(71, shard=1), 12288)
    world.put(page(4), 12288, key_of(72))
    found = {copy.id: copy.parent for copy in copies_of(world.recover())}
    wanted = {2: key_of(1), 3: key_of(71), 4: key_of(72)}
    assert {n: found[page(n)] for n in wanted} == wanted
    # It has come since: it lies in a segment that is looked at, its child is only listed.
    world.put(page(71), 12288)
    pages = world.recover().pages
    keys = [bytes(key) for key in pages.key]
    assert pages.parent[keys.index(key_of(3))] == [
        row for row in range(len(pages)) if keys[row] == key_of(71) and pages.shard[row] == 0
    ]


def test_chains_that_bite_their_tail_are_cut(world):
    for number, before in ((1, 3), (2, 1), (3, 2), (4, 3), (5, 5), (6, 60)):
        world.put(page(number), 8192, key_of(before))
    pages = world.recover().pages
    assert pages.parent.tolist() == [-1] * 5 + [6]
    assert bytes(pages.key[6]) == key_of(60)


@pytest.mark.parametrize("at_checkpoint", [False, True])
def test_a_write_in_flight_across_a_checkpoint(world, at_checkpoint):
    copy = world.begin(page(1), 8192)
    given_up = world.begin(page(2), 8192)
    deleted = world.begin(page(3), 8192)
    world.delete([page(3)])
    world.checkpoint()
    world.finish(copy)
    world.finish(given_up, seal=False)
    world.finish(deleted)
    if at_checkpoint:
        world.checkpoint()
    found = check_exact(world, world.recover())
    assert page(1) in found
    assert page(3) not in found


def test_a_slab_of_another_record_size(world):
    """Old headers at places of the new size: listed or not, nothing deleted comes back."""
    old = [world.put(page(number), 8192) for number in range(48)]  # fills every slab
    assert len({copy.slot // UNITS for copy in old}) == len(SLABS)
    world.checkpoint()
    slab = old[0].slot // UNITS
    inside = [copy for copy in old if copy.slot // UNITS == slab]
    world.delete([copy.id for copy in inside])
    new = world.put(page(100), 16384)
    assert new.slot // UNITS == slab
    recovered = world.recover()
    found = check_exact(world, recovered)
    assert {id_ for id_ in found if found[id_].slot // UNITS == slab} == {page(100)}
    assert recovered.classes[slab] == 16384


def test_records_that_are_too_long_for_the_new_size_are_none(world):
    old = world.put(page(1), 16384)
    slab = old.slot // UNITS
    world.evict(page(1))
    world.classes[slab] = 8192
    world.mark(slab)
    recovered = world.recover()
    assert len(recovered.pages) == 0
    assert recovered.report.damaged == recovered.report.misplaced == 0


def test_the_newest_copy_of_a_page_wins(world):
    first = world.put(page(1), 8192)
    second = world.put(page(1), 8192)
    assert first.slot != second.slot
    recovered = world.recover()
    assert check_exact(world, recovered)[page(1)].slot == second.slot
    assert recovered.report.superseded == 1
    counts = recovered.report.counts()
    assert (counts["found"], counts["superseded"], counts["damaged"]) == (1, 1, 0)
    assert "is_lost" not in counts


def test_a_delete_reaches_up_to_its_bound(world):
    world.put(page(1), 8192)
    world.delete([page(1), page(2)])
    again = world.put(page(1), 8192)
    recovered = world.recover()
    assert check_exact(world, recovered) == {page(1): again}
    assert recovered.report.deleted == 1


def test_a_delete_of_another_generation_or_shard_is_not_meant(world):
    kept = world.put(page(1), 8192)
    world.delete([page(1, shard=1)])
    world.generations[FAMILIES[0]] += 1
    world.delete([page(1)])
    world.generations[FAMILIES[0]] -= 1
    world.live[page(1)] = kept
    world.gone.clear()
    assert check_exact(world, world.recover()) == {page(1): kept}


def test_pages_of_a_forgotten_family_are_none(world):
    world.put(page(1), 8192)
    world.put(page(1, family=1), 8192)
    world.checkpoint()
    world.put(page(2), 8192)
    recovered = world.recover(generations={FAMILIES[1]: 1})
    assert recovered.families == ((FAMILIES[1], 1),)
    assert recovered.report.ended == 2


def test_segments_that_are_gone_take_their_pages_with_them(world):
    kept = world.put(page(1), 8192)
    lost = world.put(page(2), 16384)
    world.checkpoint()
    also_lost = world.put(page(3), 12288)
    gone = {lost.slot // UNITS, also_lost.slot // UNITS}
    recovered = world.recover(slabs=[slab for slab in SLABS if slab not in gone])
    assert check_sound(world, recovered) == {page(1): kept}
    assert recovered.report.unplaced == 1
    assert not gone & recovered.classes.keys()


def test_big_records_are_looked_at_header_by_header(tmp_path):
    """Over 128 KiB a record, only its first block is read."""
    world = World(tmp_path, random.Random(2))
    segment, size = 4 << 20, 1 << 20
    copy = world.put(page(1), 8192)
    copy.slot, copy.length = 5 * (segment // 4096) + 256, size - 4096
    world.tier.write(copy.slot, record_of(copy))
    world.classes = {5: size}
    world.marks = {}
    world.mark(5)
    read: list[int] = []

    class Counting:
        tier = world.tier.tier

        def read(self, slot, offset, into):
            read.append(memoryview(into).nbytes)
            world.tier.read(slot, offset, into)

    recovered = world.recover(tier=Counting(), slabs=[5], segment_bytes=segment)
    assert [int(slot) for slot in recovered.pages.slot] == [copy.slot]
    assert read == [4096] * 4


# -- size -----------------------------------------------------------------------------------------


def test_kind_11_restart_with_100_000_pages_is_quick(tmp_path):
    """The columns of a checkpoint are taken as they are; see the report for the seconds."""
    count, segment = 100_000, 256 << 20
    rng = np.random.default_rng(7)
    world = World(tmp_path, random.Random(0))
    per_slab = segment // (17 * 4096)
    place = np.arange(count, dtype=np.uint64)
    slots = place // np.uint64(per_slab) * np.uint64(segment // 4096) + place % np.uint64(
        per_slab
    ) * np.uint64(17)
    slabs = range(-(-count // per_slab))
    world.last = count
    empty = world.snapshot()
    pages = {
        "family": np.zeros(count, np.uint32),
        "shard": np.zeros(count, np.uint16),
        "key": rng.integers(0, 256, (count, 32), np.uint8),
        "generation": place + np.uint64(1),
        "slot": slots,
        "length": np.full(count, 65536, np.uint64),
        "codec": np.ones(count, np.uint8),
        "lossy": np.zeros(count, np.uint8),
        "parent": np.where(place % np.uint64(64) == 0, -1, place.astype(np.int64) - 1).astype(
            np.int32
        ),
    }
    snapshot = type(empty)(
        last_generation=count,
        classes=dict.fromkeys(slabs, 17 * 4096),
        families=((FAMILIES[0], 1),),
        pages=type(empty.pages)(**pages),
        in_flight=(),
    )
    world.write_checkpoint(snapshot)
    recovered = world.recover(slabs=slabs, segment_bytes=segment)
    assert recovered.report.listed == count
    for name, column in recovered.pages.columns():
        assert np.array_equal(column, pages[name]), name
