"""Replays: equal to plain models of caches, and to themselves through other tiers."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.bench.bounds import Optimum, ceiling, ceiling_with_ttl, own_prefix
from kvtier.bench.cache import Cache
from kvtier.bench.errors import BenchInput
from kvtier.bench.lru_curve import lru_curve
from kvtier.bench.replay import ReplayPlan, SimTier, WritePolicy, replay
from kvtier.bench.textbook import textbook_replay
from kvtier.bench.trace import Paths
from kvtier.core.policy import POLICIES
from tests.bench.traces import build, conversations, plain_lru, plain_min, upwards

SEEDS = (1, 2)
SLOTS = (40, 90, 200, 10_000)


def prefix(trace, **plan):
    return replay(trace, ReplayPlan(**plan)).prefix.tolist()


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_lru_finds_what_a_plain_lru_used_tail_first_finds(seed, slots):
    trace = build(conversations(seed))
    assert prefix(trace, slots={SimTier.HOST: slots}) == plain_lru(trace, slots)


@pytest.mark.parametrize("slots", [0, 1, 7, *SLOTS])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_optimum_is_min_block_by_block(seed, slots):
    trace = build(conversations(seed))
    assert Optimum(trace).hits(slots).tolist() == plain_min(trace, slots)


@pytest.mark.parametrize("seed", SEEDS)
def test_bounds(seed):
    trace = build(conversations(seed))
    seen: set[int] = set()
    own: dict[int, set[int]] = {}
    best, same = [], []
    for request in range(trace.requests):
        path, session = upwards(trace, request), int(trace.session[request])
        best.append(sum(block in seen for block in path))
        same.append(sum(block in own.setdefault(session, set()) for block in path))
        seen.update(path)
        own[session].update(path)
    assert ceiling(trace).tolist() == best
    assert own_prefix(trace).tolist() == same
    assert Optimum(trace).hits(trace.blocks_seen).tolist() == best


@pytest.mark.parametrize("ttl_s", [0.5, 3.0, 20.0, 1e9])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_time_to_live_counts_from_the_last_use(seed, ttl_s):
    trace = build(conversations(seed))  # a request a second
    used: dict[int, float] = {}
    best = []
    for request in range(trace.requests):
        path = upwards(trace, request)
        fresh = [request - used.get(block, -1e12) <= ttl_s for block in path]
        best.append(fresh.index(False) if False in fresh else len(fresh))
        used.update(dict.fromkeys(path, float(request)))
    assert ceiling_with_ttl(trace, ttl_s).tolist() == best
    if ttl_s == 1e9:
        assert best == ceiling(trace).tolist()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", SEEDS)
def test_no_policy_beats_the_optimum_and_room_for_all_is_the_ceiling(seed, policy):
    trace = build(conversations(seed))
    optimum = Optimum(trace)
    for slots in SLOTS:
        done = replay(trace, ReplayPlan(slots={SimTier.HOST: slots}, policy=policy))
        assert done.prefix.sum() <= optimum.hits(slots).sum()
    assert done.prefix.tolist() == ceiling(trace).tolist()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_cache_keeps_its_capacity_and_the_head_of_every_chain(seed, policy):
    trace = build(conversations(seed))
    cache = Cache(trace.parent, 60, policy)
    for path in Paths(trace):
        found = cache.prefix(path)
        if found:
            cache.touch(path[:found])
        stored, gone = cache.store(path[found:])
        assert stored.tolist() == path[found:].tolist()
        assert not cache.has(gone).any()
        here = np.flatnonzero(cache.has(np.arange(trace.blocks_seen)))
        assert len(here) == len(cache) <= 60
        before = trace.parent[here]
        assert cache.has(before[before >= 0]).all()


def test_a_request_larger_than_the_cache_keeps_its_head():
    trace = build([(0, list(range(10))), (0, list(range(10)))])
    assert prefix(trace, slots={SimTier.HOST: 4}) == [0, 4]


def test_no_slots_no_hits():
    trace = build([(0, [1, 2]), (0, [1, 2])])
    assert prefix(trace, slots={SimTier.GPU: 0, SimTier.HOST: 0}) == [0, 0]


# -- tiers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_inclusive_tiers_find_what_their_lowest_one_alone_finds(seed):
    trace = build(conversations(seed))
    slots = {SimTier.GPU: 40, SimTier.HOST: 90, SimTier.NVME: 200}
    done = replay(trace, ReplayPlan(slots=slots, write=WritePolicy.THROUGH))
    assert done.prefix.tolist() == plain_lru(trace, 200)
    upper = done.hits[SimTier.GPU]
    assert upper.tolist() == plain_lru(trace, 40)
    assert (upper + done.hits[SimTier.HOST]).tolist() == plain_lru(trace, 90)


@pytest.mark.parametrize("seed", SEEDS)
def test_nvme_alone_is_a_tier_as_any_other(seed):
    trace = build(conversations(seed))
    done = replay(trace, ReplayPlan(slots={SimTier.GPU: 40, SimTier.NVME: 90}))
    assert done.prefix.tolist() == plain_lru(trace, 90)


@pytest.mark.parametrize("write", WritePolicy)
@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_written_to_nvme(seed, write):
    trace = build(conversations(seed))
    slots = {SimTier.HOST: 90, SimTier.NVME: trace.blocks_seen}
    done = replay(trace, ReplayPlan(slots=slots, write=write))
    host, nvme = done.traffic[SimTier.HOST], done.traffic[SimTier.NVME]
    best = ceiling(trace).tolist()
    if write is WritePolicy.THROUGH:
        assert nvme.written == trace.blocks_seen
        assert done.prefix.tolist() == best
    elif write is WritePolicy.BACK:
        # Each block gives way at least once but those that host memory still has.
        assert nvme.written >= trace.blocks_seen - 90
        assert done.prefix.tolist() == best
    else:
        assert 0 < nvme.written < trace.blocks_seen
    # A block is stored in host memory when it is new, or read from nvme.
    misses = int((trace.blocks - done.prefix).sum())
    assert host.written == misses + nvme.read
    assert nvme.evicted == 0


def test_selective_writes_what_was_used_since_it_was_stored():
    # 1 is used again before it gives way, 2 is not.
    requests = [(0, [1]), (1, [2]), (0, [1]), (2, [3, 4]), (0, [1]), (1, [2])]
    slots = {SimTier.HOST: 2, SimTier.NVME: 9}
    done = replay(build(requests), ReplayPlan(slots=slots, write=WritePolicy.SELECTIVE))
    assert done.hits[SimTier.HOST].tolist() == [0, 0, 1, 0, 0, 0]
    assert done.hits[SimTier.NVME].tolist() == [0, 0, 0, 0, 1, 0]
    assert done.traffic[SimTier.NVME].written == 1


def test_what_the_daemon_does_not_hear_of_grows_old():
    # The engine finds 1 in its own cache; host memory has room for five.
    requests = [(0, [1]), (1, [2]), (0, [1]), (2, [3]), (3, [4, 5, 6]), (0, [1])]
    slots = {SimTier.GPU: 3, SimTier.HOST: 5}
    told = replay(build(requests), ReplayPlan(slots=slots, told=True))
    untold = replay(build(requests), ReplayPlan(slots=slots, told=False))
    assert told.hits[SimTier.HOST].tolist() == [0, 0, 0, 0, 0, 1]
    assert untold.hits[SimTier.HOST].tolist() == [0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_replay_is_the_same_every_time(policy):
    trace = build(conversations(9))
    plan = ReplayPlan(slots={SimTier.HOST: 50, SimTier.NVME: 100}, policy=policy)
    one, two = replay(trace, plan), replay(trace, plan)
    assert one.prefix.tolist() == two.prefix.tolist()
    assert one.traffic == two.traffic


# -- one pass ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_one_pass_finds_what_the_daemons_policy_finds_at_every_size(seed):
    pytest.importorskip("numba", reason="numba is in the extra [fast]")
    # Every block many times over, so that times are renumbered.
    trace = build(conversations(seed, requests=80) * 4)
    slots = [200, 0, 1, 7, 40, 90, 10_000]
    for size, found in zip(slots, lru_curve(trace, slots), strict=True):
        assert found.tolist() == prefix(trace, slots={SimTier.HOST: size}), size


# -- textbook policies ----------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [0, *SLOTS])
@pytest.mark.parametrize("seed", SEEDS)
def test_fifo(seed, slots):
    trace = build(conversations(seed))
    queue: list[int] = []
    expected = []
    for request in range(trace.requests):
        path = upwards(trace, request)
        hits = [block in queue for block in path]
        expected.append(hits.index(False) if False in hits else len(hits))
        for block in reversed(path):
            if block not in queue and slots:
                queue = [*queue, block][-slots:]
    plan = ReplayPlan(slots={SimTier.HOST: slots}, policy="fifo")
    assert textbook_replay(trace, plan).prefix.tolist() == expected


def test_textbook_arc_keeps_what_is_used_twice_through_a_scan():
    often = [(0, [1]), (0, [1]), (0, [2]), (0, [2])]
    scan = [(1, [100 + n]) for n in range(50)]
    trace = build([*often, *scan, (0, [1]), (0, [2])])
    plan = {"slots": {SimTier.HOST: 4}}
    arc = textbook_replay(trace, ReplayPlan(policy="arc-textbook", **plan))
    fifo = textbook_replay(trace, ReplayPlan(policy="fifo", **plan))
    assert arc.prefix.tolist()[-2:] == [1, 1]
    assert fifo.prefix.tolist()[-2:] == [0, 0]


def test_a_textbook_policy_has_one_tier():
    trace = build(conversations(1))
    with pytest.raises(BenchInput, match="policy fifo is a textbook's, for one tier alone"):
        textbook_replay(trace, ReplayPlan(slots={SimTier.GPU: 3, SimTier.HOST: 4}, policy="fifo"))
