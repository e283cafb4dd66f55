"""Runs `kvtier bench hit-ratio`: reads the trace, replays it as asked, prints what came of it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from kvtier.bench.arrivals import Arrivals
from kvtier.bench.capacity import Sizes, parse_amount, parse_tiers
from kvtier.bench.figures import Basis, result, summary
from kvtier.bench.formats import ReadOptions, read_trace
from kvtier.bench.lru_curve import one_pass
from kvtier.bench.plot import draw
from kvtier.bench.replay import Replay, ReplayPlan, SimTier, WritePolicy, replay
from kvtier.bench.report import (
    OPTIMUM,
    csv_text,
    document,
    percent,
    sentence,
    setup_lines,
    size_text,
    token_text,
)
from kvtier.bench.routing import Fleet, route
from kvtier.bench.routing_report import SERVICE, routed, routing_rows, routing_sentence
from kvtier.bench.textbook import TEXTBOOK, textbook_replay
from kvtier.bench.trace import Trace
from kvtier.cli.bench_options import Options, check_arrivals, check_tiers, given_arrivals
from kvtier.cli.progress_bar import ProgressBar
from kvtier.cli.table import table
from kvtier.config import process_environment

__all__ = ["run"]

_WRITES: Final = {SimTier.HOST, SimTier.NVME}
_TRACES: Final = "KVTIER_TRACES"
#: Of the working set, when no size is given.
_LADDER_PERCENT: Final = (1, 2, 5, 10, 20, 40, 70, 100)


def run(arguments: argparse.Namespace) -> int:
    """The exit code. Raises TraceError and BenchInput."""
    options = Options.of(arguments)
    sizes = Sizes(_read(arguments), options.token_bytes)
    chosen = _tiers(arguments, sizes)
    check_tiers(arguments, options, chosen)
    basis = Basis(sizes.trace)
    setup = {
        "model": arguments.model,
        "kv_dtype": (arguments.kv_dtype or "bf16") if arguments.model else None,
        "token_bytes": options.token_bytes,
        "engine_hits_told": not arguments.untold,
        "one_pass": arguments.one_pass,
    }
    if arguments.replicas is not None:
        shared = 0 if arguments.shared is None else parse_amount(arguments.shared, sizes)
        fleets = [
            Fleet(
                router=router,
                replicas=arguments.replicas,
                local=slots[SimTier.GPU],
                shared=shared,
                policy=policy,
                adoption=options.adoption,
                rate=options.rate,
            )
            for slots in chosen
            for policy in options.policies
            for router in options.routers
        ]
        routings = [_route(basis, fleet) for fleet in fleets]
        report = document(summary(basis, sizes), setup, routings)
        _print(arguments, report, _routing_lines(report))
        return 0
    plans = [
        ReplayPlan(slots=slots, policy=policy, write=write, told=not arguments.untold)
        for slots in chosen
        for write in (options.writes if slots.keys() >= _WRITES else [WritePolicy.BACK])
        for policy in options.policies
    ]
    done = one_pass(sizes.trace, plans) if arguments.one_pass else _replay(sizes.trace, plans)
    results = [result(basis, sizes, found) for found in done]
    report = document(summary(basis, sizes), setup, results)
    if arguments.csv is not None:
        arguments.csv.write_text(csv_text(results), encoding="utf-8")
    if arguments.plot is not None:
        draw(arguments.plot, report)
    _print(arguments, report, _lines(report))
    return 0


def _replay(trace: Trace, plans: list[ReplayPlan]) -> Iterator[Replay]:
    for plan in plans:
        bar = ProgressBar(plan.policy, trace.requests, unit="requests")
        play = textbook_replay if plan.policy in TEXTBOOK else replay
        try:
            yield play(trace, plan, bar.at)
        finally:
            bar.end()


def _print(arguments: argparse.Namespace, report: dict[str, Any], lines: Iterator[str]) -> None:
    print(json.dumps(report, indent=2) if arguments.json else "\n".join(lines))


def _route(basis: Basis, fleet: Fleet) -> dict[str, Any]:
    bar = ProgressBar(fleet.router.value, basis.trace.requests, unit="requests")
    try:
        return routed(basis, route(basis.trace, fleet, bar.at))
    finally:
        bar.end()


def _routing_lines(report: dict[str, Any]) -> Iterator[str]:
    results = report["results"]
    yield from setup_lines(report["trace"], report["setup"])
    yield ""
    yield from table(*routing_rows(results))
    yield ""
    first = results[0]
    yield SERVICE.format(rate=first["rate_tokens_per_s"], cost=first["shared_cost"])
    yield report["shared_with_the_daemon"]
    yield ""
    yield routing_sentence(results)


def _read(arguments: argparse.Namespace) -> Trace:
    path = _find(arguments.trace)
    size = path.stat().st_size if path.is_file() else 1
    bar = ProgressBar(f"reading {path.name}", size, unit="bytes")
    drawn = given_arrivals(arguments)
    options = ReadOptions(
        block_tokens=arguments.block_tokens, arrivals=Arrivals(**drawn), progress=bar.at
    )
    try:
        trace = read_trace(path, options)
    finally:
        bar.end()
    check_arrivals(drawn, trace)
    return trace


def _find(path: Path) -> Path:
    folder = process_environment().get(_TRACES)
    if folder and not path.exists() and not path.is_absolute():
        beside = Path(folder) / path
        if beside.exists():
            return beside
    return path


def _tiers(arguments: argparse.Namespace, sizes: Sizes) -> list[dict[SimTier, int]]:
    chosen = [parse_tiers(text, sizes) for text in arguments.tiers]
    if arguments.capacities is not None:
        amounts = arguments.capacities.split(",")
        chosen += [{SimTier.HOST: parse_amount(part.strip(), sizes)} for part in amounts]
    if not chosen:
        chosen = [{SimTier.HOST: parse_amount(f"{part}%", sizes)} for part in _LADDER_PERCENT]
    return chosen


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
    yield OPTIMUM
    yield report["shared_with_the_daemon"]
    yield ""
    yield sentence(trace, results)


def _rows(row: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    tiers = row["tiers"]
    write = row["write"] if {"host", "nvme"} <= tiers.keys() else "-"
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
