"""Compiled loops: after every call the same outcome, and the same state, as the plain ones."""

from __future__ import annotations

import random
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import kvtier.bench
from kvtier.bench.cache import Cache
from kvtier.bench.caches import make_cache
from kvtier.bench.replay import ReplayPlan, SimTier, WritePolicy, replay
from kvtier.bench.routing import Fleet, Router, route
from kvtier.bench.trace import Paths
from tests.bench.traces import build, conversations

fast_cache = pytest.importorskip("kvtier.bench.fast_cache", reason="numba is in the extra [fast]")

COLUMNS = ("stamp", "children", "queued", "leases", "uses")


def same_state(plain, fast):
    for name in COLUMNS:
        assert np.array_equal(plain._table.column(name), fast._table.column(name)), name
    assert np.array_equal(plain._after_np, fast._after_np)
    assert np.array_equal(plain._row_np, fast._row_np)
    one, two = plain._policy._order, fast._policy._order
    assert np.array_equal(one._place_np, two._place_np)
    assert one.members == two.members
    assert plain._policy.coldest() == fast._policy.coldest()


@pytest.mark.parametrize("slots", [0, 1, 7, 40, 90, 10_000])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_cache_with_compiled_loops_is_the_plain_one(seed, slots):
    trace = build(conversations(seed, requests=250, sessions=15))
    plain = Cache(trace.parent, slots, "lru")
    fast = fast_cache.FastCache(trace.parent, slots)
    rng = random.Random(seed)
    for path in Paths(trace):
        # Now and then without its head: blocks come whose parents are not here, or come later.
        part = path[rng.randrange(len(path)) if rng.random() < 0.3 else 0 :]
        is_here = plain.has(part)
        assert is_here.tolist() == fast.has(part).tolist()
        if is_here.any():
            plain.touch(part[is_here])
            fast.touch(part[is_here])
        one, two = plain.store(part[~is_here]), fast.store(part[~is_here])
        assert [blocks.tolist() for blocks in one] == [blocks.tolist() for blocks in two]
        assert plain.gone_used.tolist() == fast.gone_used.tolist()
        same_state(plain, fast)
    assert (plain.stored, plain.evicted) == (fast.stored, fast.evicted)


PLANS = [
    ReplayPlan(slots={SimTier.HOST: 60}),
    ReplayPlan(slots={SimTier.GPU: 30, SimTier.HOST: 60}, told=False),
    *(
        ReplayPlan(slots={SimTier.GPU: 30, SimTier.HOST: 60, SimTier.NVME: 90}, write=write)
        for write in WritePolicy
    ),
]


@pytest.mark.parametrize("plan", range(len(PLANS)))
@pytest.mark.parametrize("seed", [1, 2])
def test_replays_are_the_same_with_and_without(seed, plan, monkeypatch):
    trace = build(conversations(seed))
    fast = replay(trace, PLANS[plan])
    monkeypatch.setattr("kvtier.bench.replay.make_cache", Cache)
    plain = replay(trace, PLANS[plan])
    for tier, hits in plain.hits.items():
        assert fast.hits[tier].tolist() == hits.tolist()
    assert fast.traffic == plain.traffic


def test_routing_is_the_same_with_and_without(monkeypatch):
    trace = build(conversations(3))
    fleet = Fleet(router=Router.KV, replicas=3, local=40, shared=90)
    fast = route(trace, fleet)
    monkeypatch.setattr("kvtier.bench.routing.make_cache", Cache)
    plain = route(trace, fleet)
    assert fast.local.tolist() == plain.local.tolist()
    assert fast.shared.tolist() == plain.shared.tolist()


def test_without_numba_the_plain_one_is_used(monkeypatch):
    def absent(name):
        raise ImportError(name)

    trace = build(conversations(1))
    assert isinstance(make_cache(trace.parent, 9, "lru"), fast_cache.FastCache)
    monkeypatch.setattr("kvtier.bench.caches.load_optional", absent)
    assert type(make_cache(trace.parent, 9, "lru")) is Cache
    assert type(make_cache(trace.parent, 9, "arc")) is Cache


def test_all_that_the_bench_compiles_is_compiled_when_it_is_loaded():
    """By packing's jit_numba alone, whose users do without it whatever goes wrong."""
    folder = Path(kvtier.bench.__file__).parent
    found = [path for path in folder.glob("*.py") if "njit" in path.read_text(encoding="utf-8")]
    assert found == []
    for kernels in ("cache_kernels", "lru_kernels", "use_kernels"):
        module = import_module(f"kvtier.bench.{kernels}")
        for name in set(module.__all__) - {"BITS", "MARKS"}:
            assert len(getattr(module, name).signatures) == 1, name
