"""Every measurement in one run, one after the other: a table, JSON and a picture.

    python -m benchmarks.bench [--quick] [--only PREFIX ...] [--passes N] [--out DIR] [--seed N]
    python -m benchmarks.bench --compare A.json B.json

The table goes to stdout, what is being done to stderr; `results.json`, `results.md` and, where
matplotlib is installed, `results.png` into the folder of `--out`. Each benchmark is a process of
its own, so that none finds the memory or the allocator of another; never two at once. All of them
are gone through in several passes, each with its share of the rounds: a row is the median of those
of its passes, minutes apart and in processes of their own.

What could not be measured is named with the reason. The exit status is 1 if a benchmark failed: a
target that was not reached is no failure of the measurement. `--compare` prints the rows whose
ratios differ by more than 15 % between two runs, and ends with 1 if there are any.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from benchmarks.compare import compare
from benchmarks.machine import described, environment
from benchmarks.picture import draw
from benchmarks.plan import fio_command, positive, progress, wants_some
from benchmarks.rows import Missing, Row, markdown

__all__ = ["GROUPS", "Group", "main"]

OUT = Path("build/bench")
GROUP_S_MAX = 3600.0
PASSES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A benchmark, and how the names of its rows begin."""

    name: str
    module: str


GROUPS = tuple(
    Group(name=name, module=f"benchmarks.{module}")
    for name, module in (
        ("machine", "memory"),
        ("local/get", "local"),
        ("local/put", "local_put"),
        ("sglang", "sglang_calls"),
        ("grpc", "grpc_stream"),
        ("nvme", "nvme_io"),
        ("fp8", "fp8"),
        ("device", "tag_check"),
        ("lookup", "lookup"),
        ("service", "nvme_service"),
        ("million", "million_pages"),
        ("peers", "peers.beside"),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    rows: list[Row]
    missing: list[Missing]
    is_failed: bool


class Found:
    """What the passes have measured so far."""

    def __init__(self) -> None:
        self._rows: dict[str, list[Row]] = {}
        self._missing: dict[Missing, None] = {}
        self.is_failed = False

    def add(self, outcome: Outcome) -> None:
        for row in outcome.rows:
            self._rows.setdefault(row.name, []).append(row)
        self._missing |= dict.fromkeys(outcome.missing)
        self.is_failed = self.is_failed or outcome.is_failed

    def rows(self) -> list[Row]:
        """A row of each name, in the order in which they came first."""
        return [Row.of_passes(rows) for rows in self._rows.values()]

    def missing(self) -> list[Missing]:
        """Each once, however many passes were without it."""
        return list(self._missing)

    def as_json(self) -> dict[str, object]:
        return {
            "rows": [row.as_json() for row in self.rows()],
            "not_measured": [item.as_json() for item in self.missing()],
        }


def run(group: Group, words: Sequence[str]) -> Outcome:
    """One benchmark as a process; what it measured, even if it failed later."""
    with tempfile.TemporaryDirectory(prefix="kvt-") as home:
        found = Path(home) / "rows.json"
        command = [sys.executable, "-m", group.module, *words, "--json", str(found)]
        status, last = _watched(command)
        saved = json.loads(found.read_text(encoding="utf-8")) if found.exists() else {}
    rows = [Row.from_json(row) for row in saved.get("rows", ())]
    missing = [Missing(**item) for item in saved.get("not_measured", ())]
    is_failed = status not in (0, 2) or not saved
    if is_failed:
        reason = f"{group.module} ended with {status}: {last or 'it said nothing'}"
        missing.append(Missing(name=group.name, reason=reason))
    return Outcome(rows=rows, missing=missing, is_failed=is_failed)


def _watched(command: Sequence[str]) -> tuple[int, str]:
    """The exit status, and the last line of stderr, which is passed on meanwhile."""
    # One thread is what is measured.
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    last = ""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environ
    ) as process:
        assert process.stderr is not None
        limit = threading.Timer(GROUP_S_MAX, process.kill)
        limit.start()
        try:
            for line in process.stderr:
                sys.stderr.write(line)
                sys.stderr.flush()
                last = line.strip() or last
            return process.wait(), last
        finally:
            limit.cancel()


def words_for(group: Group, arguments: argparse.Namespace, fio: str | None) -> list[str]:
    words = ["--seed", str(arguments.seed), "--dir", str(arguments.dir)]
    words += ["--passes", str(_passes(arguments))]
    if arguments.quick:
        words.append("--quick")
    if arguments.only:
        words += ["--only", *arguments.only]
    if group.name == "nvme" and fio is not None:
        words += ["--fio", fio]
    return words


def save_numbers(out: Path, document: dict[str, object]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def save_text(out: Path, text: str, rows: Sequence[Row]) -> None:
    (out / "results.md").write_text(text, encoding="utf-8")
    progress(f"{out / 'results.json'}, {out / 'results.md'}")
    progress(draw(rows, out / "results.png"))


def measure(arguments: argparse.Namespace) -> int:
    facts = environment(arguments.seed) | {"quick": arguments.quick}
    fio = fio_command()
    only = tuple(arguments.only or ())
    groups = [group for group in GROUPS if wants_some(only, group.name)]
    if not groups:
        names = ", ".join(group.name for group in GROUPS)
        progress(f"no row begins with {' or '.join(only)}; they begin with {names}")
        return 2
    passes = _passes(arguments)
    found = Found()
    for number, (turn, group) in enumerate(product(range(passes), groups), 1):
        progress(f"[{number}/{passes * len(groups)}] {group.module}, pass {turn + 1} of {passes}")
        found.add(run(group, words_for(group, arguments, fio)))
        # After each: a run that is cut short has measured something, too.
        save_numbers(arguments.out, facts | {"passes": passes} | found.as_json())
    rows, missing = found.rows(), found.missing()
    quick = "A quick run: it shows that the measurements work, not what they measure.\n\n"
    text = f"{described(facts)}\n\n{quick if arguments.quick else ''}{markdown(rows, missing)}"
    sys.stdout.write(text)
    save_text(arguments.out, text, rows)
    return 1 if found.is_failed else 0


def _passes(arguments: argparse.Namespace) -> int:
    return 1 if arguments.quick else int(arguments.passes)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="little of everything: does it work?")
    parser.add_argument("--only", nargs="+", metavar="PREFIX", help="rows whose names begin so")
    parser.add_argument(
        "--passes", type=positive, default=PASSES, help=f"default {PASSES}; --quick is one"
    )
    parser.add_argument("--out", type=Path, default=OUT, help=f"default {OUT}")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="on the device to measure")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A.json", "B.json"))
    arguments = parser.parse_args(words)
    if arguments.compare:
        return compare(*arguments.compare)
    return measure(arguments)


if __name__ == "__main__":
    sys.exit(main())
