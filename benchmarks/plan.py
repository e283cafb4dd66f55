"""How much to measure, and the command line that every benchmark has for it.

Promise: rows that could not be measured are named with the reason, on stderr and in the JSON; a
benchmark that measured nothing ends with 2. One thread.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.machine import described, environment
from benchmarks.rows import Missing, Row, markdown

__all__ = [
    "Measured",
    "Plan",
    "finish",
    "fio_command",
    "parser_of",
    "positive",
    "progress",
    "wants",
    "wants_some",
]

T = TypeVar("T")
Measured = Row | Missing
_FIO_VARIABLE = "KVTIER_FIO"
_QUICK_ROUNDS = 2
_PASS_ROUNDS_MIN = 3  # of fewer, the median would be any of them


def wants(only: tuple[str, ...], name: str) -> bool:
    """Whether one of the prefixes takes the row of this name."""
    return not only or name.startswith(only)


def wants_some(only: tuple[str, ...], group: str) -> bool:
    """Whether one of the prefixes takes rows whose names begin with `group`."""
    return wants(only, group) or any(some.startswith(group) for some in only)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`quick` shows that a benchmark works; what it measures then is not worth quoting.
    `directory` is where files are made, on the device to measure.
    """

    quick: bool = False
    seed: int = 1
    only: tuple[str, ...] = ()
    directory: Path = Path()
    rounds_given: int | None = None
    #: How many processes share the rounds, of which this is one.
    passes: int = 1

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Plan:
        return cls(
            quick=arguments.quick,
            seed=arguments.seed,
            only=tuple(arguments.only or ()),
            directory=arguments.dir,
            rounds_given=arguments.rounds,
            passes=arguments.passes,
        )

    def sized(self, full: T, quick: T) -> T:
        return quick if self.quick else full

    def rounds(self, full: int) -> int:
        share = max(_PASS_ROUNDS_MIN, -(-full // self.passes))
        return self.rounds_given or self.sized(min(full, share), _QUICK_ROUNDS)

    def wants(self, name: str) -> bool:
        return wants(self.only, name)

    def wants_some(self, group: str) -> bool:
        return wants_some(self.only, group)


def parser_of(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="little of everything: does it work?")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=positive)
    parser.add_argument(
        "--passes", type=positive, default=1, help="how many runs like this share the rounds"
    )
    parser.add_argument("--only", nargs="+", metavar="PREFIX", help="rows whose names begin so")
    parser.add_argument(
        "--dir", type=Path, default=Path.cwd(), help="on the device to measure (default: here)"
    )
    parser.add_argument("--json", help="also write the rows to this file")
    return parser


def positive(text: str) -> int:
    """A number of an argument."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def finish(
    title: str, measure: Callable[[], Iterable[Measured]], arguments: argparse.Namespace
) -> int:
    """Measures, prints the table and writes the JSON, of what there is if an error ends it; the
    exit status.
    """
    facts = environment(arguments.seed)
    only = tuple(arguments.only or ())
    rows: list[Row] = []
    missing: list[Missing] = []
    try:
        for item in measure():
            if isinstance(item, Missing):
                progress(f"not measured: {item.name}: {item.reason}")
                missing.append(item)
            elif wants(only, item.name):
                rows.append(item)
    finally:
        if arguments.json:
            document = {
                "title": title,
                "environment": facts,
                "rows": [row.as_json() for row in rows],
                "not_measured": [item.as_json() for item in missing],
            }
            text = json.dumps(document, indent=1) + "\n"
            Path(arguments.json).write_text(text, encoding="utf-8")
    sys.stdout.write(f"\n## {title}\n\n{described(facts)}\n\n{markdown(rows, missing)}")
    return 0 if rows else 2


def progress(text: str) -> None:
    """stdout is for the tables."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def fio_command() -> str | None:
    """fio as KVTIER_FIO names it, or on the PATH. The variable is taken out of the environment: a
    daemon started later refuses to begin with a variable that is none of its settings.
    """
    return os.environ.pop(_FIO_VARIABLE, None) or shutil.which("fio")
