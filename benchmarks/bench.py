"""The measurements in one run, one after the other: a table, JSON and a picture.

    python -m benchmarks.bench [--engine] [--quick] [--only PREFIX ...] [--passes N] [--out DIR]
    python -m benchmarks.bench --compare A.json B.json

Of the page service, on one thread; with `--engine` of what is above it: the bundled engine, with
torch's own number of threads (OMP_NUM_THREADS), and SGLang's first token. `--only` names rows of
either.

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
import enum
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

__all__ = ["GROUPS", "Group", "Kind", "chosen", "main"]

OUT = Path("build/bench")
GROUP_S_MAX = 3600.0
PASSES = 3


class Kind(enum.Enum):
    PAGES = "pages"
    ENGINES = "engines"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A benchmark, what it is of, and how the names of its rows begin."""

    kind: Kind
    module: str
    rows: tuple[str, ...]

    def is_wanted(self, only: tuple[str, ...]) -> bool:
        return any(wants_some(only, name) for name in self.rows)


def _group(kind: Kind, module: str, *rows: str) -> Group:
    return Group(kind=kind, module=f"benchmarks.{module}", rows=rows)


GROUPS = (
    _group(Kind.PAGES, "memory", "machine/"),
    _group(Kind.PAGES, "local", "local/get-"),
    _group(Kind.PAGES, "local_put", "local/put-"),
    _group(Kind.PAGES, "sglang_calls", "sglang/"),
    _group(Kind.PAGES, "grpc_stream", "grpc/"),
    _group(Kind.PAGES, "nvme_io", "nvme/"),
    _group(Kind.PAGES, "fp8", "fp8/"),
    _group(Kind.PAGES, "tag_check", "device/"),
    _group(Kind.PAGES, "lookup", "lookup/"),
    _group(Kind.PAGES, "nvme_service", "service/"),
    _group(Kind.PAGES, "million_pages", "million/"),
    _group(Kind.PAGES, "peers.beside", "peers/mooncake-", "peers/lmcache-"),
    _group(Kind.ENGINES, "engine_decode", "decode/"),
    _group(Kind.ENGINES, "peers.vllm_beside", "peers/vllm-"),
    _group(Kind.ENGINES, "engine_profile", "profile/"),
    _group(Kind.ENGINES, "engine_prefix", "ttft/", "start/"),
    _group(Kind.ENGINES, "engine_kv", "kv/"),
    _group(Kind.ENGINES, "tag_step", "tags/"),
    _group(Kind.ENGINES, "sglang_ttft", "sglang-ttft/"),
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
        status, last = _watched(command, group.kind)
        saved = json.loads(found.read_text(encoding="utf-8")) if found.exists() else {}
    rows = [Row.from_json(row) for row in saved.get("rows", ())]
    missing = [Missing(**item) for item in saved.get("not_measured", ())]
    is_failed = status not in (0, 2) or not saved
    if is_failed:
        reason = f"{group.module} ended with {status}: {last or 'it said nothing'}"
        missing.append(Missing(name=" ".join(group.rows), reason=reason))
    return Outcome(rows=rows, missing=missing, is_failed=is_failed)


def _watched(command: Sequence[str], kind: Kind) -> tuple[int, str]:
    """The exit status, and the last line of stderr, which is passed on meanwhile."""
    environ = dict(os.environ)
    if kind is Kind.PAGES:  # one thread is what is measured
        environ["OMP_NUM_THREADS"] = "1"
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
    if group.module == "benchmarks.nvme_io" and fio is not None:
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
    groups = chosen(only, Kind.ENGINES if arguments.engine else Kind.PAGES)
    if not groups:
        names = ", ".join(name for group in GROUPS for name in group.rows)
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


def chosen(only: tuple[str, ...], kind: Kind) -> list[Group]:
    """Those that have rows which are named, or all of one kind where none is."""
    return [group for group in GROUPS if group.is_wanted(only) and (only or group.kind is kind)]


def _passes(arguments: argparse.Namespace) -> int:
    return 1 if arguments.quick else int(arguments.passes)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", action="store_true", help="what is above the page service")
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
