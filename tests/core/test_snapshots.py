"""What a snapshot of a tier holds comes back, by the bulk way, as it was."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.core.generations import Generations
from kvtier.core.handles import Reading
from kvtier.core.page import Codec, DeleteCode, PutCode, Tier
from kvtier.core.slabs import SlabAllocator
from kvtier.core.snapshots import Copies
from kvtier.core.store import Store
from kvtier.core.store_config import StoreConfig
from tests.core.support import NS, RECORD, begin_move, demote, key, keys, make_store, present, put


def reload(store: Store, *, pages_max: int = 64) -> Store:
    """A new store with what a snapshot of the NVMe tier says, as after a restart."""
    image = store.snapshots.take(Tier.NVME)
    copies = image.copies()
    slabs = sorted(image.bindings)
    size = image.slab_units * 4096
    tiers = {
        Tier.HOST: SlabAllocator(slab_bytes=size, numbers=range(1)),
        Tier.NVME: SlabAllocator(slab_bytes=size, numbers=[0, 1, 5]),
    }
    fresh = Store(
        StoreConfig(boot_id=100, pages_max=pages_max, seed=9),
        tiers=tiers,
        generations=Generations(1 << 20, lambda bound: None),
    )
    fresh.room.grant(Tier.HOST, 0)
    for slab in slabs:
        fresh.room.grant(Tier.NVME, slab)
    fresh.open_namespace(NS, 1)
    assert fresh.snapshots.load(Tier.NVME, image.bindings, copies) == min(len(copies), pages_max)
    fresh.survey.check()
    return fresh


def test_what_a_snapshot_holds_comes_back() -> None:
    store = make_store(slots=8, nvme_slots=6)
    for n in range(1, 7):
        put(store, n, parent=n - 1 if n > 1 else None)
        demote(store, n, parent=n - 1 if n > 1 else None)
    put(store, 9)  # in host memory alone
    store.delete(NS, 0, keys([6]))
    fresh = reload(store)
    assert present(fresh, range(1, 10)) == [1, 2, 3, 4, 5]
    (reading,) = fresh.acquire(NS, 0, keys([3]))
    (before,) = store.acquire(NS, 0, keys([3]), is_use=False)
    assert isinstance(reading, Reading)
    assert isinstance(before, Reading)
    (lower,) = [
        r for r in [store.acquire_next(before.ref, NS, 0, key(3))] if isinstance(r, Reading)
    ]
    assert (reading.ref.slot, reading.ref.generation) == (lower.ref.slot, lower.ref.generation)
    assert (reading.length, reading.codec, reading.lossy) == (64, Codec.RAW, False)
    assert reading.ref.boot_id == 100
    reading.release()
    # Chains and free slots are as they were: one slot is free, then the tail gives way.
    for n, left in ((11, [1, 2, 3, 4, 5]), (12, [1, 2, 3, 4]), (13, [1, 2, 3])):
        put(fresh, n)
        assert demote(fresh, n) is PutCode.STORED
        assert fresh.survey.in_tier(NS, 0, keys(left), Tier.NVME).all()
        assert int(fresh.survey.in_tier(NS, 0, keys(range(1, 6)), Tier.NVME).sum()) == len(left)
    fresh.survey.check()


def test_a_table_with_less_room_keeps_the_hottest() -> None:
    store = make_store(slots=8, nvme_slots=6)
    for n in range(1, 7):
        put(store, n)
        demote(store, n)
    fresh = reload(store, pages_max=4)
    assert present(fresh, range(1, 7)) == [3, 4, 5, 6]


def linked(store: Store, n: int) -> bool:
    """Whether the copy on NVMe has its parent's before it."""
    table = store._residents.table
    rows = [row for row in store.survey.sealed_rows(Tier.NVME).tolist() if table.key(row) == key(n)]
    return table.parent[rows[0]] != 0


def test_what_waits_for_a_page_waits_for_it_after_a_restart() -> None:
    store = make_store(slots=8, nvme_slots=8)
    for n in range(1, 7):
        put(store, n)
    for n, parent in ((2, 1), (3, 2), (4, 1), (5, 20), (6, 21)):
        demote(store, n, parent=parent)
    store.delete(NS, 0, keys([6]))  # it has waited
    image = store.snapshots.take(Tier.NVME)
    demote(store, 1)  # what comes after the moment is not in it
    store.delete(NS, 0, keys([5]))
    copies = image.copies()
    assert [row.tobytes() for row in copies.key[:4]] == [key(n) for n in (2, 3, 4, 5)]
    assert {row.tobytes() for row in copies.key[4:]} == {key(1), key(20)}
    before = [copies.key[at].tobytes() for at in copies.parent.tolist()]
    assert before == [key(1), key(2), key(1), key(20)]


def test_what_waited_at_a_restart_is_linked_when_the_page_comes() -> None:
    store = make_store(slots=8, nvme_slots=8)
    for n, parent in ((2, 1), (3, 2), (4, 1)):
        put(store, n)
        demote(store, n, parent=parent)
    fresh = reload(reload(store))
    assert [linked(fresh, n) for n in (2, 3, 4)] == [False, True, False]
    put(fresh, 1)
    demote(fresh, 1)
    assert [linked(fresh, n) for n in (2, 3, 4)] == [True, True, True]
    fresh.survey.check()
    # So the head goes last.
    left = [1, 2, 3, 4]
    for n in range(10, 20):
        put(fresh, n)
        demote(fresh, n)
        left = [n for n in left if present(fresh, [n])]
        assert 1 in left or not left
    assert left == []


def test_a_page_whose_parent_found_no_room_waits_for_it() -> None:
    store = make_store(slots=8, nvme_slots=6)
    for n in range(1, 4):
        put(store, n)
        demote(store, n, parent=n - 1 if n > 1 else None)
    fresh = reload(store, pages_max=2)
    assert present(fresh, range(1, 4)) == [2, 3]
    fresh.delete(NS, 0, keys([3]))
    put(fresh, 1, tier=Tier.NVME)
    assert linked(fresh, 2)
    fresh.survey.check()


def test_of_too_many_that_wait_the_hottest_do(monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(slots=8, nvme_slots=8)
    for n in range(1, 7):
        put(store, n)
        demote(store, n, parent=100 + n)
    monkeypatch.setattr("kvtier.core.links._WAITING_MAX", 4)
    fresh = reload(store)
    waiting = [place[3] for place in fresh._residents.links.waiting()]
    assert waiting == [key(100 + n) for n in (3, 4, 5, 6)]


def test_a_snapshot_knows_what_is_in_flight() -> None:
    store = make_store(slots=4, nvme_slots=4)
    for n in (1, 2, 3):
        put(store, n)
    demote(store, 1)
    moving, target = begin_move(store, 2)
    doomed, other = begin_move(store, 3)
    store.delete(NS, 0, keys([3]))
    image = store.snapshots.take(Tier.NVME)
    assert image.in_flight == ((target.ref.generation, target.ref.slot),)
    assert image.last_generation == other.ref.generation
    assert image.copies().key.tobytes() == key(1)
    assert image.slab_of(target.ref.slot) in image.bindings
    target.abandon()
    other.abandon()
    moving.release()
    doomed.release()
    assert store.snapshots.take(Tier.NVME).in_flight == ()


@pytest.mark.parametrize("seed", range(4))
def test_many_pages_are_found_after_a_bulk_load(seed: int) -> None:
    """The bulk way into the index is the same index as the one by one."""
    rng = np.random.default_rng(seed)
    n = 5000
    names = rng.integers(0, 256, (n, 32), np.uint8)
    store = Store(
        StoreConfig(boot_id=1, pages_max=2 * n, seed=seed),
        tiers={Tier.NVME: SlabAllocator(slab_bytes=n * RECORD, numbers=[7])},
        generations=Generations(10**6, lambda bound: None),
    )
    store.room.grant(Tier.NVME, 7)
    shards = rng.integers(0, 2, n).astype(np.uint16)
    for number in (1, 2):
        store.open_namespace(number, 1)
    spaces = rng.integers(1, 3, n).astype(np.uint32)
    copies = Copies(
        namespace=spaces,
        shard=shards,
        key=names,
        generation=np.arange(1, n + 1, dtype=np.uint64),
        slot=(7 * n + np.arange(n, dtype=np.uint64)) * np.uint64(RECORD // 4096),
        length=np.full(n, 64, np.uint64),
        codec=np.ones(n, np.uint8),
        lossy=np.zeros(n, np.uint8),
        parent=np.full(n, -1, np.int32),
    )
    assert store.snapshots.load(Tier.NVME, {7: RECORD}, copies) == n
    store.survey.check()
    for number in (1, 2):
        for shard in (0, 1):
            of_it = (spaces == number) & (shards == shard)
            found = store.survey.in_tier(number, shard, names, Tier.NVME)
            assert found.tolist() == of_it.tolist(), seed
    for i in rng.permutation(n)[:2500].tolist():
        codes = store.delete(int(spaces[i]), int(shards[i]), names[i : i + 1])
        assert codes.tolist() == [DeleteCode.DELETED]
    store.survey.check()
