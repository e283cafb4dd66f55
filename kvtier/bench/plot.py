"""A bench's document as pictures: hit ratio over capacity for each policy, with optimum and
ceiling; by tier; and over time.

matplotlib is an optional extra: without it `draw` raises MissingExtra. One thread.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvtier.bench.errors import BenchInput
from kvtier.bench.page import html_page
from kvtier.bench.report import token_text
from kvtier.errors import MissingExtra

__all__ = ["FORMATS", "check_name", "draw"]

FORMATS: Final = (".png", ".svg", ".html")
#: Rows with a line over time, and with a bar by tier: of more nobody could read any.
_LINES_MAX: Final = 10
_BARS_MAX: Final = 24
_TIER_COLORS: Final = {"gpu": "#54a24b", "host": "#4c78a8", "nvme": "#f58518"}


def check_name(path: Path) -> None:
    """Raises BenchInput for a name that says no known format, and MissingExtra without
    matplotlib: before the minutes of a replay, not after."""
    if path.suffix.lower() not in FORMATS:
        raise BenchInput(
            f"plot: {path.name!r} ends in none of {', '.join(FORMATS)}",
            remedy="name a file as out.png, out.svg or out.html",
        )
    _matplotlib()


def draw(path: Path, document: dict[str, Any], lines: Sequence[str] = ()) -> None:
    """Writes the pictures of a bench's document; an HTML page has `lines` of text below them, and
    needs nothing but itself."""
    figure = _matplotlib()(figsize=(8, 13), dpi=100, layout="constrained")
    axes = figure.subplots(3, 1)
    _over_capacity(axes[0], document)
    _by_tier(axes[1], document["results"][:_BARS_MAX])
    _over_time(axes[2], document["results"][:_LINES_MAX])
    if path.suffix.lower() != ".html":
        figure.savefig(path)
        return
    svg = io.StringIO()
    figure.savefig(svg, format="svg", metadata={"Date": None})
    path.write_text(html_page(svg.getvalue(), document, lines), encoding="utf-8")


def _over_capacity(axes: Any, document: dict[str, Any]) -> None:
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    best: dict[float, float] = {}
    for row in document["results"]:
        capacity = sum(tier["capacity_tokens"] for tier in row["tiers"].values()) / 1e6
        lines[_policy(row)].append((capacity, row["hit_ratio"]["cold"]))
        best[capacity] = row["optimum"]["cold"]
    for label, points in lines.items():
        xs, ys = zip(*sorted(points), strict=True)
        axes.plot(xs, [100 * y for y in ys], marker="o", label=label)
    xs, ys = zip(*sorted(best.items()), strict=True)
    axes.plot(
        xs, [100 * y for y in ys], "k--", marker=".", label="optimum (knows the future, one tier)"
    )
    ceiling = 100 * document["trace"]["ceiling"]["cold"]
    axes.axhline(ceiling, color="gray", linestyle=":", label=f"ceiling {ceiling:.1f} %")
    if len(best) > 1 and min(best) > 0:
        axes.set_xscale("log")
    axes.set_ylim(0, max(1, min(100, ceiling * 1.15)))
    axes.set_xlabel("capacity of all tiers, million tokens")
    axes.set_ylabel("hit ratio, % of input tokens, cold")
    trace = document["trace"]
    axes.set_title(
        f"{trace['format']}: {trace['requests']:,} requests, "
        f"working set {token_text(trace['working_set_tokens'])}"
    )
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")


def _by_tier(axes: Any, results: Sequence[dict[str, Any]]) -> None:
    """A bar a row: what comes from each tier."""
    names = [f"{_policy(row)}\n{_sizes(row)}" for row in results]
    for at, row in enumerate(results):
        start = 0.0
        for name, tier in row["tiers"].items():
            share = 100 * tier["hit_ratio"]
            axes.barh(at, share, left=start, color=_TIER_COLORS[name], height=0.7)
            start += share
    used = {name for row in results for name in row["tiers"]}
    for name, color in _TIER_COLORS.items():
        if name in used:
            axes.barh(0, 0, color=color, label=name)
    axes.set_yticks(range(len(names)), names, fontsize="x-small")
    axes.invert_yaxis()
    axes.set_xlabel("hit ratio by tier, % of input tokens, cold")
    axes.grid(visible=True, axis="x", alpha=0.3)
    axes.legend(fontsize="small", loc="lower right")


def _over_time(axes: Any, results: Sequence[dict[str, Any]]) -> None:
    """A line a row: the hit ratio of the requests that arrive in each window."""
    for row in results:
        hours = [second / 3600 for second in row["windows"]["seconds"]]
        ratios = [None if one is None else 100 * one for one in row["windows"]["hit_ratio"]]
        points = [(x, y) for x, y in zip(hours, ratios, strict=True) if y is not None]
        axes.plot(*zip(*points, strict=True), label=_label(row), linewidth=1.2)
    axes.set_ylim(0, 100)
    axes.set_xlabel("hours since the first request")
    axes.set_ylabel("hit ratio of that time, %")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="x-small")


def _policy(row: dict[str, Any]) -> str:
    """A line of the first picture."""
    tiers = "+".join(row["tiers"])
    write = f", {row['write']}" if "nvme" in row["tiers"] else ""
    return f"{row['policy']} ({tiers}{write})"


def _label(row: dict[str, Any]) -> str:
    return f"{_policy(row)} {_sizes(row)}"


def _sizes(row: dict[str, Any]) -> str:
    return " + ".join(token_text(tier["capacity_tokens"]) for tier in row["tiers"].values())


def _matplotlib() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra(
            "plot: matplotlib is not installed", remedy="pip install 'kvtier[bench]'"
        ) from error
    return Figure
