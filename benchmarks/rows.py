"""What one measurement says: a row with its reference, its spread and whether it reached a target.

Promise: a ratio is the median of the ratios of single rounds, in which both sides were measured in
turn; a value that is exactly the target reaches it. Pure functions and values; any thread.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["Bound", "Missing", "Of", "Reached", "Row", "Target", "markdown", "size_text"]


class Bound(enum.Enum):
    AT_LEAST = ">="
    AT_MOST = "<="


class Of(enum.Enum):
    VALUE = "value"
    RATIO = "ratio"


class Reached(enum.Enum):
    YES = "yes"
    NO = "no"
    NO_TARGET = "no target"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    bound: Bound
    number: float
    of: Of = Of.RATIO

    def is_reached(self, measured: float) -> bool:
        if self.bound is Bound.AT_LEAST:
            return measured >= self.number
        return measured <= self.number


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`low` and `high` are the lowest and highest round: of the ratio where there is one, else of
    the value. `reference_value` has the unit of `value`.
    """

    name: str
    what: str
    value: float
    unit: str
    reference: str = ""
    reference_value: float | None = None
    ratio: float | None = None
    target: Target | None = None
    rounds: int
    low: float
    high: float
    note: str = ""

    @classmethod
    def of_values(
        cls,
        name: str,
        what: str,
        values: Sequence[float],
        unit: str,
        *,
        target: Target | None = None,
        note: str = "",
    ) -> Row:
        """The median of the rounds, without a reference."""
        return cls(
            name=name,
            what=what,
            value=statistics.median(values),
            unit=unit,
            target=target,
            rounds=len(values),
            low=min(values),
            high=max(values),
            note=note,
        )

    @classmethod
    def of_pairs(
        cls,
        name: str,
        what: str,
        pairs: Sequence[tuple[float, float]],
        unit: str,
        reference: str,
        *,
        target: Target | None = None,
        note: str = "",
    ) -> Row:
        """A pair a round: what was measured, and the reference in the same round."""
        ratios = [ours / theirs for ours, theirs in pairs]
        return cls(
            name=name,
            what=what,
            value=statistics.median(ours for ours, _ in pairs),
            unit=unit,
            reference=reference,
            reference_value=statistics.median(theirs for _, theirs in pairs),
            ratio=statistics.median(ratios),
            target=target,
            rounds=len(pairs),
            low=min(ratios),
            high=max(ratios),
            note=note,
        )

    @classmethod
    def of_passes(cls, rows: Sequence[Row]) -> Row:
        """One row of those of the same name, which several processes have measured: the medians of
        their medians, and the range of all rounds. What a process happens to get (where its memory
        lies, what the machine does in its minute) is in all its rounds, so that more of them would
        not take it out of a median. A note is the last one's.
        """
        last = rows[-1]
        return replace(
            last,
            value=statistics.median(row.value for row in rows),
            reference_value=_median([row.reference_value for row in rows]),
            ratio=_median([row.ratio for row in rows]),
            rounds=sum(row.rounds for row in rows),
            low=min(row.low for row in rows),
            high=max(row.high for row in rows),
        )

    @property
    def reached(self) -> Reached:
        if self.target is None:
            return Reached.NO_TARGET
        measured = self.ratio if self.target.of is Of.RATIO else self.value
        if measured is None:
            raise ValueError(f"{self.name} has a target for its ratio and no ratio")
        return Reached.YES if self.target.is_reached(measured) else Reached.NO

    def as_json(self) -> dict[str, Any]:
        target = self.target
        return {
            "name": self.name,
            "what": self.what,
            "value": self.value,
            "unit": self.unit,
            "reference": self.reference,
            "reference_value": self.reference_value,
            "ratio": self.ratio,
            "target": None
            if target is None
            else {"bound": target.bound.value, "number": target.number, "of": target.of.value},
            "reached": self.reached.value,
            "rounds": self.rounds,
            "low": self.low,
            "high": self.high,
            "note": self.note,
        }

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> Row:
        """The inverse of `as_json`; whether the target was reached is judged anew."""
        given = {key: value for key, value in saved.items() if key != "reached"}
        if (target := given["target"]) is not None:
            given["target"] = Target(
                bound=Bound(target["bound"]), number=target["number"], of=Of(target["of"])
            )
        return cls(**given)


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """Rows that could not be measured, by their common prefix, and why."""

    name: str
    reason: str

    def as_json(self) -> dict[str, str]:
        return {"name": self.name, "reason": self.reason}


def size_text(nbytes: int) -> str:
    """ "368 KiB", "2 MiB"."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} bytes"


def _median(numbers: Sequence[float | None]) -> float | None:
    """Of those that there are."""
    found = [number for number in numbers if number is not None]
    return statistics.median(found) if found else None


_COLUMNS = (
    "name", "what", "value", "reference", "ratio", "low to high", "rounds", "to reach", "reached",
    "note",
)  # fmt: skip


def markdown(rows: Sequence[Row], missing: Sequence[Missing] = ()) -> str:
    """A table of the rows, then a line for everything that was not measured."""
    lines = [_line(_COLUMNS), _line(["---"] * len(_COLUMNS))]
    lines += [_line(_cells(row)) for row in rows]
    if missing:
        lines.append("")
        lines += [f"- not measured: {item.name}: {item.reason}" for item in missing]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def _cells(row: Row) -> list[str]:
    reference = row.reference
    if row.reference_value is not None:
        reference += f": {_text(row.reference_value)} {row.unit}"
    target = row.target
    goal = ""
    if target is not None:
        unit = " x" if target.of is Of.RATIO else f" {row.unit}"
        goal = f"{target.bound.value} {target.number:g}{unit}"
    return [
        row.name,
        row.what,
        f"{_text(row.value)} {row.unit}",
        reference,
        "" if row.ratio is None else f"{row.ratio:.2f}",
        f"{_text(row.low)} to {_text(row.high)}",
        str(row.rounds),
        goal,
        row.reached.value,
        row.note,
    ]


def _text(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
