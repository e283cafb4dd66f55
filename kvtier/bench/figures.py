"""From what a replay counted to the figures that people compare, each under the name of its
definition. Ratios are of input tokens unless they say otherwise. Pure functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.bench.bounds import Optimum, ceiling, own_prefix
from kvtier.bench.capacity import Sizes
from kvtier.bench.replay import Replay, SimTier
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


def summary(basis: Basis, sizes: Sizes) -> dict[str, Any]:
    """The trace itself: its size, how many sessions live at once, and its ceiling."""
    trace = basis.trace
    sessions, tokens = _live(trace)
    best = trace.tokens(basis.ceiling)
    own = trace.tokens(np.minimum(basis.ceiling, basis.own))
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
        "sessions_live_peak": sessions,
        "live_tokens_peak": tokens,
        "working_set_tokens": working_set,
        "working_set_bytes": sizes.bytes_of(trace.blocks_seen),
        "ceiling": _plain(ratios(trace, basis.ceiling)),
        "ceiling_same_session": _part(own, trace.input_tokens),
        "ceiling_cross_session": _part(best - own, trace.input_tokens),
        "notes": list(trace.notes),
    }


def _live(trace: Trace) -> tuple[int, int]:
    """Peaks of (sessions between their first and last request, tokens of their last inputs)."""
    order = np.lexsort((np.arange(trace.requests), trace.session))
    session, tokens = trace.session[order], trace.input_tokens[order]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = session[1:] != session[:-1]
    is_last = np.append(is_first[1:], True)
    before = np.where(is_first, 0, np.concatenate([[0], tokens[:-1]]))
    growth, begins, ends = (np.zeros(trace.requests, np.int64) for _ in range(3))
    growth[order] = tokens - before
    begins[order] = is_first
    ends[order] = is_last
    leaves = np.where(ends == 1, trace.input_tokens, 0)
    live = np.cumsum(begins) - (np.cumsum(ends) - ends)
    held = np.cumsum(growth) - (np.cumsum(leaves) - leaves)
    return int(live.max()), int(held.max())


def result(basis: Basis, sizes: Sizes, done: Replay) -> dict[str, Any]:
    """One policy at one choice of tiers."""
    trace, plan = basis.trace, done.plan
    total = int(trace.input_tokens.sum())
    found = ratios(trace, done.prefix)
    best = ratios(trace, basis.optimum(sum(plan.slots.values())))
    tokens = trace.tokens(done.prefix)
    own = trace.tokens(np.minimum(done.prefix, basis.own))
    return {
        "policy": plan.policy,
        "write": plan.write.value,
        "hit_ratio": _plain(found),
        "same_session": float(own.sum() / total),
        "cross_session": float((tokens - own).sum() / total),
        "prefill_speedup_ideal": 1 / max(1e-9, 1 - found.cold),
        "optimum": _plain(best),
        "gap_to_optimum": best.cold - found.cold,
        "tiers": {tier.value: _tier(trace, sizes, done, tier) for tier in plan.slots},
    }


def _tier(trace: Trace, sizes: Sizes, done: Replay, tier: SimTier) -> dict[str, Any]:
    slots, traffic = done.plan.slots[tier], done.traffic[tier]
    above = np.zeros(trace.requests, np.int32)
    for other, hits in done.hits.items():
        if other == tier:
            break
        above += hits
    tokens = trace.tokens(above + done.hits[tier]) - trace.tokens(above)
    return {
        "capacity_tokens": slots * trace.block_tokens,
        "capacity_bytes": sizes.bytes_of(slots),
        "hit_ratio": _part(tokens, trace.input_tokens),
        "read_tokens": traffic.read * trace.block_tokens,
        "read_bytes": sizes.bytes_of(traffic.read),
        "written_tokens": traffic.written * trace.block_tokens,
        "written_bytes": sizes.bytes_of(traffic.written),
        "evicted_tokens": traffic.evicted * trace.block_tokens,
    }
