"""Who gives way for whom: eviction order, chains, shards, size classes, quarantine, sweeps.

Every test holds for every policy.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from kvtier.core.handles import Filling, Reading
from kvtier.core.page import Codec, GetCode, LeaseCode, PutCode, Tier
from kvtier.core.policy import POLICIES
from kvtier.core.store import Store
from tests.core.support import NS, RECORD, keys, make_store, meta, present, put


@pytest.fixture(params=POLICIES, autouse=True)
def policy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `make_store` makes has this policy in all tiers."""
    with_policy = partial(Store, make_policy=POLICIES[request.param])
    monkeypatch.setattr("tests.core.support.Store", with_policy)


def test_the_tail_of_a_chain_goes_before_its_head() -> None:
    store = make_store(slots=100)
    for n in range(100):  # in calls of any size: later pages of the chain are put later
        assert put(store, n, n - 1 if n else None) is PutCode.STORED
    for n in range(1000, 1030):
        assert put(store, n) is PutCode.STORED
    assert present(store, range(100)) == list(range(70))
    store.survey.check()


def test_a_touched_chain_outlives_a_newer_one() -> None:
    store = make_store(slots=8)
    for n in range(4):
        put(store, n, n - 1 if n else None)
    for n in range(10, 14):
        put(store, n, n - 1 if n > 10 else None)
    for _ in range(2):  # S3-FIFO wants to see a page used twice
        for outcome in store.acquire(NS, 0, keys(range(4))):
            assert isinstance(outcome, Reading)
            outcome.release()
    for n in range(20, 23):
        put(store, n)
    assert present(store, [0, 1, 2, 3, 10, 11, 12, 13]) == [0, 1, 2, 3, 10]
    store.survey.check()


def test_every_resident_page_keeps_its_parent_under_random_pressure() -> None:
    rng = np.random.default_rng(5)
    store = make_store(slots=40)
    parent_of: dict[int, int | None] = {}
    for n in range(250):
        here = present(store, list(parent_of))
        parent = int(rng.choice(here)) if here and rng.random() < 0.8 else None
        parent_of[n] = parent
        put(store, n, parent)
        resident = set(present(store, list(parent_of)))
        orphans = [p for p in resident if parent_of[p] is not None and parent_of[p] not in resident]
        assert orphans == [], f"after page {n}, seed 5"
    store.survey.check()


def test_a_full_tier_of_pinned_pages_is_busy_and_recovers() -> None:
    store = make_store(slots=4)
    for n in range(4):
        put(store, n)
    lease, codes = store.pins.pin(7, NS, 0, keys([0, 1, 2, 3]), deadline=10.0)
    assert codes.tolist() == [GetCode.HIT] * 4
    assert put(store, 9) is PutCode.BUSY
    assert present(store, range(4)) == [0, 1, 2, 3]
    assert store.pins.unpin(7, [lease], now=1.0) == [LeaseCode.RELEASED]
    assert put(store, 9) is PutCode.STORED
    store.survey.check()


def test_condemned_bytes_are_kept_up_to_the_cap() -> None:
    store = make_store(slots=40)  # 5 % of 40 pages: two
    for n in range(6):
        put(store, n)
    for n in range(6):
        (reading,) = store.acquire(NS, 0, keys([n]))
        assert isinstance(reading, Reading)
        ref = reading.ref
        reading.release()
        assert store.condemn(ref) is True
        assert present(store, [n]) == []
        assert store.status()[Tier.HOST].quarantined == min(n + 1, 2)
    store.survey.check()


def test_a_page_condemned_while_it_is_read_is_drained_when_the_reading_ends() -> None:
    store = make_store(slots=1)
    put(store, 1)
    (reading,) = store.acquire(NS, 0, keys([1]))
    assert isinstance(reading, Reading)
    assert store.condemn(reading.ref) is True
    assert put(store, 2) is PutCode.BUSY
    reading.release()
    assert put(store, 2) is PutCode.STORED
    store.survey.check()


def test_an_exact_page_takes_the_place_of_a_lossy_one() -> None:
    store = make_store(slots=4)
    lossy = replace(meta(1), lossy=True, codec=Codec.FP8)
    first = store.reserve(NS, 0, lossy, RECORD)
    assert isinstance(first, Filling)
    first.seal()
    put(store, 2, 1)
    assert store.reserve(NS, 0, lossy, RECORD) is PutCode.EXISTS
    (reading,) = store.acquire(NS, 0, keys([1]))
    assert isinstance(reading, Reading)
    assert put(store, 1) is PutCode.STORED
    (exact,) = store.acquire(NS, 0, keys([1]))
    assert isinstance(exact, Reading)
    assert (reading.lossy, exact.lossy) == (True, False)
    assert store.status()[Tier.HOST].retiring == 1, "the old reader keeps its bytes"
    store.survey.check()
    reading.release()
    exact.release()
    assert put(store, 1) is PutCode.EXISTS
    assert store.reserve(NS, 0, lossy, RECORD) is PutCode.EXISTS
    for n in range(10, 13):  # the page after it still keeps it
        put(store, n)
    assert present(store, [1, 2]) == [1]
    store.survey.check()


def test_a_slab_far_down_the_list_gives_way_when_the_colder_ones_are_kept() -> None:
    store = make_store(slots=24, slab_slots=2)
    for slab in range(12):  # two chains side by side: the head in a slab, its tail pinned elsewhere
        put(store, slab)
        put(store, 100 + slab)
    for n in range(8):
        put(store, 200 + n, n)
    tails = [200 + n for n in range(8)]
    store.pins.pin(7, NS, 0, keys([*tails, *range(8)]), deadline=9.0)
    for n in range(3):
        assert put(store, 300 + n, record=2 * RECORD) is PutCode.STORED, n
    store.survey.check()


def test_numbers_that_the_table_cannot_hold_change_nothing() -> None:
    store = make_store(slots=2)
    for _ in range(20):
        with pytest.raises(ValueError, match="shard 70000"):
            put(store, 1, shard=70_000)
    assert put(store, 1) is PutCode.STORED
    store.survey.check()


def test_a_bump_of_many_linked_pages_is_swept_in_short_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Heads before tails, tails before heads: no step may look for children one by one."""
    store = make_store(slots=3000)
    for n in range(3000):
        put(store, n, n - 1 if n % 100 else None)
    scans: list[int] = []
    table = store._residents.table
    original = table.orphan_children
    monkeypatch.setattr(
        table, "orphan_children", lambda rows: (scans.append(len(rows)), original(rows))
    )
    store.end_namespace(NS)
    swept = 0
    while step := store.sweep(256):
        swept += step
    assert swept == 3000
    assert len(scans) <= 1
    store.survey.check()


def test_shards_of_a_page_are_found_and_evicted_together() -> None:
    store = make_store(slots=8, shard_count=4)
    for n in range(2):
        for shard in range(4):
            assert present(store, [n]) == []
            put(store, n, shard=shard)
        assert present(store, [n]) == [n]
        assert present(store, [n], shard=3) == [n]
    put(store, 2, shard=0)  # evicts page 0, all shards of it
    assert present(store, [0, 1, 2]) == [1]
    assert store.status()[Tier.HOST].sealed == 5
    lease, codes = store.pins.pin(7, NS, 2, keys([1]), deadline=9.0)
    assert codes.tolist() == [GetCode.HIT]
    for shard in range(4):
        put(store, 3, shard=shard)
    assert present(store, [1]) == [1], "a page with one pinned shard stays whole"
    store.pins.unpin(7, [lease], now=1.0)
    store.survey.check()


def test_a_slab_changes_class_when_all_of_it_is_colder() -> None:
    store = make_store(slots=8, slab_slots=4)
    for n in range(8):
        put(store, n)
    big = 2 * RECORD
    assert put(store, 100, record=big) is PutCode.STORED
    assert present(store, range(8)) == [4, 5, 6, 7], "the coldest slab gave way"
    assert put(store, 101, record=big) is PutCode.STORED
    assert store.counters().slabs_moved == 1
    store.survey.check()


def test_a_slab_with_a_page_whose_sibling_is_pinned_does_not_give_way() -> None:
    store = make_store(slots=8, slab_slots=2, shard_count=2)
    for n in range(4):  # page n: shard 0 and 1 side by side in slab n
        for shard in range(2):
            assert put(store, n, shard=shard) is PutCode.STORED
    lease, _ = store.pins.pin(7, NS, 1, keys([0, 1]), deadline=9.0)
    big = 2 * RECORD
    assert put(store, 100, record=big) is PutCode.STORED
    assert present(store, [0, 1, 2, 3]) == [0, 1, 3], "the coldest slab of which nothing is pinned"
    store.end_namespace(NS)
    assert store.pins.unpin(7, [lease], now=1.0) == [LeaseCode.RELEASED]
    while store.sweep(100):
        pass
    assert store.status()[Tier.HOST].used_bytes == 0
    store.survey.check()


def test_pinned_siblings_never_hide_pages_that_can_go() -> None:
    """Rank 0 pins two thousand pages; rank 1's copies of them are the coldest, and stay."""
    count = 2000
    store = make_store(slots=2 * count + 4, shard_count=2)
    for n in range(count + 2):
        for shard in range(2):
            put(store, n, shard=shard)
    store.pins.pin(7, NS, 0, keys(range(count)), deadline=9.0)
    codes = [put(store, 9000 + n, shard=shard) for n in range(2) for shard in range(2)]
    assert codes == [PutCode.STORED] * 4
    assert len(present(store, range(count))) == count
    store.survey.check()
