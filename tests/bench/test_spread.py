"""Hits by session and by time, counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.bench.bounds import ceiling
from kvtier.bench.errors import BenchInput
from kvtier.bench.prices import TokenPrices, memory_cost, parse_memory_prices
from kvtier.bench.replay import SimTier
from kvtier.bench.spread import WINDOWS, session_ratios, spread, windows
from tests.bench.traces import build, conversations

# Blocks of 16 tokens; the third request finds both of its blocks, the second one of two.
REQUESTS = [(0, [1, 2]), (1, [1, 3]), (0, [1, 2]), (2, [9])]


def test_a_session_counts_once_and_by_its_tokens():
    trace = build(REQUESTS)
    cached = trace.tokens(ceiling(trace))
    assert session_ratios(trace, cached).tolist() == [0.5, 0.5, 0.0]
    found = spread(trace, cached)
    assert found["mean"] == pytest.approx(1 / 3)
    assert (found["p50"], found["p95"]) == (0.5, 0.5)
    assert found["p5"] == pytest.approx(0.05)


@pytest.mark.parametrize("seed", [1, 2])
def test_windows_hold_every_token_once(seed):
    trace = build(conversations(seed))
    cached = trace.tokens(ceiling(trace))
    upper = cached // 2
    found = windows(trace, {"gpu": upper, "host": cached - upper})
    assert len(found["seconds"]) == len(found["hit_ratio"]) == WINDOWS
    assert sum(found["input_tokens"]) == trace.input_tokens.sum()
    parts = [[x or 0 for x in found["tiers"][tier]] for tier in ("gpu", "host")]
    for one, total in zip((upper, cached - upper), parts, strict=True):
        tokens = np.dot(total, found["input_tokens"])
        assert tokens == pytest.approx(one.sum())
    assert max(found["live_tokens"]) >= trace.input_tokens.max()


def test_windows_without_requests_have_no_ratio():
    found = windows(build(REQUESTS), {"host": build(REQUESTS).tokens(np.zeros(4, np.int32))})
    # Requests at 0, 1, 2 and 3 s: windows of a sixteenth of a second.
    assert [at for at, one in enumerate(found["hit_ratio"]) if one is not None] == [0, 16, 32, 47]
    assert found["sessions_live"][16] == 2
    assert found["live_tokens"][16] == 64


def test_prices():
    assert TokenPrices(cached=0.1, uncached=1.0).per_million(0.75) == pytest.approx(0.325)
    found = parse_memory_prices("nvme=0.1, host=3")
    assert found == {SimTier.HOST: 3.0, SimTier.NVME: 0.1}
    sizes = {SimTier.GPU: 1 << 40, SimTier.HOST: 2 << 30, SimTier.NVME: 5 << 30}
    assert memory_cost(found, sizes) == pytest.approx(6.5)


@pytest.mark.parametrize("text", ["", "host", "host=", "host=x", "host=nan", "host=-1", "disk=1",
                                  "host=1,host=2", "host=1e400"])  # fmt: skip
def test_what_is_no_price(text):
    with pytest.raises(BenchInput):
        parse_memory_prices(text)
    with pytest.raises(BenchInput):
        TokenPrices(cached=float("nan"), uncached=1.0)
