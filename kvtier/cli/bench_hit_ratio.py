"""Runs `kvtier bench hit-ratio`: reads the trace, replays it as asked, prints what came of it."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from kvtier.bench.arrivals import Arrivals
from kvtier.bench.capacity import Sizes, parse_amount, parse_tiers
from kvtier.bench.errors import BenchInput
from kvtier.bench.figures import Basis, result, summary
from kvtier.bench.formats import ReadOptions, read_trace
from kvtier.bench.models import KvDtype, bytes_per_token
from kvtier.bench.plot import check_name, draw
from kvtier.bench.replay import ReplayPlan, SimTier, WritePolicy, replay
from kvtier.bench.report import (
    SHARED,
    csv_text,
    document,
    percent,
    sentence,
    setup_lines,
    size_text,
    token_text,
)
from kvtier.bench.trace import Trace
from kvtier.cli.progress_bar import ProgressBar
from kvtier.cli.table import table
from kvtier.core.policy import POLICIES

__all__ = ["run"]

_TRACES: Final = "KVTIER_TRACES"
#: Of the working set, when no size is given.
_LADDER_PERCENT: Final = (1, 2, 5, 10, 20, 40, 70, 100)


def run(arguments: argparse.Namespace) -> int:
    """The exit code. Raises TraceError and BenchInput."""
    if arguments.plot is not None:
        check_name(arguments.plot)
    policies = _names(arguments.policy, POLICIES, "policy")
    writes = [WritePolicy(name) for name in _names(arguments.write, WritePolicy, "write")]
    token_bytes = _token_bytes(arguments)
    trace = _read(arguments)
    sizes = Sizes(trace, token_bytes)
    chosen = _tiers(arguments, sizes)
    basis = Basis(trace)
    results = []
    for slots in chosen:
        for write in writes if SimTier.NVME in slots else [WritePolicy.BACK]:
            for policy in policies:
                plan = ReplayPlan(
                    slots=slots, policy=policy, write=write, told=not arguments.untold
                )
                bar = ProgressBar(f"{policy}", trace.requests, unit="requests")
                results.append(result(basis, sizes, replay(trace, plan, bar.at)))
                bar.end()
    setup = {
        "model": arguments.model,
        "kv_dtype": arguments.kv_dtype,
        "token_bytes": token_bytes,
        "engine_hits_told": not arguments.untold,
    }
    report = document(summary(basis, sizes), setup, results)
    _write(arguments, report)
    return 0


def _names(text: str, known: Any, what: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    wrong = [name for name in names if name not in list(known)]
    if wrong or not names:
        raise BenchInput(
            f"{what} {(wrong or [text])[0]!r} is not known",
            remedy=f"one or more, with commas, of {', '.join(known)}",
        )
    return names


def _token_bytes(arguments: argparse.Namespace) -> int | None:
    given: int | None = arguments.bytes_per_token
    if given is not None:
        if given < 1 or arguments.model:
            what = "stands beside --model" if arguments.model else f"is {given}"
            raise BenchInput(f"--bytes-per-token {what}", remedy="give one of the two, from 1")
        return given
    return (
        bytes_per_token(arguments.model, KvDtype(arguments.kv_dtype)) if arguments.model else None
    )


def _read(arguments: argparse.Namespace) -> Trace:
    path = _find(arguments.trace)
    size = path.stat().st_size if path.is_file() else 1
    bar = ProgressBar(f"reading {path.name}", size, unit="bytes")
    options = ReadOptions(
        block_tokens=arguments.block_tokens,
        arrivals=Arrivals(
            hours=arguments.start_hours, gap_max_s=arguments.gap_max, seed=arguments.seed
        ),
        progress=bar.at,
    )
    try:
        return read_trace(path, options)
    finally:
        bar.end()


def _find(path: Path) -> Path:
    folder = os.environ.get(_TRACES)
    if folder and not path.exists() and not path.is_absolute():
        beside = Path(folder) / path
        if beside.exists():
            return beside
    return path


def _tiers(arguments: argparse.Namespace, sizes: Sizes) -> list[dict[SimTier, int]]:
    chosen = [parse_tiers(text, sizes) for text in arguments.tiers]
    amounts = [part for part in arguments.capacities.split(",") if part.strip()]
    chosen += [{SimTier.HOST: parse_amount(part.strip(), sizes)} for part in amounts]
    if not chosen:
        chosen = [{SimTier.HOST: parse_amount(f"{part}%", sizes)} for part in _LADDER_PERCENT]
    return chosen


def _write(arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    if arguments.csv is not None:
        arguments.csv.write_text(csv_text(report["results"]), encoding="utf-8")
    if arguments.plot is not None:
        draw(arguments.plot, report)
    print(json.dumps(report, indent=2) if arguments.json else "\n".join(_lines(report)))


def _lines(report: dict[str, Any]) -> Iterator[str]:
    trace, results = report["trace"], report["results"]
    yield from setup_lines(trace, report["setup"])
    yield ""
    header = ("policy", "write", "tier", "size", "hit", "2nd half", "mean", "same", "other",
              "1/(1-h)", "optimum", "read", "written")  # fmt: skip
    rows: list[tuple[str, ...]] = []
    for row in results:
        rows.extend(_rows(row))
    yield from table(header, rows)
    yield ""
    yield "hit, same (session), other (sessions), optimum: % of input tokens, cold start;"
    yield "2nd half: over the second half of the requests; mean: of each request's own ratio"
    yield SHARED
    yield ""
    yield sentence(trace, results[-1])


def _rows(row: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    tiers = row["tiers"]
    write = row["write"] if "nvme" in tiers else "-"
    ratios = row["hit_ratio"]
    whole = (
        *(percent(ratios[name]) for name in ("cold", "second_half", "request_mean")),
        percent(row["same_session"]),
        percent(row["cross_session"]),
        f"{row['prefill_speedup_ideal']:.3g}",
        percent(row["optimum"]["cold"]),
    )
    for name, tier in tiers.items():
        own = whole if len(tiers) == 1 else (percent(tier["hit_ratio"]), *[""] * 6)
        yield (row["policy"], write, name, _size(tier), *own, *_moved(tier))
    if len(tiers) > 1:
        yield (row["policy"], write, "all", "", *whole, "", "")


def _size(tier: dict[str, Any]) -> str:
    tokens = token_text(tier["capacity_tokens"])
    size = tier["capacity_bytes"]
    return tokens if size is None else f"{size_text(size)} = {tokens}"


def _moved(tier: dict[str, Any]) -> tuple[str, str]:
    if tier["read_bytes"] is None:
        return token_text(tier["read_tokens"]), token_text(tier["written_tokens"])
    return size_text(tier["read_bytes"]), size_text(tier["written_bytes"])
