"""Draws docs/memory-needed.png: hit ratio over memory for recorded traces, with their optimum.

    KVTIER_TRACES=DIR python -m benchmarks.memory_needed docs/memory-needed.png

LRU is computed in one pass (kvtier/bench/lru_curve.py), which finds what the daemon's policy finds;
sizes are of Llama-3.1-8B's KV in bf16, 131,072 bytes a token. Prints the figures as it goes.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure

from kvtier.bench.bounds import Optimum, ceiling
from kvtier.bench.figures import ratios
from kvtier.bench.formats import read_trace
from kvtier.bench.lru_curve import lru_curve
from kvtier.bench.models import bytes_per_token

TRACES: Final = (
    ("coding agents", "claude_code_v6.jsonl.gz", "tab:blue"),
    ("chat", "mooncake_conversation.jsonl.gz", "tab:orange"),
    ("synthetic mix", "mooncake_synthetic.jsonl.gz", "tab:green"),
)
MODEL: Final = "llama-3.1-8b"
GIB: Final = 1 << 30
SIZES_GIB: Final = [2**power for power in range(4, 14)]
#: Of the ceiling: what is enough.
ENOUGH: Final = 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    figure = Figure(figsize=(8, 4.5), dpi=90, layout="constrained")
    axes = figure.add_subplot()
    for label, name, color in TRACES:
        _draw(axes, label, Path(os.environ["KVTIER_TRACES"]) / name, color)
    axes.set_xscale("log", base=2)
    axes.set_xticks(
        SIZES_GIB, [f"{size // 1024}T" if size >= 1024 else f"{size}G" for size in SIZES_GIB]
    )
    axes.set_ylim(0, 100)
    axes.set_xlabel(f"memory for KV, bytes (GiB, TiB) of {MODEL} in bf16")
    axes.set_ylabel("hit ratio, % of input tokens, cold")
    axes.set_title("solid: LRU, as the daemon's; dashed: optimum; ring: 90 % of the ceiling")
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small", loc="upper left")
    figure.savefig(arguments.out)


def _draw(axes: Any, label: str, path: Path, color: str) -> None:
    trace = read_trace(path)
    block_bytes = trace.block_tokens * bytes_per_token(MODEL)
    slots = [size * GIB // block_bytes for size in SIZES_GIB]
    most = 100 * ratios(trace, ceiling(trace)).cold
    lru = [100 * ratios(trace, hits).cold for hits in lru_curve(trace, slots)]
    optimum = Optimum(trace)
    best = [100 * ratios(trace, optimum.hits(size)).cold for size in slots]
    axes.plot(SIZES_GIB, lru, color=color, marker=".", label=f"{label} (ceiling {most:.1f} %)")
    axes.plot(SIZES_GIB, best, color=color, linestyle="--", linewidth=1)
    for size, ratio, bound in zip(SIZES_GIB, lru, best, strict=True):
        print(f"{label}: {size} GiB: LRU {ratio:.1f} %, optimum {bound:.1f} %")
    for size, ratio in zip(SIZES_GIB, lru, strict=True):
        if ratio >= ENOUGH * most:
            axes.plot([size], [ratio], "o", color=color, fillstyle="none", markersize=12)
            print(f"{label}: {size} GiB is 90 % of the ceiling of {most:.1f} %")
            break


if __name__ == "__main__":
    main()
