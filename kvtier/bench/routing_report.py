"""Figures of a routed replay, as a document and as lines. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from kvtier.bench.figures import Basis
from kvtier.bench.prices import TokenPrices
from kvtier.bench.report import percent, token_text
from kvtier.bench.routing import Routing

__all__ = ["SERVICE", "routed", "routing_rows", "routing_sentence"]

SERVICE: Final = (
    "Service model: a replica prefills {rate:,.0f} uncached tokens/s, first come first served; a "
    "token of the shared tier costs {cost:.0%} of that; no decode; arrivals do not slow down under "
    "load, and the router sees all caches as they are."
)
_SAME: Final = ("local_tokens", "policy")
_HEADER: Final = ("router", "replicas", "adoption", "hit", "own", "shared", "busy max/mean",
                  "windowed", "first token p50", "p95")  # fmt: skip


def routed(basis: Basis, done: Routing, prices: TokenPrices | None = None) -> dict[str, Any]:
    """One router at one size."""
    trace, fleet = basis.trace, done.fleet
    total = int(trace.input_tokens.sum())
    own = int(trace.tokens(done.local).sum())
    found = int(trace.tokens(done.local + done.shared).sum())
    p50, p95 = np.percentile(done.first_token_s, (50, 95))
    return {
        "router": fleet.router.value,
        "policy": fleet.policy,
        "replicas": fleet.replicas,
        "affinity_adoption": fleet.adoption,
        "local_tokens": fleet.local * trace.block_tokens,
        "shared_tokens": fleet.shared * trace.block_tokens,
        "hit_ratio": found / total,
        "hit_ratio_local": own / total,
        "hit_ratio_shared": (found - own) / total,
        "cost_per_million": None if prices is None else prices.per_million(found / total),
        "busy_max_over_mean": done.imbalance(),
        "busy_max_over_mean_windowed": done.imbalance_windowed(trace),
        "first_token_p50_s": float(p50),
        "first_token_p95_s": float(p95),
        "rate_tokens_per_s": fleet.rate,
        "shared_cost": fleet.shared_cost,
    }


def routing_rows(results: Sequence[dict[str, Any]]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Header and cells of a table."""
    if results[0]["cost_per_million"] is None:
        return _HEADER, [list(_cells(row)) for row in results]
    rows = [[*_cells(row), f"{row['cost_per_million']:.4g}"] for row in results]
    return (*_HEADER, "cost/Mtok"), rows


def _cells(row: dict[str, Any]) -> Iterator[str]:
    yield row["router"]
    yield str(row["replicas"])
    yield f"{row['affinity_adoption']:.0%}" if row["router"].startswith("session") else "-"
    yield from (percent(row[f"hit_ratio{part}"]) for part in ("", "_local", "_shared"))
    yield f"{row['busy_max_over_mean']:.2f}"
    yield f"{row['busy_max_over_mean_windowed']:.2f}"
    yield from (f"{row[f'first_token_{p}_s']:.2f} s" for p in ("p50", "p95"))


def routing_sentence(results: Sequence[dict[str, Any]]) -> str:
    """One plain sentence that compares the first router with the best at its size and policy."""
    first = results[0]
    same = [row for row in results if all(row[name] == first[name] for name in _SAME)]
    best = max(same, key=lambda row: float(row["hit_ratio"]))
    size = token_text(first["local_tokens"])
    if first["shared_tokens"]:
        size += f" and {token_text(first['shared_tokens'])} shared"
    start = (
        f"With {first['replicas']} replicas of {size} each, router {first['router']} finds "
        f"{percent(first['hit_ratio'])} of input tokens"
    )
    if best is first:
        return start + "."
    return (
        f"{start}; {best['router']} finds {percent(best['hit_ratio'])}, with the busiest replica "
        f"{best['busy_max_over_mean']:.2f} times as busy as the mean."
    )
