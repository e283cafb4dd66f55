"""`kvtier bench compare A.json B.json`: what changed between two results, in points.

Exit code 0: done; 2: a file that is no result of this version.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from typing import Any, Final

from kvtier.bench.compare import Comparison, Pair, compare, load_result
from kvtier.bench.report import percent
from kvtier.cli.table import table

__all__ = ["run"]

#: Longer values of what differs are cut.
_VALUE_MAX: Final = 60
#: Of points, what two decimals show.
_SHOWN_MIN: Final = 0.01


def run(arguments: argparse.Namespace) -> int:
    """The exit code. Raises BenchInput."""
    found = compare(load_result(arguments.a), load_result(arguments.b))
    if arguments.json:
        print(json.dumps(_document(arguments, found), indent=2))
    else:
        print("\n".join(_lines(found)))
    return 0


def _document(arguments: argparse.Namespace, found: Comparison) -> dict[str, Any]:
    return {
        "kvtier_bench": "compare",
        "format": 1,
        "a": str(arguments.a),
        "b": str(arguments.b),
        "differs": [{"what": what, "a": a, "b": b} for what, a, b in found.differs],
        "rows": [
            {"a": pair.name_a, "b": pair.name_b, "ratios_a": pair.a, "ratios_b": pair.b,
             "points": pair.points}
            for pair in found.pairs
        ],
        "only_a": found.only_a,
        "only_b": found.only_b,
    }  # fmt: skip


def _lines(found: Comparison) -> Iterator[str]:
    for what, a, b in found.differs:
        yield f"not the same: {what}: {_short(a)} | {_short(b)}"
    if found.pairs:
        names = list(dict.fromkeys(name for pair in found.pairs for name in pair.points))
        header = ("row", "A", "B", *(name.replace("_", " ") for name in names))
        yield from table(header, [_cells(pair, names) for pair in found.pairs])
        yield "A, B: hit ratio, cold; all others: points of B above A"
    for which, rows in (("A", found.only_a), ("B", found.only_b)):
        yield from (f"only in {which}: {row}" for row in rows)
    yield ""
    yield _sentence(found)


def _cells(pair: Pair, names: list[str]) -> list[str]:
    points = pair.points
    changes = [f"{points[name]:+.2f}" if name in points else "" for name in names]
    return [pair.name, percent(pair.a["cold"]), percent(pair.b["cold"]), *changes]


def _sentence(found: Comparison) -> str:
    if not found.pairs:
        return "No row of one is in the other."
    changes = [(pair.points["cold"], pair.name) for pair in found.pairs]
    most, name = max(changes, key=lambda one: abs(one[0]))
    if not most:
        return _same_cold(found)
    word = "more" if most > 0 else "less"
    mean = math.fsum(change for change, _ in changes) / len(changes)
    return (
        f"B finds {_points(abs(most))} points {word} than A where they differ most ({name}), and "
        f"{mean:+.2f} points in the mean of {len(changes)} rows."
    )


def _same_cold(found: Comparison) -> str:
    """Of rows whose ratios from an empty cache are the same."""
    rows = f"All {len(found.pairs)} rows have the same hit ratio"
    others = [
        (abs(points), name, pair.name)
        for pair in found.pairs
        for name, points in pair.points.items()
    ]
    most, ratio, name = max(others)
    if not most:
        return f"{rows}, and the same of every other ratio."
    ratio = ratio.replace("_", " ")
    return f"{rows}, but not all other ratios: {ratio} differs by {_points(most)} points ({name})."


def _points(points: float) -> str:
    """None of which reads as nothing."""
    return f"{points:.2f}" if points >= _SHOWN_MIN else f"{points:.2g}"


def _short(text: str) -> str:
    return text if len(text) <= _VALUE_MAX else text[: _VALUE_MAX - 3] + "..."
