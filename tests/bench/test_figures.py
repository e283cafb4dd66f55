"""Figures of a trace small enough to count by hand (fault kind 19: denominators, double counting,
requests left out), and sizes as people write them."""

from __future__ import annotations

import pytest

from kvtier.bench.bounds import ceiling
from kvtier.bench.capacity import Sizes, parse_amount, parse_tiers
from kvtier.bench.errors import BenchInput
from kvtier.bench.figures import Basis, ratios, result, summary
from kvtier.bench.formats import read_trace
from kvtier.bench.models import KvDtype, bytes_per_token
from kvtier.bench.replay import ReplayPlan, SimTier, WritePolicy, replay
from tests.bench.traces import BLOCK, build, write_lines

# Blocks of 16 tokens; each last block holds 6. The second half is the last two requests.
REQUESTS = [(0, [1, 2]), (1, [1, 3, 4]), (0, [1, 2]), (2, [9])]
INPUT = (22, 38, 22, 6)


@pytest.fixture
def trace():
    return build(REQUESTS, remainder=10)


def test_every_request_counts_with_its_own_tokens(trace):
    assert trace.input_tokens.tolist() == list(INPUT)
    found = ratios(trace, replay(trace, ReplayPlan(slots={SimTier.HOST: 99})).prefix)
    # Hits: none, block 1, all of the third request (16 + 6 tokens), none.
    assert found.cold == (16 + 22) / sum(INPUT)
    assert found.second_half == 22 / (22 + 6)
    assert found.request_mean == pytest.approx((0 + 16 / 38 + 1 + 0) / 4)
    assert found.block_weighted == 3 / 8


@pytest.mark.parametrize(
    ("lengths", "cold"),
    [
        ((10, 10), 0.0),  # no block at all: 0 of 0 found is no hit
        ((600, 600), 512 / 1200),  # 88 tokens after the block, which have no id
        ((300, 300), 0.5),  # a last block that is not full weighs what it has
        ((1024, 1030), 1024 / 2054),
    ],
)
def test_tokens_without_a_block_are_never_found(tmp_path, lengths, cold):
    blocks = {10: 0, 600: 1, 300: 1, 1024: 2, 1030: 2}
    rows = [
        {
            "timestamp": 0,
            "input_length": length,
            "hash_ids": [7, 8][: blocks[length]],
            "block_size": 512,
        }
        for length in lengths
    ]
    trace = read_trace(write_lines(tmp_path / "trace", rows))
    found = replay(trace, ReplayPlan(slots={SimTier.HOST: 99}))
    assert ratios(trace, found.prefix).cold == cold
    assert ratios(trace, ceiling(trace)).cold == cold
    for request in range(2):
        one = found.prefix[request : request + 1]
        assert trace.tokens(one, request)[0] == trace.tokens(found.prefix)[request]


def test_tiers_and_sessions_share_the_hits_without_a_rest(trace):
    sizes = Sizes(trace, 10)
    slots = {SimTier.GPU: 3, SimTier.HOST: 4, SimTier.NVME: 9}
    done = replay(trace, ReplayPlan(slots=slots, write=WritePolicy.THROUGH))
    row = result(Basis(trace), sizes, done)
    # The gpu held 1, 3 and 4 when the third request asked for 1 and 2.
    assert {name: tier["hit_ratio"] for name, tier in row["tiers"].items()} == {
        "gpu": 32 / sum(INPUT),
        "host": 6 / sum(INPUT),
        "nvme": 0.0,
    }
    assert row["same_session"] == 22 / sum(INPUT)
    assert row["cross_session"] == pytest.approx(16 / sum(INPUT))
    host, nvme = row["tiers"]["host"], row["tiers"]["nvme"]
    assert (host["read_tokens"], host["written_tokens"]) == (1 * BLOCK, 5 * BLOCK)
    assert nvme["written_bytes"] == 5 * BLOCK * 10
    assert host["evicted_tokens"] == 1 * BLOCK
    assert row["gap_to_optimum"] == pytest.approx(0.0)


def test_a_summary_counts_what_lives_at_once(trace):
    found = summary(Basis(trace), Sizes(trace, None))
    assert (found["requests"], found["sessions"], found["blocks"]) == (4, 3, 5)
    # Session 0 lives from the first to the third request, session 1 for the second alone.
    assert found["sessions_live_peak"] == 2
    assert found["working_set_tokens"] == 5 * BLOCK
    assert found["working_set_bytes"] is None
    assert found["live_tokens_peak"] == 22 + 38
    assert found["live_largest_tokens_peak"] == 22 + 38
    # Of the third request session 1 had used block 1 after session 0, and nobody block 2.
    names = ("same_session", "cross_session", "last_used_by_same_session")
    parts = [found[f"ceiling_{name}"] * sum(INPUT) for name in names]
    assert parts == pytest.approx([22, 16, 6])
    assert found["ceiling_last_used_by_other_session"] == pytest.approx(32 / sum(INPUT))


def test_live_contexts_count_by_their_last_input_or_by_their_largest():
    requests = [(0, [1]), (1, [9]), (0, [1, 2, 3]), (1, [9, 8]), (0, [1]), (2, [7] * 4)]
    found = summary(Basis(trace := build(requests)), Sizes(trace, None))
    assert found["live_tokens_peak"] == 5 * BLOCK
    assert found["live_largest_tokens_peak"] == 5 * BLOCK
    requests = [(0, [1, 2, 3]), (0, [1]), (1, [9, 8]), (0, [1]), (1, [9, 8, 7])]
    found = summary(Basis(trace := build(requests)), Sizes(trace, None))
    assert found["live_tokens_peak"] == 3 * BLOCK
    assert found["live_largest_tokens_peak"] == 6 * BLOCK


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("32tok", 2),
        ("47tok", 2),
        ("1.6Ktok", 100),
        ("3Mtok", 187_500),
        ("0.5e6tok", 31_250),
        ("40%", 2),
        ("100%", 5),
        ("160B", 1),
        ("16KB", 100),
        ("16KiB", 102),
        ("1.5GB", 9_375_000),
        ("0tok", 0),
    ],
)
def test_amounts(trace, text, slots):
    assert parse_amount(text, Sizes(trace, 10)) == slots


def test_tiers_come_in_the_order_of_their_speed(trace):
    found = parse_tiers("nvme=80%, gpu=16tok,host=160B", Sizes(trace, 10))
    assert list(found.items()) == [(SimTier.GPU, 1), (SimTier.HOST, 1), (SimTier.NVME, 4)]


@pytest.mark.parametrize("text", ["", "-3tok", "3", "3iB", "3tokens", "1e3", "tok"])
def test_what_is_no_amount(trace, text):
    with pytest.raises(BenchInput, match="size '"):
        parse_amount(text, Sizes(trace, 10))


@pytest.mark.parametrize(
    ("model", "bf16", "fp8"),
    [
        ("kimi-k2", 70_272, 39_040),
        ("deepseek-v3", 70_272, 39_040),
        ("glm-5", 78 * (1152 + 132), 78 * (640 + 132)),
        ("llama-3.1-8b", 131_072, 65_536),
        ("llama-3.1-70b", 327_680, 163_840),
        ("qwen3-8b", 147_456, 73_728),
        ("qwen3-235b-a22b", 192_512, 96_256),
    ],
)
def test_bytes_of_a_token(model, bf16, fp8):
    assert bytes_per_token(model) == bf16
    assert bytes_per_token(model, KvDtype.FP8) == fp8
