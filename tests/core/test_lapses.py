"""Pages that were put with a time to live: served as long as they are there, and first to go."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from kvtier.bench.cache import Cache
from kvtier.bench.trace import NO_BLOCK
from kvtier.core.handles import Filling, Reading
from kvtier.core.page import PutCode, Tier
from kvtier.core.policy import POLICIES
from kvtier.core.policy.lru import Clock
from kvtier.core.store import Store
from tests.core.support import NS, RECORD, begin_move, keys, make_store, meta, present


def put(store: Store, n: int, parent: int | None = None, *, ttl_s: float = 0.0) -> None:
    said = replace(meta(n, parent), ttl_ms=round(1000 * ttl_s))
    filling = store.reserve(NS, 0, said, RECORD)
    assert isinstance(filling, Filling)
    assert filling.seal() is PutCode.STORED


def use(store: Store, *numbers: int) -> None:
    for reading in store.acquire(NS, 0, keys(numbers)):
        assert isinstance(reading, Reading)
        reading.release()


def tell(store: Store, seconds: float) -> None:
    store.forecasts.tell_time(seconds)


def begun(slots: int) -> Store:
    store = make_store(slots=slots)
    tell(store, 100.0)
    return store


def test_a_page_past_its_time_is_a_hit_and_gives_way_before_older_ones() -> None:
    store = begun(4)
    put(store, 0)
    put(store, 1)
    put(store, 2, ttl_s=10)
    put(store, 3, ttl_s=1000)
    tell(store, 109.0)
    put(store, 4)
    assert present(store, range(5)) == [1, 2, 3, 4], "no time is over: the coldest went"
    tell(store, 112.0)
    assert present(store, [2]) == [2], "nothing happens by itself"
    put(store, 5)
    assert present(store, range(6)) == [1, 3, 4, 5]
    store.survey.check()


def test_it_goes_although_it_is_the_youngest_of_all() -> None:
    store = begun(3)
    put(store, 0)
    put(store, 1)
    put(store, 2, ttl_s=5)
    tell(store, 120.0)
    put(store, 3)
    assert present(store, range(4)) == [0, 1, 3]
    put(store, 4)
    assert present(store, range(5)) == [1, 3, 4]


def test_a_use_begins_its_time_anew() -> None:
    store = begun(2)
    put(store, 0, ttl_s=10)
    put(store, 1)
    for seconds in range(105, 160, 5):
        tell(store, float(seconds))
        use(store, 0)
    tell(store, 163.0)
    put(store, 2)
    assert present(store, range(3)) == [0, 2]
    tell(store, 167.0)
    put(store, 3)
    assert present(store, range(4)) == [2, 3]


def test_the_tail_goes_first_and_what_keeps_a_page_is_heeded() -> None:
    store = begun(6)
    for n in range(4):
        put(store, n, n - 1 if n else None, ttl_s=10)
    put(store, 4, 3)  # comes after them, and is worth keeping
    put(store, 5)
    tell(store, 200.0)
    put(store, 6)
    assert present(store, range(7)) == [0, 1, 2, 3, 5, 6], "nothing of the chain could go but 4"
    (lease,) = store.acquire(NS, 0, keys([3]), is_use=False)
    tell(store, 300.0)
    put(store, 7)
    assert present(store, range(8)) == [0, 1, 2, 3, 6, 7]
    assert isinstance(lease, Reading)
    lease.release()
    tell(store, 400.0)
    use(store, 6, 7)
    for n in (8, 9, 10):
        put(store, n)
    assert present(store, range(11)) == [0, 6, 7, 8, 9, 10]
    store.survey.check()


def test_a_row_that_another_page_has_now_is_not_meant() -> None:
    store = begun(2)
    put(store, 0, ttl_s=10)
    put(store, 1)
    store.delete(NS, 0, keys([0]))
    put(store, 2)
    tell(store, 200.0)
    put(store, 3)
    assert present(store, range(4)) == [2, 3]


def test_a_copy_on_nvme_has_no_time() -> None:
    store = make_store(slots=4, nvme_slots=2)
    tell(store, 100.0)
    put(store, 0, ttl_s=10)
    put(store, 1, ttl_s=10)
    for n in (1, 0):
        source, target = begin_move(store, n)
        target.meta = replace(target.meta, ttl_ms=10_000)
        with source:
            assert target.seal() is PutCode.STORED
    tell(store, 300.0)
    put(store, 2)
    use(store, 1)
    source, target = begin_move(store, 2)
    with source:
        target.seal()
    assert store.survey.in_tier(NS, 0, keys([0, 1, 2]), Tier.NVME).tolist() == [False, True, True]


def test_a_clock_knows_when_a_stamp_was_given_out() -> None:
    clock, rng = Clock(), random.Random(1)
    assert clock.seconds_of(1) == 0.0
    given: list[tuple[int, float]] = []
    now = 50.0
    for _ in range(30_000):
        now += rng.choice([0.1, 0.9, 3.0])
        clock.tell(now)
        clock.tell(now - 1.0)
        if rng.random() < 0.7:
            given.append((clock.ticks(rng.randrange(1, 4)), now))
    for stamp, seconds in given:
        least = seconds - 4.1 - (now - seconds) / 32
        assert least <= clock.seconds_of(stamp) <= seconds
    assert clock.seconds_of(clock.now) > now - 4.0
    assert len(clock._times) <= 4096


def replayed(
    policy: str, ttl_s: float, pages: list[int], seed: int
) -> tuple[list[bool], list[bool]]:
    """(what store and simulator find of requests for one page), with the same puts and times."""
    slots, parent = 40, np.full(200, NO_BLOCK, np.int32)
    cache = Cache(parent, slots, policy, ttl_s=ttl_s)
    store = make_store(slots=slots)
    rng, now = random.Random(seed), 100.0
    stored, simulated = [], []
    for page in pages:
        now += rng.choice([0.3, 1.0, 2.5])
        cache.tell(now)
        tell(store, now)
        stored.append(present(store, [page]) == [page])
        simulated.append(cache.serve(np.array([page], np.int32)) == 1)
        if stored[-1]:
            use(store, page)
        else:
            put(store, page, ttl_s=ttl_s)
    store.survey.check()
    return stored, simulated


@pytest.mark.parametrize("policy", POLICIES)
def test_the_simulator_finds_what_the_store_finds(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.core.support.Store", partial(Store, make_policy=POLICIES[policy]))
    seed = 3
    rng = random.Random(seed)
    pages = [min(int(rng.expovariate(0.02)), 199) for _ in range(700)]
    kinds = set()
    for ttl_s in (0.0, 15.0, 60.0):
        stored, simulated = replayed(policy, ttl_s, pages, seed)
        assert stored == simulated, f"ttl {ttl_s}, seed {seed}"
        kinds.add(sum(stored))
    # To LRU it is nothing new that what was not used for a time is to go.
    assert len(kinds) > 1 or policy == "lru"
