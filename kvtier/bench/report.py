"""The report of a bench: one document for --json, rows for --csv, and a sentence that answers.

Pure functions.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any, Final

from kvtier.bench.figures import DEFINITIONS
from kvtier.bench.textbook import TEXTBOOK
from kvtier.core.policy.forecasting import FORECASTING, REFUSING

__all__ = [
    "FORMAT",
    "OPTIMUM",
    "csv_text",
    "document",
    "percent",
    "sentence",
    "setup_lines",
    "size_text",
    "token_text",
]

OPTIMUM: Final = (
    "optimum: what the best policy would find in one tier as large as all together; tiers that "
    "keep copies of each other's pages hold less, and may not reach it"
)
#: What of the daemon runs in a replay, in every report.
SHARED: Final = (
    "Eviction runs the daemon's own policy objects (kvtier.core.policy; of LRU, where numba can be "
    "used, a compiled copy, held equal to the daemon's by tests) over its own table of page "
    "copies, in the daemon's order of calls; finding pages, slabs, leases, shards and the "
    "cleaner's head start are not replayed. Tier gpu stands for an engine's own radix cache."
)
ONE_PASS: Final = (
    "Computed in one pass over stack distances, not by the daemon's code: request by request what "
    "its LRU finds, to which tests hold it. Tier gpu stands for an engine's own radix cache."
)
_TEXTBOOK: Final = " Not so {names}: of textbooks, in code of their own."
_FORECASTING: Final = (
    " Here {names} hears of each request whole, and of its output tokens; in a daemon it puts "
    "requests together from the pages that are used."
)
_REFUSING: Final = " No daemon can be set to {names}: it takes every put."
FORMAT: Final = 1
#: Of the best hit ratio: what the sentence takes for enough.
_NEARLY: Final = 0.95
_NAMES: Final = {"gpu": "GPU memory", "host": "host memory", "nvme": "NVMe"}


def document(
    trace: dict[str, Any], setup: dict[str, Any], results: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """What --json prints; all that a figure depends on is in it."""
    return {
        "kvtier_bench": "hit-ratio",
        "format": FORMAT,
        "trace": trace,
        "setup": setup,
        "definitions": {**DEFINITIONS, "optimum": OPTIMUM.partition(": ")[2]},
        "shared_with_the_daemon": ONE_PASS if setup["one_pass"] else _shared(results),
        "results": list(results),
    }


def _shared(results: Sequence[dict[str, Any]]) -> str:
    text = SHARED
    kinds = ((_TEXTBOOK, TEXTBOOK), (_FORECASTING, FORECASTING), (_REFUSING, REFUSING))
    for sentence, kind in kinds:
        names = sorted({row["policy"] for row in results} & set(kind))
        text += sentence.format(names=", ".join(names)) if names else ""
    return text


def csv_text(results: Sequence[dict[str, Any]]) -> str:
    """One row a result and tier; tier "all" has the ratios of the whole."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = list(DEFINITIONS)
    of_tier = ("capacity_tokens", "capacity_bytes", "hit_ratio", "read_tokens", "written_tokens")
    more = ("same_session", "cross_session", "optimum", "cost_per_million")
    spread = [f"sessions_{name}" for name in results[0]["sessions"]]
    writer.writerow(["policy", "write", "tier", *of_tier, *names, *more, *spread])
    for row in results:
        blank = [""] * (len(names) + len(more) + len(spread))
        for name, tier in row["tiers"].items():
            values = ["" if tier[of] is None else tier[of] for of in of_tier]
            writer.writerow([row["policy"], row["write"], name, *values, *blank])
        capacity = [sum(tier["capacity_tokens"] for tier in row["tiers"].values()), "", "", "", ""]
        ratios = [row["hit_ratio"][name] for name in names]
        cost = "" if row["cost_per_million"] is None else row["cost_per_million"]
        rest = [row["same_session"], row["cross_session"], row["optimum"]["cold"], cost]
        rest += row["sessions"].values()
        writer.writerow([row["policy"], row["write"], "all", *capacity, *ratios, *rest])
    return out.getvalue()


def sentence(trace: dict[str, Any], results: Sequence[dict[str, Any]]) -> str:
    """One plain sentence about the smallest cache that does nearly what the best result does."""
    most = max(row["hit_ratio"]["cold"] for row in results)
    enough = [row for row in results if row["hit_ratio"]["cold"] >= _NEARLY * most]
    row = min(enough, key=lambda row: (_whole(row), -row["hit_ratio"]["cold"]))
    ratio = row["hit_ratio"]["cold"]
    parts = [f"{_capacity(tier)} of {_NAMES[name]}" for name, tier in row["tiers"].items()]
    sizes = " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
    largest = max(results, key=_whole)
    more = ""
    if _whole(largest) > _whole(row):
        more = f" ({percent(most)} is the most of all sizes tried)"
    best = "the best policy of that size would reach"
    if len(row["tiers"]) > 1:
        best = "the best policy with all of that in one tier, no page twice, would reach"
    return (
        f"With {sizes}, under {row['policy'].upper()}, the hit ratio is {percent(ratio)} of input "
        f"tokens{more}: prefill computes {row['prefill_speedup_ideal']:.3g} times fewer tokens "
        f"than without a cache; {best} "
        f"{percent(row['optimum']['cold'])}, and no size more than "
        f"{percent(trace['ceiling']['cold'])}."
    )


def _whole(row: dict[str, Any]) -> int:
    """Tokens in all tiers."""
    return sum(tier["capacity_tokens"] for tier in row["tiers"].values())


def setup_lines(trace: dict[str, Any], setup: dict[str, Any]) -> Iterator[str]:
    """What was replayed."""
    size = token_text(trace["working_set_tokens"])
    if trace["working_set_bytes"] is not None:
        size += f" ({size_text(trace['working_set_bytes'])})"
    yield (
        f"trace: {trace['format']}, {trace['requests']:,} requests of {trace['sessions']:,} "
        f"sessions in {trace['span_s'] / 3600:.3g} h, {token_text(trace['input_tokens'])} of input"
    )
    yield (
        f"blocks: {trace['blocks']:,} of {trace['block_tokens']} tokens, working set {size}; at "
        f"most {trace['sessions_live_peak']:,} sessions live at once, with "
        f"{token_text(trace['live_tokens_peak'])} of context by their last inputs, "
        f"{token_text(trace['live_largest_tokens_peak'])} by their largest"
    )
    ceiling = trace["ceiling"]
    names = ", ".join(f"{name} {percent(ceiling[name])}" for name in DEFINITIONS)
    yield f"ceiling (a cache that never evicts): {names}"
    yield (
        f"  of it blocks that a session had before {percent(trace['ceiling_same_session'])}, "
        f"others alone {percent(trace['ceiling_cross_session'])}; or by who used them last: "
        f"the same session {percent(trace['ceiling_last_used_by_same_session'])}, another "
        f"{percent(trace['ceiling_last_used_by_other_session'])}"
    )
    for ttl_s, ratio in trace["ceiling_with_ttl"].items():
        yield (
            f"  with a time to live of {ttl_s} s since the last use: cold {percent(ratio)} (a "
            "bound; no policy of the daemon drops pages by age)"
        )
    yield from (f"note: {note}" for note in trace["notes"])
    if setup["put_ttl_s"]:
        yield f"every put says that its pages are worth keeping for {setup['put_ttl_s']:g} s"
    if setup["token_bytes"]:
        yield f"model: {setup['model'] or 'given'}, {setup['token_bytes']:,} bytes of KV a token"


def percent(ratio: float) -> str:
    return f"{100 * ratio:.1f} %"


def token_text(tokens: int) -> str:
    """As 3.5Mtok."""
    for unit, factor in (("G", 10**9), ("M", 10**6), ("K", 10**3)):
        if tokens >= factor:
            return f"{tokens / factor:.4g}{unit}tok"
    return f"{tokens}tok"


def size_text(size: int) -> str:
    """As 1.5TB."""
    for unit, factor in (("PB", 10**15), ("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if size >= factor:
            return f"{size / factor:.4g}{unit}"
    return f"{size}B"


def _capacity(tier: dict[str, Any]) -> str:
    tokens = token_text(tier["capacity_tokens"])
    if tier["capacity_bytes"] is None:
        return tokens
    return f"{size_text(tier['capacity_bytes'])} ({tokens})"
