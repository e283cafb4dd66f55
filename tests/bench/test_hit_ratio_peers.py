"""The same figures from other simulators: PyPI's libcachesim and kvcache-simulator.

Development only: libcachesim is GPLv3. Nothing of the two is needed by kvtier, and these tests are
skipped where they, or the traces, are absent.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from kvtier.bench.bounds import Optimum
from kvtier.bench.figures import ratios
from kvtier.bench.formats import read_trace
from kvtier.bench.replay import ReplayPlan, SimTier, replay
from kvtier.bench.textbook import textbook_replay
from kvtier.bench.trace import Paths

TRACES = os.environ.get("KVTIER_TRACES")
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not TRACES, reason="KVTIER_TRACES names no folder of traces"),
]

SLOTS = 3_000_000 // 512


@cache
def conversation():
    return read_trace(Path(TRACES) / "mooncake_conversation.jsonl.gz")


def ours(name, slots):
    trace = conversation()
    if name == "lru":
        return replay(trace, ReplayPlan(slots={SimTier.HOST: slots})).prefix
    return textbook_replay(trace, ReplayPlan(slots={SimTier.HOST: slots}, policy=name)).prefix


@pytest.mark.parametrize(
    ("name", "kind", "within"),
    [("lru", "LRU", 0.00005), ("fifo", "FIFO", 0.00005), ("arc-textbook", "ARC", 0.00005)],
)
def test_libcachesim(name, kind, within):
    peer = pytest.importorskip("libcachesim", reason="development only, GPLv3: pip install it")
    trace = conversation()
    cache = getattr(peer, kind)(cache_size=SLOTS)
    request = peer.Request()
    request.obj_size = 1
    found = np.empty(trace.requests, np.int32)
    for number, path in enumerate(Paths(trace)):
        found[number] = len(path)
        for at, block in enumerate(path.tolist()):
            request.obj_id = block
            if cache.find(request, False) is None:
                found[number] = at
                break
        for block in path[::-1].tolist():
            request.obj_id = block
            cache.get(request)
    theirs, own = ratios(trace, found).cold, ratios(trace, ours(name, SLOTS)).cold
    assert own == pytest.approx(theirs, abs=within)


@pytest.mark.parametrize("slots", [477, 1909, 7639, 30558])
def test_kvcache_simulator(slots):
    plans = pytest.importorskip("kvcache_sim.plan", reason="pip install kvcache-simulator")
    policies = pytest.importorskip("kvcache_sim.policies", reason="pip install kvcache-simulator")
    traces = pytest.importorskip("kvcache_sim.trace", reason="pip install kvcache-simulator")
    data = traces.parse_trace_file(Path(TRACES) / "mooncake_conversation.jsonl.gz", block_size=512)
    plan = plans.build_execution_plan(data)
    trace = conversation()
    best = ratios(trace, Optimum(trace).hits(slots)).second_half
    for name, own in (("lru", ratios(trace, ours("lru", slots)).second_half), ("optimal", best)):
        theirs = policies.simulate_policy(plan, name, slots).hitRate
        assert round(own, 4) == round(theirs, 4)
