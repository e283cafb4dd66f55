"""Figures of public traces, found by other simulators, where KVTIER_TRACES names their folder.

The conversation trace by default; the agent trace, with its ten million block references, as soak.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from kvtier.bench.bounds import Optimum, ceiling, ceiling_with_ttl, last_used_by_own
from kvtier.bench.figures import ratios
from kvtier.bench.formats import read_trace
from kvtier.bench.lru_curve import lru_curve
from kvtier.bench.replay import ReplayPlan, SimTier, WritePolicy, replay
from kvtier.bench.routing import Fleet, Router, route
from kvtier.bench.spread import most_at_once

TRACES = os.environ.get("KVTIER_TRACES")
pytestmark = pytest.mark.skipif(not TRACES, reason="KVTIER_TRACES names no folder of traces")


@cache
def trace(name):
    return read_trace(Path(TRACES) / name)


def conversation():
    return trace("mooncake_conversation.jsonl.gz")


def rounded(found):
    return tuple(
        round(x, 4)
        for x in (found.cold, found.second_half, found.request_mean, found.block_weighted)
    )


def test_conversation_without_eviction():
    found = conversation()
    assert (found.requests, found.sessions, found.blocks_seen) == (12_031, 7_373, 182_790)
    assert rounded(ratios(found, ceiling(found))) == (0.3736, 0.3981, 0.4094, 0.3664)
    own = last_used_by_own(found).sum() / found.input_tokens.sum()
    assert (round(100 * own, 1), round(37.36 - 100 * own, 1)) == (33.1, 4.3)


def test_conversation_at_7639_blocks():
    found = conversation()
    done = replay(found, ReplayPlan(slots={SimTier.HOST: 7_639}))
    assert round(ratios(found, done.prefix).second_half, 4) == 0.1762
    assert round(ratios(found, Optimum(found).hits(7_639)).second_half, 4) == 0.3944


@pytest.mark.parametrize(
    ("tokens_m", "percent"), [(0.3, 15.1), (1, 25.8), (3, 36.0), (5, 37.4), (50, 37.4)]
)
def test_optimum_of_the_conversation(tokens_m, percent):
    found = conversation()
    hits = Optimum(found).hits(int(tokens_m * 1e6) // 512)
    assert round(100 * ratios(found, hits).cold, 1) == percent


def test_the_table_of_lru_over_the_conversation():
    pytest.importorskip("numba", reason="numba is in the extra [fast]")
    found = conversation()
    table = {0.3: 4.3, 1: 5.4, 3: 13.9, 5: 21.1, 10: 29.1, 20: 35.8, 30: 36.6, 50: 37.1}
    curve = lru_curve(found, [int(tokens_m * 1e6) // 512 for tokens_m in table])
    percents = [round(100 * ratios(found, hits).cold, 1) for hits in curve]
    assert percents == list(table.values())


def test_synthetic_without_eviction():
    found = trace("mooncake_synthetic.jsonl.gz")
    assert found.sessions == 2_245
    assert round(ratios(found, ceiling(found)).cold, 4) == 0.6512


@pytest.mark.parametrize(
    ("name", "percents"),
    [
        ("mooncake_conversation.jsonl.gz", (10.5, 29.3, 35.0, 37.1, 37.4)),
        ("mooncake_synthetic.jsonl.gz", (32.8, 59.5, 64.6, 65.1, 65.1)),
    ],
)
def test_times_to_live_of_1_5_10_30_and_60_minutes(name, percents):
    found = trace(name)
    cold = [ratios(found, ceiling_with_ttl(found, 60 * m)).cold for m in (1, 5, 10, 30, 60)]
    assert tuple(round(100 * ratio, 1) for ratio in cold) == percents


@pytest.mark.parametrize(
    ("router", "tokens_m", "percent", "busy"),
    [
        ("prefix", 1, 49.2, 2.00),
        ("prefix", 3, 62.6, 2.34),
        ("kv", 3, 61.6, 1.08),
        ("rr", 3, 19.8, 1.04),
    ],
)
def test_routing_the_synthetic_trace_to_eight_replicas(router, tokens_m, percent, busy):
    found = trace("mooncake_synthetic.jsonl.gz")
    local = tokens_m * 1_000_000 // 512
    done = route(found, Fleet(router=Router(router), replicas=8, local=local, rate=11000.0))
    assert 100 * ratios(found, done.local).cold == pytest.approx(percent, abs=0.5)
    assert done.imbalance() == pytest.approx(busy, abs=0.1)


@pytest.mark.soak
@pytest.mark.parametrize(("tokens_m", "percent"), [(0.3, 4.3), (1, 5.4), (10, 29.1), (50, 37.1)])
def test_conversation_under_lru(tokens_m, percent):
    found = conversation()
    slots = int(tokens_m * 1e6) // 512
    done = replay(found, ReplayPlan(slots={SimTier.HOST: slots}))
    assert round(100 * ratios(found, done.prefix).cold, 1) == percent


@pytest.mark.soak
@pytest.mark.parametrize(
    ("write", "percent", "written_m"),
    [
        (WritePolicy.THROUGH, 36.6, 94.7),
        (WritePolicy.BACK, 36.6, 92.5),
        (WritePolicy.SELECTIVE, 19.6, 8.3),
    ],
)
def test_conversation_with_nvme_behind_host_memory(write, percent, written_m):
    found = conversation()
    slots = {SimTier.HOST: 3_000_000 // 512, SimTier.NVME: 30_000_000 // 512}
    done = replay(found, ReplayPlan(slots=slots, write=write))
    assert round(100 * ratios(found, done.prefix).cold, 1) == percent
    assert round(done.traffic[SimTier.NVME].written * 512 / 1e6, 1) == written_m


@pytest.mark.soak
def test_tiers_of_one_node_on_the_conversation():
    found = conversation()
    slots = {SimTier.GPU: 458_000 // 512, SimTier.HOST: 21_300_000 // 512}
    slots[SimTier.NVME] = 213_000_000 // 512
    done = replay(found, ReplayPlan(slots=slots, write=WritePolicy.THROUGH))
    ends = np.cumsum(list(done.hits.values()), axis=0)
    cold = [ratios(found, end).cold for end in ends]
    shares = [round(100 * x, 1) for x in np.diff([0, *cold])]
    assert shares == [4.5, 31.4, 1.5]


@pytest.mark.soak
def test_the_agent_trace():
    found = trace("claude_code_v6.jsonl.gz")
    assert (found.requests, found.sessions, found.blocks_seen) == (26_742, 454, 407_989)
    assert round(100 * ratios(found, ceiling(found)).cold, 1) == 95.8
    # By who used a block last; the other simulator has 89.2.
    own = last_used_by_own(found).sum() / found.input_tokens.sum()
    assert round(100 * own, 1) == 89.1
    assert round(most_at_once(found) / 1e6, 1) == 12.5
    # Of the first figure at 3M another simulator has 87.8; a plain LRU over these requests, block
    # by block, gives 87.74, as this one does.
    for tokens_m, percent, best in ((1, 49.6, 74.2), (3, 87.7, 92.8)):
        slots = int(tokens_m * 1e6) // 256
        done = replay(found, ReplayPlan(slots={SimTier.HOST: slots}))
        assert round(100 * ratios(found, done.prefix).cold, 1) == percent
        assert round(100 * ratios(found, Optimum(found).hits(slots)).cold, 1) == best
        assert lru_curve(found, [slots])[0].tolist() == done.prefix.tolist()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("router", "adoption", "percent"),
    [
        ("rr", 1.0, 57.1),
        ("session", 1.0, 94.9),
        ("session", 0.5, 78.7),
        ("kv", 1.0, 93.7),
        ("prefix", 1.0, 91.1),
    ],
)
def test_routing_the_agent_trace_to_eight_replicas(router, adoption, percent):
    found = trace("claude_code_v6.jsonl.gz")
    fleet = Fleet(router=Router(router), replicas=8, local=2_000_000 // 256, adoption=adoption)
    done = route(found, fleet)
    assert 100 * ratios(found, done.local).cold == pytest.approx(percent, abs=0.5)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("router", "percent", "busy"),
    [
        ("rr", 11.6, 1.04),
        ("least", 10.8, 1.02),
        ("session", 36.1, 1.07),
        ("session-bounded", 31.3, 1.05),
        ("prefix", 13.9, 8.0),
        ("kv", 29.2, 1.02),
    ],
)
def test_routing_the_conversation_to_eight_replicas(router, percent, busy):
    found = conversation()
    fleet = Fleet(router=Router(router), replicas=8, local=3_000_000 // 512, rate=7000.0)
    done = route(found, fleet)
    assert 100 * ratios(found, done.local).cold == pytest.approx(percent, abs=1.0)
    assert done.imbalance() == pytest.approx(busy, abs=0.1)
