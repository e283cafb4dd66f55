"""What `kvtier bench hit-ratio` prints: the trace, a table, what its columns mean, a sentence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvtier.bench.report import (
    OPTIMUM,
    percent,
    sentence,
    setup_lines,
    size_text,
    token_text,
)
from kvtier.bench.routing_report import SERVICE, routing_rows, routing_sentence
from kvtier.bench.spread import PERCENTILES
from kvtier.cli.table import table

__all__ = ["hit_ratio_lines", "routing_lines", "tier_size"]

_HEADER = ("policy", "write", "tier", "size", "hit", "2nd half", "mean", "same", "other",
           "1/(1-h)", "optimum", "read", "written")  # fmt: skip
_PRICES = (
    "cost/Mtok: of a million input tokens, cached ones at {cached:g} a million and the others at "
    "{uncached:g}"
)


def hit_ratio_lines(report: dict[str, Any]) -> Iterator[str]:
    """The report of replays."""
    trace, setup, results = report["trace"], report["setup"], report["results"]
    yield from setup_lines(trace, setup)
    yield ""
    rows = [cells for row in results for cells in _rows(row)]
    prices = setup["token_prices"]
    header = _HEADER if prices is None else (*_HEADER, "cost/Mtok")
    yield from table(header, rows)
    yield ""
    yield from _spread_lines(results)
    yield ""
    yield "hit, same (session), other (sessions), optimum: % of input tokens, cold start;"
    yield "2nd half: over the second half of the requests; mean: of each request's own ratio"
    yield OPTIMUM
    if prices is not None:
        yield _PRICES.format(**prices)
    yield report["shared_with_the_daemon"]
    yield ""
    yield sentence(trace, results)


def routing_lines(report: dict[str, Any]) -> Iterator[str]:
    """The report of routed replays."""
    results, prices = report["results"], report["setup"]["token_prices"]
    yield from setup_lines(report["trace"], report["setup"])
    yield ""
    yield from table(*routing_rows(results))
    yield ""
    first = results[0]
    yield SERVICE.format(rate=first["rate_tokens_per_s"], cost=first["shared_cost"])
    if prices is not None:
        yield _PRICES.format(**prices) + "; one of the shared tier counts as cached"
    yield report["shared_with_the_daemon"]
    yield ""
    yield routing_sentence(results)


def _spread_lines(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "over sessions (each counts once; its cached tokens over its input tokens):"
    header = ("size", "policy", "write", "mean", *(f"p{at}" for at in PERCENTILES))
    yield from table(
        header,
        [
            (
                " + ".join(token_text(tier["capacity_tokens"]) for tier in row["tiers"].values()),
                row["policy"],
                _write(row),
                *(percent(row["sessions"][name]) for name in header[3:]),
            )
            for row in results
        ],
    )


def _rows(row: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    tiers, ratios = row["tiers"], row["hit_ratio"]
    whole = (
        *(percent(ratios[name]) for name in ("cold", "second_half", "request_mean")),
        percent(row["same_session"]),
        percent(row["cross_session"]),
        f"{row['prefill_speedup_ideal']:.3g}",
        percent(row["optimum"]["cold"]),
    )
    cost = () if row["cost_per_million"] is None else (f"{row['cost_per_million']:.4g}",)
    for name, tier in tiers.items():
        is_all = len(tiers) == 1
        own = whole if is_all else (percent(tier["hit_ratio"]), *[""] * 6)
        last = cost if is_all else ("",) * len(cost)
        yield (row["policy"], _write(row), name, tier_size(tier), *own, *_moved(tier), *last)
    if len(tiers) > 1:
        yield (row["policy"], _write(row), "all", "", *whole, "", "", *cost)


def _write(row: dict[str, Any]) -> str:
    """How pages go to nvme, where that is a question."""
    is_asked = {"host", "nvme"} <= row["tiers"].keys()
    return str(row["write"]) if is_asked else "-"


def tier_size(tier: dict[str, Any]) -> str:
    """As 1.5TB = 4.5Mtok."""
    tokens = token_text(tier["capacity_tokens"])
    size = tier["capacity_bytes"]
    return tokens if size is None else f"{size_text(size)} = {tokens}"


def _moved(tier: dict[str, Any]) -> tuple[str, str]:
    if tier["read_bytes"] is None:
        return token_text(tier["read_tokens"]), token_text(tier["written_tokens"])
    return size_text(tier["read_bytes"]), size_text(tier["written_bytes"])
