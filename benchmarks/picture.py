"""The ratios of a run as a picture, where matplotlib is installed. One thread."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.rows import Of, Reached, Row

__all__ = ["draw"]

_COLORS = {Reached.YES: "tab:green", Reached.NO: "tab:red", Reached.NO_TARGET: "tab:gray"}


def draw(rows: Sequence[Row], path: Path) -> str:
    """Writes the picture; says that it did, or why not."""
    shown = [row for row in rows if row.ratio is not None]
    if not shown:
        return "no picture: no row has a ratio"
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError:
        return "no picture: matplotlib is not installed (pip install 'kvtier[bench]')"
    figure, axes = plt.subplots(figsize=(9, 1 + 0.3 * len(shown)), layout="constrained")
    for place, row in enumerate(reversed(shown)):
        color = _COLORS[row.reached]
        axes.plot([row.low, row.high], [place, place], color=color, alpha=0.5, linewidth=2)
        axes.plot([row.ratio], [place], "o", color=color)
        if row.target is not None and row.target.of is Of.RATIO:
            axes.plot([row.target.number], [place], "|", color="black", markersize=12)
    axes.set_yticks(range(len(shown)), [row.name for row in reversed(shown)])
    axes.set_xscale("log")
    axes.set_xlabel("ratio to the reference: median, lowest to highest round; | is the target")
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return str(path)
