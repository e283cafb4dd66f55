"""The cheapest tiers: against all sizes tried one by one."""

from __future__ import annotations

import math
from bisect import bisect_left
from functools import partial

import numpy as np
import pytest

from kvtier.bench.advise import Wish, advise
from kvtier.bench.bounds import ceiling
from kvtier.bench.figures import ratios
from kvtier.bench.lru_curve import smallest_lru
from kvtier.bench.replay import ReplayPlan, SimTier, WritePolicy, replay
from tests.bench.traces import build, conversations, plain_lru

GPU, HOST, NVME = SimTier
GIB = 1 << 30


def measured(trace, write=WritePolicy.THROUGH):
    def measure(slots):
        done = replay(trace, ReplayPlan(slots=slots, write=write))
        end = 0 * done.prefix
        ends = [ratios(trace, end := end + hits).cold for hits in done.hits.values()]
        return dict(zip(slots, np.diff([0, *ends]).tolist(), strict=True))

    return measure


def wish(trace, **changed):
    """A slot is a GiB."""
    fields = {
        "targets": {NVME: 0.6},
        "prices": {HOST: 3.0, NVME: 0.5},
        "have": {},
        "least": dict.fromkeys(SimTier, 1) | {HOST: int(trace.blocks.max())},
        "most": dict.fromkeys(SimTier, trace.blocks_seen),
        "slot_bytes": GIB,
    }
    return Wish(**fields | changed)


def smallest(trace, target):
    """The smallest LRU that reaches it, one size after the other, by a plain model."""
    total = trace.input_tokens.sum()
    for slots in range(1, trace.blocks_seen + 1):
        if trace.tokens(trace.blocks * 0 + plain_lru(trace, slots)).sum() / total >= target:
            return slots
    raise AssertionError("not reached")


@pytest.mark.parametrize("seed", [1, 2])
def test_host_memory_alone_is_as_small_as_it_can_be(seed):
    trace = build(conversations(seed, requests=80))
    found = advise(wish(trace, prices={HOST: 3.0}), measured(trace))
    (choice,) = found.choices
    best = smallest(trace, 0.6)
    assert best <= choice.slots[HOST] <= math.ceil(1.03 * best)
    assert choice.cost == 3.0 * choice.slots[HOST]
    assert choice.hit_ratio >= 0.6


@pytest.mark.parametrize("seed", [1, 2])
def test_cheap_nvme_takes_all_but_what_host_memory_must_have(seed):
    trace = build(conversations(seed, requests=80))
    found = advise(wish(trace), measured(trace))
    both, alone = found.choices
    assert list(both.slots) == [HOST, NVME]
    assert list(alone.slots) == [HOST]
    assert both.slots[HOST] == trace.blocks.max()
    # Written through, NVMe holds what an LRU of its size would.
    best = smallest(trace, 0.6)
    assert best <= both.slots[NVME] <= math.ceil(1.03 * best)
    assert both.cost < alone.cost


def test_what_must_come_from_memory_costs_memory():
    trace = build(conversations(1, requests=80))
    targets = {NVME: 0.6, HOST: 0.45, GPU: 0.2}
    prices = {GPU: 20.0, HOST: 3.0, NVME: 0.5}
    found = advise(wish(trace, targets=targets, prices=prices), measured(trace))
    for choice in found.choices:
        hits = choice.hits
        assert hits[GPU] >= 0.2
        assert hits[GPU] + hits.get(HOST, 0) >= 0.45
        assert choice.hit_ratio >= 0.6
    cheapest = found.choices[0]
    assert set(cheapest.slots) == {GPU, HOST, NVME}
    assert abs(cheapest.slots[GPU] - smallest(trace, 0.2)) <= 1
    assert cheapest.slots[HOST] <= math.ceil(1.03 * smallest(trace, 0.45))


def test_dear_nvme_is_not_bought_and_what_is_there_costs_nothing():
    trace = build(conversations(1, requests=80))
    dear = advise(wish(trace, prices={HOST: 3.0, NVME: 5.0}), measured(trace))
    assert [list(choice.slots) for choice in dear.choices] == [[HOST], [HOST, NVME]]
    there = advise(wish(trace, prices={HOST: 3.0}, have={GPU: 30}), measured(trace))
    (choice,) = there.choices
    assert choice.slots[GPU] == 30
    assert choice.cost == 3.0 * choice.slots[HOST]
    enough = advise(wish(trace, prices={HOST: 3.0}, have={GPU: 10_000}), measured(trace))
    assert (enough.choices[0].slots, enough.choices[0].cost) == ({GPU: 10_000}, 0.0)


def test_what_cannot_be_reached_has_no_choice_and_names_the_best():
    trace = build(conversations(1, requests=80))
    most = dict.fromkeys(SimTier, 50)
    found = advise(wish(trace, targets={NVME: 0.99}, most=most), measured(trace))
    assert found.choices == []
    assert found.best is not None
    assert sum(found.best.slots.values()) <= 100
    assert 0 < found.best.hit_ratio < 0.99


@pytest.mark.parametrize(
    "near", [1, 10_000, *(pytest.param(n, marks=pytest.mark.soak) for n in (20, 60))]
)
def test_a_guess_changes_how_many_replays_not_the_answer(near):
    trace = build(conversations(1, requests=80))
    plain = advise(wish(trace), measured(trace))
    guessed = advise(wish(trace, guess=lambda target: near), measured(trace))
    for one, two in zip(plain.choices, guessed.choices, strict=True):
        assert two.cost == pytest.approx(one.cost, rel=0.03)
        assert two.hit_ratio >= 0.6


@pytest.mark.parametrize(
    ("seed", "target"),
    [
        *((1, 0.3), (2, 0.6), (1, 0.9)),
        *(pytest.param(*more, marks=pytest.mark.soak) for more in ((2, 0.3), (1, 0.6), (2, 0.9))),
    ],
)
def test_the_smallest_lru_of_one_pass(seed, target):
    pytest.importorskip("numba", reason="numba is in the extra [fast]")
    trace = build(conversations(seed, requests=80))
    reached = ratios(trace, ceiling(trace)).cold >= target
    best = smallest(trace, target) if reached else trace.blocks_seen
    assert best <= smallest_lru(trace, target) <= math.ceil(1.03 * best) + 1
    exact = advise(wish(trace, guess=lambda target: smallest_lru(trace, target)), measured(trace))
    rough = advise(wish(trace), measured(trace))
    assert exact.replays <= rough.replays


def cheapest_by_trying(measure, asked):
    """The least cost of host memory alone or with nvme, of all sizes in steps of two blocks of
    host; for each the smallest nvme, by halving."""
    target, price = asked.targets[NVME], asked.prices
    best = math.inf
    for host in range(asked.least[HOST], asked.most[HOST], 2):
        left = best - price[HOST] * host
        if left <= 0:
            break
        low, high = 0, math.ceil(min(asked.most[NVME], left / price[NVME]))

        def reaches(nvme, host=host):
            slots = {HOST: host, NVME: nvme} if nvme else {HOST: host}
            return math.fsum(measure(slots).values()) >= target

        if reaches(0):
            best = min(best, price[HOST] * host)
        elif reaches(high):
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if reaches(middle) else (middle, high)
            best = min(best, price[HOST] * host + price[NVME] * high)
    return best


def test_two_tiers_of_close_prices_are_as_cheap_as_any():
    trace = build(conversations(1, requests=80))
    known = {}
    replays = measured(trace, WritePolicy.BACK)

    def measure(slots):
        key = tuple(slots.items())
        if key not in known:
            known[key] = replays(slots)
        return known[key]

    for nvme in (2.0, 2.5):
        asked = wish(trace, prices={HOST: 3.0, NVME: nvme})
        found = advise(asked, measure)
        assert found.choices[0].cost <= 1.01 * cheapest_by_trying(measure, asked)
        # What is dearer is named too, in whatever order the choices are tried.
        assert {tuple(choice.slots) for choice in found.choices} == {(HOST,), (HOST, NVME)}
        assert found.choices == sorted(found.choices, key=lambda choice: choice.cost)


def stepped(seed, host_max, nvme_max):
    """A hit ratio that rises in steps, and where more host memory spares some NVMe."""
    rng = np.random.default_rng(seed)
    near, far = rng.integers(1, host_max, 6), rng.integers(1, nvme_max, 10)
    distance = np.sort(np.concatenate([near, far]))
    weight = rng.dirichlet(np.ones(len(distance)))

    def measure(slots):
        host, nvme = slots[HOST], slots.get(NVME, 0)
        upper = float(weight[distance <= host].sum())
        both = float(weight[distance <= max(host, nvme + host // 3 if nvme else 0)].sum())
        return {HOST: upper, NVME: both - upper} if nvme else {HOST: upper}

    return measure


def cheapest_pair(wished, measure, host_max, nvme_max):
    """Every size of host memory, each with the smallest NVMe that is enough."""

    def reaches(host, nvme):
        hits = measure({HOST: host, NVME: nvme})
        upper, both = hits[HOST], hits[HOST] + hits[NVME]
        return upper >= wished.targets[HOST] and both >= wished.targets[NVME]

    best = math.inf
    for host in range(1, host_max + 1):
        if reaches(host, nvme_max):
            enough = bisect_left(range(1, nvme_max), True, key=partial(reaches, host))
            best = min(best, wished.cost({HOST: host, NVME: 1 + enough}))
    return best


@pytest.mark.parametrize("seed", [1, 2, 10])
def test_no_other_pair_of_sizes_is_cheaper_by_more_than_three_per_cent(seed):
    host_max, nvme_max = 400, 800
    measure, rng = stepped(seed, host_max, nvme_max), np.random.default_rng(1000 + seed)
    wished = Wish(
        targets={NVME: float(rng.uniform(0.4, 0.9)), HOST: float(rng.uniform(0, 0.3))},
        prices={HOST: 3.0, NVME: float(rng.uniform(0.3, 2.5))},
        have={},
        least={HOST: 1, NVME: 1},
        most={HOST: host_max, NVME: nvme_max},
        slot_bytes=GIB,
    )
    found = advise(wished, measure)
    (pair,) = (choice for choice in found.choices if NVME in choice.slots)
    best = cheapest_pair(wished, measure, host_max, nvme_max)
    assert best <= pair.cost <= 1.03 * best
    assert found.replays < 200
