"""Hit ratio over capacity as a picture, for each policy, with optimum and ceiling.

matplotlib is an optional extra: without it `draw` raises MissingExtra. One thread.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, Final

from kvtier.bench.errors import BenchInput
from kvtier.bench.report import token_text
from kvtier.errors import MissingExtra

__all__ = ["FORMATS", "check_name", "draw"]

FORMATS: Final = (".png", ".svg")


def check_name(path: Path) -> None:
    """Raises BenchInput for a name that says no known format, and MissingExtra without
    matplotlib: before the minutes of a replay, not after."""
    if path.suffix.lower() not in FORMATS:
        raise BenchInput(
            f"plot: {path.name!r} ends in none of {', '.join(FORMATS)}",
            remedy="name a file as out.png or out.svg",
        )
    _matplotlib()


def draw(path: Path, document: dict[str, Any]) -> None:
    """Writes the picture of a bench's document."""
    figure_class = _matplotlib()
    figure = figure_class(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    best: dict[float, float] = {}
    for row in document["results"]:
        capacity = sum(tier["capacity_tokens"] for tier in row["tiers"].values()) / 1e6
        tiers = "+".join(row["tiers"])
        label = f"{row['policy']} ({tiers}, {row['write']})" if "nvme" in row["tiers"] else ""
        lines[label or f"{row['policy']} ({tiers})"].append((capacity, row["hit_ratio"]["cold"]))
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
    axes.legend()
    figure.savefig(path)


def _matplotlib() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra(
            "plot: matplotlib is not installed", remedy="pip install 'kvtier[bench]'"
        ) from error
    return Figure
