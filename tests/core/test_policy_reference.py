"""Each policy against a plain model of it, on random traces without chains and leases: the same
hits, the same victims in the same order, the same memory of them."""

from __future__ import annotations

from functools import partial
from itertools import chain

import numpy as np
import pytest

from kvtier.config import HostPolicyName, PolicyName
from kvtier.core.policy import POLICIES
from kvtier.core.policy.arc import Arc
from kvtier.core.policy.lru import LruTailFirst
from kvtier.core.policy.s3fifo import S3Fifo
from tests.core.policy_models import Pages, PlainArc, PlainLru, PlainS3Fifo
from tests.seeds import seeds

PAIRS = {
    "lru": (LruTailFirst, PlainLru),
    # Every use counts, as in the papers.
    "arc": (partial(Arc, burst_share=0), PlainArc),
    "s3-fifo": (partial(S3Fifo, burst_share=0), PlainS3Fifo),
}


def trace(seed: int, capacity: int, length: int) -> list[int]:
    """Phases of popular pages, loops, scans and uniform noise, in the size of the cache."""
    rng = np.random.default_rng(seed)
    pages: list[int] = []
    fresh = 1_000_000
    while len(pages) < length:
        n = int(rng.integers(1, 6 * capacity + 20))
        kind = rng.integers(4)
        if kind == 0:
            pages += (rng.zipf(1.2, n) % (4 * capacity)).tolist()
        elif kind == 1:
            around = int(rng.integers(1, 2 * capacity + 2))
            pages += [10_000 + i % around for i in range(n)]
        elif kind == 2:
            pages += range(fresh, fresh + n)
            fresh += n
        else:
            pages += rng.integers(0, 3 * capacity, n).tolist()
    return pages[:length]


def test_every_policy_of_the_configuration_is_there() -> None:
    assert list(POLICIES) == [policy.value for policy in PolicyName]
    assert [*POLICIES, "gittins"] == [policy.value for policy in HostPolicyName]


@pytest.mark.parametrize("seed", seeds(1, of=2))
@pytest.mark.parametrize("capacity", [1, 2, 10, 19, 64, 200])
@pytest.mark.parametrize("name", PAIRS)
def test_a_policy_equals_its_model(name: str, capacity: int, seed: int) -> None:
    ours_make, model_make = PAIRS[name]
    ours, model = Pages(ours_make, capacity), model_make(capacity)
    for at, page in enumerate(trace(seed, capacity, length=1000 + 10 * capacity)):
        assert ours.get(page) == model.get(page), f"request {at}, seed {seed}"
        assert ours.evicted[-1:] == model.evicted[-1:], f"request {at}, seed {seed}"
        if at % 16 == 0:
            assert ours.ghosts() == model.ghosts(), f"request {at}, seed {seed}"
    assert ours.evicted == model.evicted
    assert len(model.evicted) > 100


@pytest.mark.parametrize("seed", seeds(1, of=3))
@pytest.mark.parametrize("capacity", [10, 64, 200])
def test_s3_fifo_equals_its_model_when_it_takes_many_steps_at_once(
    monkeypatch: pytest.MonkeyPatch, capacity: int, seed: int
) -> None:
    monkeypatch.setattr("kvtier.core.policy.s3fifo._STEPS_MIN", 1)
    ours, model = Pages(partial(S3Fifo, burst_share=0), capacity), PlainS3Fifo(capacity)
    rng = np.random.default_rng(seed)
    for _ in range(8):
        popular, scan = rng.permutation(10_000)[: 2 * capacity].reshape(2, -1).tolist()
        again = rng.permutation(popular).tolist()
        some = again[: capacity // 3]
        pages = [*popular * 5, scan[0], *again, *scan * 2, *some, *scan, *some * 3, *scan]
        for page in pages + trace(int(rng.integers(1 << 30)), capacity, length=capacity):
            assert ours.get(page) == model.get(page), f"seed {seed}"
        assert ours.evicted == model.evicted, f"seed {seed}"
        assert ours.ghosts() == model.ghosts(), f"seed {seed}"
    assert len(model.evicted) > 3 * capacity


@pytest.mark.parametrize("left", [31, 32, 33, 543, 544, 545, 1056, 1100])
def test_what_has_left_a_queue_is_passed_over(left: int) -> None:
    """However many pages at its front have been used again, the first that was not goes first."""
    pages = Pages(partial(Arc, burst_share=0), 1200)
    for n in range(1200):
        pages.get(n)
    pages.use(range(left))
    assert [pages.evict() for _ in range(3)] == [left, left + 1, left + 2]


@pytest.mark.parametrize("seed", seeds(1, of=4))
def test_arc_that_learns_after_the_eviction_hits_as_often_as_that_of_the_paper(seed: int) -> None:
    capacity = 100
    after, before = PlainArc(capacity), PlainArc(capacity, learns_first=True)
    pages = trace(seed, capacity, length=20_000)
    hits = sum(after.get(page) for page in pages), sum(before.get(page) for page in pages)
    assert min(hits) > 2000
    assert abs(hits[0] - hits[1]) < 0.02 * max(hits), f"seed {seed}"


@pytest.mark.parametrize("seed", seeds(1, of=3))
@pytest.mark.parametrize("name", POLICIES)
def test_pages_used_together_are_used_once_each_the_head_last(name: str, seed: int) -> None:
    """One call for a batch is the calls for each of its pages, from the tail to the head."""
    rng = np.random.default_rng(seed)
    together, apart = (Pages(POLICIES[name], 150) for _ in range(2))
    fresh = 0
    for _ in range(120):
        batch = rng.choice(list(together.rows), int(rng.integers(1, 100))) if fresh else []
        if len(batch):
            together.use(batch.tolist())
            for page in dict.fromkeys(batch.tolist()[::-1]):
                apart.use([page])
        for pages in (together, apart):
            for page in range(fresh, fresh + 10):
                pages.get(page)
        fresh += 10
        assert together.evicted == apart.evicted, f"seed {seed}"
        assert together.ghosts() == apart.ghosts(), f"seed {seed}"
    assert len(apart.evicted) == 1050


@pytest.mark.parametrize("name", POLICIES)
def test_pages_admitted_together_are_admitted_in_order(name: str) -> None:
    """The same pages go in the same order, also into a queue that was full once."""
    together, apart = Pages(POLICIES[name], 80), Pages(POLICIES[name], 80)
    for first in (0, 1000):
        for pages in (together, apart):
            for page in range(first, first + 80):
                pages.hold(page)
        together.policy.admit_many(np.array(list(together.rows.values())))
        for row in apart.rows.values():
            apart.policy.admit(row)
        for pages in (together, apart):
            pages.use(range(first + 10, first + 20))
            pages.use(range(first + 10, first + 20))
            for page in range(first + 500, first + 600):
                pages.get(page)
        assert together.evicted == apart.evicted
        assert together.ghosts() == apart.ghosts()
        for pages in (together, apart):
            for page in list(pages.rows):
                pages.delete(page)


def hits(name: str, pages: list[int]) -> int:
    cache = Pages(POLICIES[name], 100)
    return sum(cache.get(page) for page in pages)


def test_a_scan_does_not_empty_the_cache() -> None:
    """Sixty pages in use, and three new pages for each use of one of them."""
    fresh = iter(range(1000, 100_000))
    rounds = [[i % 60, next(fresh), next(fresh), next(fresh)] for i in range(3000)]
    # They are in use before the scan begins.
    pages = list(range(60)) * 4 + list(chain.from_iterable(rounds))
    found = {name: hits(name, pages) for name in POLICIES}
    assert found["lru"] < 200
    assert found["arc"] > 2900
    assert found["s3-fifo"] > 2900


def test_a_loop_that_does_not_fit_is_kept_in_part() -> None:
    """Of LRU every page is gone just before it comes again."""
    pages = [i % 120 for i in range(6000)]
    found = {name: hits(name, pages) for name in POLICIES}
    assert found["lru"] == 0
    assert found["s3-fifo"] > 3000


def test_arc_learns_that_new_pages_come_again() -> None:
    """A working set that moves on: what is used twice now was never used before."""
    pages = [page for base in range(0, 9000, 90) for page in [*range(base, base + 90)] * 2]
    assert hits("arc", list(range(100)) * 3 + pages) > 0.9 * hits("lru", pages)
