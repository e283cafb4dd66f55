"""A bound of pages a tier: it is never passed, and what one tier has is not taken from another."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.core.generations import Generations
from kvtier.core.handles import Filling, Reading
from kvtier.core.page import GetCode, PutCode, Tier
from kvtier.core.policy import POLICIES
from kvtier.core.slabs import SlabAllocator
from kvtier.core.snapshots import Copies
from kvtier.core.store import Store
from kvtier.core.store_config import StoreConfig
from tests.core.support import NS, RECORD, demote, key, keys, meta, present, put

HOST, NVME = Tier.HOST, Tier.NVME
HOST_PAGES, NVME_PAGES = 16, 24
#: Slots of a slab; NVMe has room for far more pages than it may have.
SLOTS, NVME_SLABS = 8, 16


def bound_store(policy: str = "lru", *, last_generation: int = 0) -> Store:
    slab = RECORD * SLOTS
    tiers = {
        HOST: SlabAllocator(slab_bytes=slab, numbers=range(HOST_PAGES // SLOTS)),
        NVME: SlabAllocator(slab_bytes=slab, numbers=range(NVME_SLABS)),
    }
    store = Store(
        StoreConfig(
            boot_id=99,
            pages_max=HOST_PAGES + NVME_PAGES,
            tier_pages_max={HOST: HOST_PAGES, NVME: NVME_PAGES},
            seed=1234,
        ),
        tiers=tiers,
        generations=Generations(last_generation, lambda bound: None),
        make_policy=POLICIES[policy],
    )
    store.open_namespace(NS, 1)
    for tier, slabs in ((HOST, HOST_PAGES // SLOTS), (NVME, NVME_SLABS)):
        for number in range(slabs):
            store.room.grant(tier, number)
    return store


def copies(store: Store, tier: Tier) -> int:
    """In any state: each takes a row of the table."""
    counts = store.status()[tier]
    return counts.filling + counts.sealed + counts.retiring + counts.quarantined


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_tier_has_never_more_pages_than_its_bound_and_host_puts_never_starve(policy: str) -> None:
    store = bound_store(policy)
    for n in range(200):
        assert put(store, n) is PutCode.STORED
        assert demote(store, n) is PutCode.STORED
        assert copies(store, NVME) == min(n + 1, NVME_PAGES)
        assert copies(store, HOST) == min(n + 1, HOST_PAGES)
    assert store.status()[NVME].free_bytes > store.status()[NVME].used_bytes, "not for want of room"
    store.survey.check()


@pytest.mark.parametrize("record", [RECORD, 4 * RECORD])
def test_at_the_bound_pages_of_another_size_give_way(record: int) -> None:
    """Also where every page there is of the other size."""
    store = bound_store()
    for n in range(NVME_PAGES):
        assert put(store, n) is PutCode.STORED
        assert demote(store, n) is PutCode.STORED
    assert put(store, 1000, record=record) is PutCode.STORED
    (source,) = store.acquire(NS, 0, keys([1000]))
    assert isinstance(source, Reading)
    with source:
        code = put(store, 1000, record=record, source=source, tier=NVME)
    assert code is PutCode.STORED
    assert copies(store, NVME) <= NVME_PAGES
    store.survey.check()


def test_at_the_bound_with_everything_in_use_a_page_is_busy_and_host_memory_is_not() -> None:
    store = bound_store()
    for n in range(NVME_PAGES):
        put(store, n)
        demote(store, n)
    for n in range(HOST_PAGES):
        put(store, 500 + n)
    held = store.acquire(NS, 0, keys(range(NVME_PAGES)))
    assert all(isinstance(reading, Reading) for reading in held)
    assert demote(store, 500) is PutCode.BUSY
    assert put(store, 600) is PutCode.STORED
    for reading in held:
        reading.release()
    assert demote(store, 600) is PutCode.STORED
    assert copies(store, NVME) == NVME_PAGES
    store.survey.check()


def test_copies_that_are_being_made_count() -> None:
    store = bound_store()
    fillings = []
    for n in range(NVME_PAGES):
        filling = store.reserve(NS, 0, meta(n), RECORD, tier=NVME)
        assert isinstance(filling, Filling)
        fillings.append(filling)
    assert store.reserve(NS, 0, meta(100), RECORD, tier=NVME) is PutCode.BUSY
    fillings[0].abandon()
    fillings.append(store.reserve(NS, 0, meta(100), RECORD, tier=NVME))
    assert [filling.seal() for filling in fillings[1:]] == [PutCode.STORED] * NVME_PAGES


def as_copies(count: int) -> Copies:
    """What an earlier boot left: page n is copy n, the coldest first."""
    at = np.arange(count)
    return Copies(
        namespace=np.full(count, NS, np.uint32),
        shard=np.zeros(count, np.uint16),
        key=np.frombuffer(b"".join(key(n) for n in range(count)), np.uint8).reshape(-1, 32),
        generation=at.astype(np.uint64) + 1,
        slot=at.astype(np.uint64) * np.uint64(RECORD // 4096),
        length=np.full(count, 64, np.uint64),
        codec=np.full(count, 1, np.uint8),
        lossy=np.zeros(count, np.uint8),
        parent=np.where(at % 4, at - 1, -1).astype(np.int32),
    )


@pytest.mark.parametrize("found", [NVME_PAGES - 3, NVME_PAGES, 3 * NVME_PAGES + 2])
def test_a_restart_takes_the_hottest_up_to_the_bound(found: int) -> None:
    """An earlier boot may have had a higher one. Then host memory is as free as ever."""
    store = bound_store(last_generation=1000)
    slabs = -(-found // SLOTS)
    loaded = store.snapshots.load(NVME, dict.fromkeys(range(slabs), RECORD), as_copies(found))
    assert loaded == min(found, NVME_PAGES)
    assert present(store, range(found)) == list(range(found - loaded, found))
    store.survey.check()
    for n in range(HOST_PAGES):
        assert put(store, 1000 + n) is PutCode.STORED
    assert copies(store, HOST) == HOST_PAGES
    for n in range(HOST_PAGES):
        assert demote(store, 1000 + n) is PutCode.STORED
        assert copies(store, NVME) <= NVME_PAGES
    codes, _ = store.lookup(NS, 0, keys(range(1000, 1000 + HOST_PAGES)))
    assert codes.tolist() == [GetCode.HIT] * HOST_PAGES
    store.survey.check()
