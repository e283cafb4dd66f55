"""Runs `kvtier bench hit-ratio`: reads the trace, replays it as asked, prints what came of it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from kvtier.bench.arrivals import Arrivals
from kvtier.bench.capacity import Sizes, parse_amount, parse_tiers
from kvtier.bench.errors import BenchInput
from kvtier.bench.figures import Basis, result, summary
from kvtier.bench.formats import ReadOptions, read_trace
from kvtier.bench.lru_curve import one_pass
from kvtier.bench.models import KvDtype, bytes_per_token
from kvtier.bench.plot import check_name, draw
from kvtier.bench.replay import Replay, ReplayPlan, SimTier, WritePolicy, replay
from kvtier.bench.report import (
    ONE_PASS,
    SHARED,
    csv_text,
    document,
    percent,
    sentence,
    setup_lines,
    size_text,
    token_text,
)
from kvtier.bench.routing import Fleet, Router, route
from kvtier.bench.routing_report import SERVICE, routed, routing_rows, routing_sentence
from kvtier.bench.textbook import TEXTBOOK, textbook_replay
from kvtier.bench.trace import Trace
from kvtier.cli.progress_bar import ProgressBar
from kvtier.cli.table import table
from kvtier.config import process_environment
from kvtier.core.policy import POLICIES
from kvtier.core.policy.forecasting import FORECASTING

__all__ = ["run"]

_TRACES: Final = "KVTIER_TRACES"
#: Of the working set, when no size is given.
_LADDER_PERCENT: Final = (1, 2, 5, 10, 20, 40, 70, 100)


def run(arguments: argparse.Namespace) -> int:
    """The exit code. Raises TraceError and BenchInput."""
    if arguments.plot is not None:
        check_name(arguments.plot)
    policies = _names(arguments.policy, [*POLICIES, *FORECASTING, *TEXTBOOK], "policy")
    writes = [WritePolicy(name) for name in _names(arguments.write, WritePolicy, "write")]
    routers = [Router(name) for name in _names(arguments.router, Router, "router")]
    token_bytes = _token_bytes(arguments)
    _check_fleet(arguments)
    sizes = Sizes(_read(arguments), token_bytes)
    chosen = _tiers(arguments, sizes)
    basis = Basis(sizes.trace)
    setup = {
        "model": arguments.model,
        "kv_dtype": arguments.kv_dtype,
        "token_bytes": token_bytes,
        "engine_hits_told": not arguments.untold,
        "one_pass": arguments.one_pass,
    }
    if arguments.replicas is not None:
        routings = [
            _route(basis, sizes, arguments, slots=slots, policy=policy, router=router)
            for slots in chosen
            for policy in policies
            for router in routers
        ]
        report = document(summary(basis, sizes), setup, routings)
        _print(arguments, report, _routing_lines(report))
        return 0
    plans = [
        ReplayPlan(slots=slots, policy=policy, write=write, told=not arguments.untold)
        for slots in chosen
        for write in (writes if SimTier.NVME in slots else [WritePolicy.BACK])
        for policy in policies
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


def _check_fleet(arguments: argparse.Namespace) -> None:
    """Raises BenchInput for options that do not go together."""
    if arguments.replicas is None:
        if arguments.shared is not None or arguments.router != "rr":
            raise BenchInput("--router and --shared need --replicas", remedy="give --replicas N")
        return
    wrong = [
        name
        for name, is_wrong in (
            ("--replicas must be from 1 to 4096", not 1 <= arguments.replicas <= 4096),
            ("--affinity-adoption must be from 0 to 1", not 0 <= arguments.affinity_adoption <= 1),
            ("--rate must be above 0", not arguments.rate > 0),
            ("--csv and --plot are for one replica", arguments.csv or arguments.plot),
            ("--replicas needs --tiers gpu=SIZE", not arguments.tiers or arguments.capacities),
        )
        if is_wrong
    ]
    if wrong:
        raise BenchInput(wrong[0], remedy="see `kvtier bench hit-ratio --help`")


def _route(
    basis: Basis,
    sizes: Sizes,
    arguments: argparse.Namespace,
    *,
    slots: dict[SimTier, int],
    policy: str,
    router: Router,
) -> dict[str, Any]:
    if set(slots) != {SimTier.GPU}:
        raise BenchInput(
            "with --replicas each has a tier gpu alone",
            remedy="give --tiers gpu=SIZE, and --shared SIZE for what all replicas share",
        )
    fleet = Fleet(
        router=router,
        replicas=arguments.replicas,
        local=slots[SimTier.GPU],
        shared=parse_amount(arguments.shared, sizes) if arguments.shared else 0,
        policy=policy,
        adoption=arguments.affinity_adoption,
        rate=arguments.rate,
    )
    bar = ProgressBar(router.value, sizes.trace.requests, unit="requests")
    try:
        return routed(basis, route(sizes.trace, fleet, bar.at))
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
    yield SHARED
    yield ""
    yield routing_sentence(results)


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
    for name, value, is_wrong in (
        (
            "--block-tokens",
            arguments.block_tokens,
            arguments.block_tokens is not None and arguments.block_tokens < 1,
        ),
        ("--start-hours", arguments.start_hours, not 0 <= arguments.start_hours < 1e6),
        ("--gap-max", arguments.gap_max, not 0 <= arguments.gap_max < 1e9),
    ):
        if is_wrong:
            raise BenchInput(f"{name} is {value}", remedy="see `kvtier bench hit-ratio --help`")
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
    folder = process_environment().get(_TRACES)
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
    yield ONE_PASS if report["setup"]["one_pass"] else SHARED
    yield ""
    yield sentence(trace, results)


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
