"""Fault kinds 19 (hit ratios counted wrong, traces mis-read) and 32 (the head of a chain evicted
before its tail) in the bench. Formats and single figures have tests of their own beside this one.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

import kvtier.cli
from kvtier.bench.cache import Cache
from kvtier.bench.caches import make_cache
from kvtier.bench.capacity import Sizes
from kvtier.bench.figures import Basis, result
from kvtier.bench.replay import ReplayPlan, SimTier, WritePolicy, replay
from kvtier.bench.trace import NO_BLOCK, Paths, TraceBuilder
from kvtier.core.policy import POLICIES
from tests.bench.traces import build, conversations, upwards, write_lines

BLOCK = 100
SEEDS = (1, 2)


def prompts(*chains):
    """Requests of whole blocks of 100 tokens, one second after the other."""
    builder = TraceBuilder("made", BLOCK)
    for number, ids in enumerate(chains):
        builder.add(
            builder.blocks.follow(ids),
            arrival_s=float(number),
            session=0,
            input_tokens=len(ids) * BLOCK,
            output_tokens=1,
        )
    return builder.build()


# -- kind 19 -----------------------------------------------------------------------------------


def test_each_tier_is_asked_for_what_the_one_above_has_not():
    """A prompt of 1000 tokens, of which the gpu has 600 and host memory 800: 600 from the gpu, 200
    of the 400 asked of host memory, 200 computed; all together are the prompt."""
    prompt = list(range(10))
    trace = prompts(prompt, prompt)
    slots = {SimTier.GPU: 6, SimTier.HOST: 8}
    done = replay(trace, ReplayPlan(slots=slots))
    assert done.hits[SimTier.GPU].tolist() == [0, 6]
    assert done.hits[SimTier.HOST].tolist() == [0, 2]
    read = {tier: traffic.read * BLOCK for tier, traffic in done.traffic.items()}
    assert read == {SimTier.GPU: 600, SimTier.HOST: 200}
    row = result(Basis(trace), Sizes(trace, None), done)
    assert row["tiers"]["gpu"]["hit_ratio"] == 600 / 2000
    assert row["tiers"]["host"]["hit_ratio"] == 200 / 2000
    assert row["hit_ratio"]["cold"] == 800 / 2000
    assert row["hit_ratio"]["second_half"] == 0.8
    computed = 2000 - sum(read.values())
    assert computed == 1000 + 200


@pytest.mark.parametrize("write", WritePolicy)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_token_is_from_one_tier_or_computed(seed, write):
    trace = build(conversations(seed), remainder=5)
    slots = {SimTier.GPU: 30, SimTier.HOST: 60, SimTier.NVME: 120}
    done = replay(trace, ReplayPlan(slots=slots, write=write))
    assert (done.prefix <= trace.blocks).all()
    for tier, hits in done.hits.items():
        assert (hits >= 0).all()
        assert done.traffic[tier].read == hits.sum()
        assert done.traffic[tier].written - done.traffic[tier].evicted <= slots[tier]
    row = result(Basis(trace), Sizes(trace, None), done)
    shares = sum(tier["hit_ratio"] for tier in row["tiers"].values())
    assert row["hit_ratio"]["cold"] == pytest.approx(shares)
    assert row["same_session"] + row["cross_session"] == pytest.approx(shares)
    windows = row["windows"]
    pairs = zip(windows["hit_ratio"], windows["input_tokens"], strict=True)
    tokens = [(ratio or 0) * count for ratio, count in pairs]
    assert sum(tokens) / trace.input_tokens.sum() == pytest.approx(shares)


def row(**fields):
    return {"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1, 2]} | fields


def test_lengths_around_whole_blocks_and_times_out_of_order(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("KVTIER_TRACES", raising=False)
    rows = [
        row(timestamp=2000, input_length=1024),  # found whole: both blocks came before, at 1 s
        row(timestamp=1000, input_length=513),
        row(timestamp=0, input_length=512, hash_ids=[1]),
    ]
    path = write_lines(tmp_path / "trace", rows)
    words = ["bench", "hit-ratio", str(path), "--capacities", "100%", "--block-tokens", "512"]
    assert kvtier.cli.main([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    # 512 of the 513 tokens at 1 s; at 2 s all of the 1024 that two blocks hold.
    (found,) = report["results"]
    assert found["hit_ratio"]["cold"] == (512 + 1024) / (512 + 513 + 1024)
    assert "tokens of the cached prefixes / input tokens" in report["definitions"]["cold"]
    assert report["trace"]["ceiling"]["cold"] == found["hit_ratio"]["cold"]


def test_a_missing_file_is_named(tmp_path, capsys):
    missing = tmp_path / "none.jsonl"
    assert kvtier.cli.main(["bench", "hit-ratio", str(missing)]) == 2
    assert str(missing) in capsys.readouterr().err


@pytest.mark.parametrize("seed", SEEDS)
def test_with_room_for_all_an_independent_count_agrees(seed):
    trace = build(conversations(seed), remainder=3)
    seen: set[tuple] = set()
    hit = total = 0
    for request in range(trace.requests):
        path = upwards(trace, request)
        tokens = int(trace.input_tokens[request])
        total += tokens
        found = 0
        for depth in range(1, len(path) + 1):
            prefix = tuple(path[:depth])
            if prefix not in seen:
                break
            found = min(tokens, depth * trace.block_tokens)
        hit += found
        seen.update(tuple(path[:depth]) for depth in range(1, len(path) + 1))
    done = replay(trace, ReplayPlan(slots={SimTier.HOST: trace.blocks_seen}))
    row = result(Basis(trace), Sizes(trace, None), done)
    assert row["hit_ratio"]["cold"] == hit / total


# -- kind 32 -----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Cache, make_cache], ids=["plain", "made"])
@pytest.mark.parametrize("policy", POLICIES)
def test_of_a_chain_whose_tail_alone_was_used_the_tail_goes(policy, make):
    chain, others = list(range(100)), [1000 + n for n in range(30)]
    trace = prompts(chain, others)
    path, other = Paths(trace)
    cache = make(trace.parent, 100, policy)
    for at in range(0, 100, 8):
        cache.store(path[at : at + 8])
    for at in range(60, 100, 10):  # as of hits that an engine found in part in its own cache
        cache.touch(path[at : at + 10])
    stored, gone = cache.store(other)
    assert len(stored) == 30
    assert sorted(gone.tolist()) == path[70:].tolist()
    assert cache.has(path).tolist() == [True] * 70 + [False] * 30


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_kept_can_be_reached(seed, told, policy, monkeypatch):
    """Whatever the engine's own cache keeps from the daemon, a block of host memory whose parent is
    in no tier is never there for long: none is left that no request could use."""
    trace = build(conversations(seed))
    made = []

    def remember(*arguments, **named):
        made.append(make_cache(*arguments, **named))
        return made[-1]

    monkeypatch.setattr("kvtier.bench.replay.make_cache", remember)
    slots = {SimTier.GPU: 40, SimTier.HOST: 60}
    replay(trace, ReplayPlan(slots=slots, policy=policy, told=told))
    everything = np.arange(trace.blocks_seen)
    here = [cache.has(everything) for cache in made]
    blocks = np.flatnonzero(here[1])
    parents = trace.parent[blocks]
    parents = parents[parents != NO_BLOCK]
    assert len(blocks) == 60
    lost = np.count_nonzero(~(here[0] | here[1])[parents])
    assert lost == 0
