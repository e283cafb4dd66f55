"""Whether two runs agree: the ratios of the same rows, which may differ by 15 %.

Absolute numbers of two runs differ with whatever else the machine does; a ratio was measured in
turn within a run. One thread.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.rows import Row

__all__ = ["DIFFERENCE_MAX", "compare", "is_apart"]

#: The larger ratio over the smaller one, less one.
DIFFERENCE_MAX = 0.15
#: Two sizes of 15 % that differ in the last bit are 15 %.
_ROUNDING = 1e-9


def is_apart(one: float, other: float) -> bool:
    low, high = sorted((abs(one), abs(other)))
    return high > low * (1 + DIFFERENCE_MAX + _ROUNDING)


def compare(first: Path, second: Path) -> int:
    """Prints the rows that are apart, and those that one run alone has; the exit status."""
    for path in (first, second):
        if not path.is_file():
            sys.stderr.write(f"{path} is no file: name two results.json of runs\n")
            return 2
    one, other = _ratios(first), _ratios(second)
    both = [name for name in one if name in other]
    apart = [name for name in both if is_apart(one[name], other[name])]
    for name in apart:
        by = max(one[name], other[name]) / min(one[name], other[name]) - 1
        sys.stdout.write(f"{name}: ratio {one[name]:.3f} and {other[name]:.3f}, {by:.0%} apart\n")
    for names, path in ((one, first), (other, second)):
        alone = [name for name in names if name not in both]
        if alone:
            sys.stdout.write(f"only in {path}: {', '.join(alone)}\n")
    if not both:
        sys.stdout.write("the runs have no ratio in common: nothing was compared\n")
        return 1
    sys.stdout.write(f"{len(both) - len(apart)} of {len(both)} ratios agree within 15 %\n")
    return 1 if apart else 0


def _ratios(path: Path) -> dict[str, float]:
    saved = json.loads(path.read_text(encoding="utf-8"))
    rows = [Row.from_json(row) for row in saved["rows"]]
    return {row.name: row.ratio for row in rows if row.ratio is not None}
