"""What a snapshot of a tier holds comes back, by the bulk way, as it was."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.core.generations import Generations
from kvtier.core.handles import Reading
from kvtier.core.page import Codec, DeleteCode, PutCode, Tier
from kvtier.core.slabs import SlabAllocator
from kvtier.core.snapshots import Copies
from kvtier.core.store import Store, StoreConfig
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
