"""From what a replay counted to the figures that people compare, each under the name of its
definition. Ratios are of input tokens unless they say otherwise. Pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.bench.bounds import (
    Optimum,
    ceiling,
    ceiling_with_ttl,
    last_used_by_own,
    own_prefix,
)
from kvtier.bench.capacity import Sizes
from kvtier.bench.prices import TokenPrices
from kvtier.bench.replay import Replay, SimTier
from kvtier.bench.spread import live_columns, most_at_once, spread, windows
from kvtier.bench.trace import Trace

__all__ = ["DEFINITIONS", "Basis", "Ratios", "ratios", "result", "summary"]

Ints = npt.NDArray[np.int32]

DEFINITIONS = {
    "cold": "tokens of the cached prefixes / input tokens, all requests, from an empty cache",
    "second_half": "the same over the second half of the requests",
    "request_mean": "mean over requests of each one's cached part",
    "block_weighted": "blocks of the cached prefixes / blocks",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    cold: float
    second_half: float
    request_mean: float
    block_weighted: float


class Basis:
    """What every figure of a trace needs, computed once."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.ceiling = ceiling(trace)
        self.own = own_prefix(trace)
        self._optimum: Optimum | None = None

    def optimum(self, slots: int) -> Ints:
        """Hits of the best policy with one tier of so many slots."""
        if self._optimum is None:
            self._optimum = Optimum(self.trace)
        return self._optimum.hits(slots)


def ratios(trace: Trace, prefix: Ints) -> Ratios:
    """Of the cached blocks of each request."""
    tokens, total = trace.tokens(prefix), trace.input_tokens
    half = trace.requests // 2
    return Ratios(
        cold=_part(tokens, total),
        second_half=_part(tokens[half:], total[half:]),
        request_mean=float(np.mean(tokens / np.maximum(total, 1))),
        block_weighted=_part(prefix, trace.blocks),
    )


def _part(some: npt.NDArray[Any], of: npt.NDArray[Any]) -> float:
    return float(some.sum(dtype=np.int64) / max(1, of.sum(dtype=np.int64)))


def _plain(found: Ratios) -> dict[str, float]:
    return {name: getattr(found, name) for name in DEFINITIONS}


def summary(basis: Basis, sizes: Sizes, ttls_s: Sequence[float] = ()) -> dict[str, Any]:
    """The trace itself: its size, how many sessions live at once, and its ceiling, also with these
    times to live."""
    trace = basis.trace
    live, held = live_columns(trace)
    best = trace.tokens(basis.ceiling)
    own = trace.tokens(np.minimum(basis.ceiling, basis.own))
    last = last_used_by_own(trace)
    working_set = trace.working_set_tokens
    return {
        "format": trace.format,
        "requests": trace.requests,
        "sessions": trace.sessions,
        "block_tokens": trace.block_tokens,
        "block_references": trace.references,
        "blocks": trace.blocks_seen,
        "input_tokens": int(trace.input_tokens.sum()),
        "output_tokens": int(trace.output_tokens.sum()),
        "span_s": float(trace.arrival_s[-1] - trace.arrival_s[0]),
        "sessions_live_peak": int(live.max()),
        "live_tokens_peak": int(held.max()),
        "live_largest_tokens_peak": most_at_once(trace),
        "working_set_tokens": working_set,
        "working_set_bytes": sizes.bytes_of(trace.blocks_seen),
        "ceiling": _plain(ratios(trace, basis.ceiling)),
        "ceiling_same_session": _part(own, trace.input_tokens),
        "ceiling_cross_session": _part(best - own, trace.input_tokens),
        "ceiling_last_used_by_same_session": _part(last, trace.input_tokens),
        "ceiling_last_used_by_other_session": _part(best - last, trace.input_tokens),
        "ceiling_with_ttl": {
            f"{ttl_s:g}": ratios(trace, ceiling_with_ttl(trace, ttl_s)).cold for ttl_s in ttls_s
        },
        "notes": list(trace.notes),
    }


def result(
    basis: Basis, sizes: Sizes, done: Replay, prices: TokenPrices | None = None
) -> dict[str, Any]:
    """One policy at one choice of tiers."""
    trace, plan = basis.trace, done.plan
    total = int(trace.input_tokens.sum())
    found = ratios(trace, done.prefix)
    best = ratios(trace, basis.optimum(sum(plan.slots.values())))
    tokens = trace.tokens(done.prefix)
    own = trace.tokens(np.minimum(done.prefix, basis.own))
    by_tier = _tokens_by_tier(trace, done)
    return {
        "policy": plan.policy,
        "write": plan.write.value,
        "hit_ratio": _plain(found),
        "same_session": float(own.sum() / total),
        "cross_session": float((tokens - own).sum() / total),
        "sessions": spread(trace, tokens),
        "prefill_speedup_ideal": 1 / max(1e-9, 1 - found.cold),
        "cost_per_million": None if prices is None else prices.per_million(found.cold),
        "optimum": _plain(best),
        "gap_to_optimum": best.cold - found.cold,
        "tiers": {
            tier.value: _tier(sizes, done, tier, _part(by_tier[tier], trace.input_tokens))
            for tier in plan.slots
        },
        "windows": windows(trace, {tier.value: one for tier, one in by_tier.items()}),
    }


def _tokens_by_tier(trace: Trace, done: Replay) -> dict[SimTier, npt.NDArray[np.int64]]:
    """Of each request, the tokens that come from each tier."""
    found = {}
    above = np.zeros(trace.requests, np.int32)
    for tier, hits in done.hits.items():
        found[tier] = trace.tokens(above + hits) - trace.tokens(above)
        above = above + hits
    return found


def _tier(sizes: Sizes, done: Replay, tier: SimTier, hit_ratio: float) -> dict[str, Any]:
    slots, traffic = done.plan.slots[tier], done.traffic[tier]
    block_tokens = sizes.trace.block_tokens
    return {
        "capacity_tokens": slots * block_tokens,
        "capacity_bytes": sizes.bytes_of(slots),
        "hit_ratio": hit_ratio,
        "read_tokens": traffic.read * block_tokens,
        "read_bytes": sizes.bytes_of(traffic.read),
        "written_tokens": traffic.written * block_tokens,
        "written_bytes": sizes.bytes_of(traffic.written),
        "evicted_tokens": traffic.evicted * block_tokens,
    }
