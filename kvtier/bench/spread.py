"""How hits spread over sessions and over time. Pure functions."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvtier.bench.trace import Trace

__all__ = [
    "PERCENTILES",
    "WINDOWS",
    "live_columns",
    "most_at_once",
    "session_ratios",
    "spread",
    "windows",
]

Longs = npt.NDArray[np.int64]

PERCENTILES: Final = (5, 25, 50, 75, 95)
#: Parts of equal length that a trace's time is cut into.
WINDOWS: Final = 48


def session_ratios(trace: Trace, cached: Longs) -> npt.NDArray[np.float64]:
    """Of each session with input: its cached tokens over its input tokens. `cached`: tokens of
    each request."""
    total = np.bincount(trace.session, trace.input_tokens, trace.sessions)
    found = np.bincount(trace.session, cached, trace.sessions)
    ratios: npt.NDArray[np.float64] = found[total > 0] / total[total > 0]
    return ratios


def spread(trace: Trace, cached: Longs) -> dict[str, float]:
    """Mean and percentiles over sessions, each of which counts once, of `session_ratios`."""
    ratios = session_ratios(trace, cached)
    points = np.percentile(ratios, PERCENTILES).tolist()
    return {
        "mean": float(ratios.mean()),
        **{f"p{at}": point for at, point in zip(PERCENTILES, points, strict=True)},
    }


def windows(trace: Trace, cached: dict[str, Longs]) -> dict[str, Any]:
    """Hit ratio in each of WINDOWS equal parts of the trace's time, by arrival; None where nothing
    arrives. `cached`: tokens of each request, by tier.

    `sessions_live` and `live_tokens`: the most at once among requests of the window.
    """
    arrival = trace.arrival_s - trace.arrival_s[0]
    width = max(1e-9, float(arrival[-1])) / WINDOWS
    at = np.minimum((arrival / width).astype(np.int64), WINDOWS - 1)
    total = np.bincount(at, trace.input_tokens, WINDOWS)
    tiers = {name: _ratios(np.bincount(at, one, WINDOWS), total) for name, one in cached.items()}
    whole = np.sum(list(cached.values()), axis=0)
    sessions, tokens = (np.zeros(WINDOWS, np.int64) for _ in range(2))
    for most, live in zip((sessions, tokens), live_columns(trace), strict=True):
        np.maximum.at(most, at, live)
    return {
        "seconds": [round(float(number * width), 3) for number in range(WINDOWS)],
        "input_tokens": total.astype(np.int64).tolist(),
        "hit_ratio": _ratios(np.bincount(at, whole, WINDOWS), total),
        "tiers": tiers,
        "sessions_live": sessions.tolist(),
        "live_tokens": tokens.tolist(),
    }


def _ratios(found: npt.NDArray[Any], total: npt.NDArray[Any]) -> list[float | None]:
    return [
        float(one / of) if of else None
        for one, of in zip(found.tolist(), total.tolist(), strict=True)
    ]


def live_columns(trace: Trace) -> tuple[Longs, Longs]:
    """At each request: (sessions between their first and last request, tokens of their last
    inputs)."""
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
    return live, held


def most_at_once(trace: Trace) -> int:
    """The most tokens of sessions between their first and last request, each of which counts with
    its largest input."""
    largest = np.zeros(trace.sessions, np.int64)
    np.maximum.at(largest, trace.session, trace.input_tokens)
    change = np.zeros(trace.requests + 1, np.int64)
    sessions, first = np.unique(trace.session, return_index=True)
    _, from_end = np.unique(trace.session[::-1], return_index=True)
    np.add.at(change, first, largest[sessions])
    np.subtract.at(change, trace.requests - from_end, largest[sessions])
    return int(np.cumsum(change).max())
