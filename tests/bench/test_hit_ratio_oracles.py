"""Figures of public traces, found by other simulators, where KVTIER_TRACES names their folder.

The conversation trace by default; the agent trace, with its ten million block references, as soak.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from kvtier.bench.bounds import Optimum, ceiling
from kvtier.bench.figures import ratios
from kvtier.bench.formats import read_trace
from kvtier.bench.replay import ReplayPlan, SimTier, WritePolicy, replay

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


def test_synthetic_without_eviction():
    found = trace("mooncake_synthetic.jsonl.gz")
    assert found.sessions == 2_245
    assert round(ratios(found, ceiling(found)).cold, 4) == 0.6512


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
    [(WritePolicy.THROUGH, 36.6, 94.7), (WritePolicy.BACK, 36.6, 92.5)]
    + [(WritePolicy.SELECTIVE, 19.6, 8.3)],
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
    for tokens_m, percent, best in ((1, 49.6, 74.2), (3, 87.8, 92.8)):
        slots = int(tokens_m * 1e6) // 256
        done = replay(found, ReplayPlan(slots={SimTier.HOST: slots}))
        assert round(100 * ratios(found, done.prefix).cold, 1) == percent
        assert round(100 * ratios(found, Optimum(found).hits(slots)).cold, 1) == best
