"""Runs `kvtier bench hit-ratio`: reads the trace, replays it as asked, prints what came of it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any, Final

from kvtier.bench.capacity import Sizes, parse_amount, parse_tiers
from kvtier.bench.figures import Basis, result, summary
from kvtier.bench.lru_curve import one_pass
from kvtier.bench.plot import draw
from kvtier.bench.prices import TokenPrices
from kvtier.bench.replay import Replay, ReplayPlan, SimTier, WritePolicy, replay
from kvtier.bench.report import csv_text, document
from kvtier.bench.returns import Hints
from kvtier.bench.routing import Fleet, route
from kvtier.bench.routing_report import routed
from kvtier.bench.textbook import TEXTBOOK, textbook_replay
from kvtier.bench.trace import Trace
from kvtier.cli.bench_model import model_name
from kvtier.cli.bench_options import Options, check_tiers
from kvtier.cli.bench_tables import hit_ratio_lines, routing_lines
from kvtier.cli.bench_trace import load_trace
from kvtier.cli.progress_bar import ProgressBar

__all__ = ["run"]

_WRITES: Final = {SimTier.HOST, SimTier.NVME}
#: Of the working set, when no size is given.
_LADDER_PERCENT: Final = (1, 2, 5, 10, 20, 40, 70, 100)


def run(arguments: argparse.Namespace) -> int:
    """The exit code. Raises TraceError and BenchInput."""
    options = Options.of(arguments)
    sizes = Sizes(load_trace(arguments), options.token_bytes)
    chosen = _tiers(arguments, sizes)
    check_tiers(arguments, options, chosen)
    basis = Basis(sizes.trace)
    setup = {
        "model": model_name(arguments),
        "kv_dtype": (arguments.kv_dtype or "bf16") if model_name(arguments) else None,
        "token_bytes": options.token_bytes,
        "engine_hits_told": not arguments.untold,
        "one_pass": arguments.one_pass,
        "hints": arguments.hints or Hints.NONE,
        "put_ttl_s": options.put_ttl_s,
        "token_prices": None if options.prices is None else asdict(options.prices),
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
        routings = [_route(basis, fleet, options.prices) for fleet in fleets]
        report = document(summary(basis, sizes, options.ttls_s), setup, routings)
        _print(arguments, report, routing_lines(report))
        return 0
    plans = [
        ReplayPlan(
            slots=slots,
            policy=policy,
            write=write,
            told=not arguments.untold,
            hints=Hints(arguments.hints or Hints.NONE),
            ttl_s=options.put_ttl_s,
        )
        for slots in chosen
        for write in (options.writes if slots.keys() >= _WRITES else [WritePolicy.BACK])
        for policy in options.policies
    ]
    done = one_pass(sizes.trace, plans) if arguments.one_pass else _replay(sizes.trace, plans)
    results = [result(basis, sizes, found, options.prices) for found in done]
    report = document(summary(basis, sizes, options.ttls_s), setup, results)
    lines = list(hit_ratio_lines(report))
    if arguments.csv is not None:
        arguments.csv.write_text(csv_text(results), encoding="utf-8")
    if arguments.plot is not None:
        draw(arguments.plot, report, lines)
    _print(arguments, report, lines)
    return 0


def _replay(trace: Trace, plans: list[ReplayPlan]) -> Iterator[Replay]:
    for plan in plans:
        bar = ProgressBar(plan.policy, trace.requests, unit="requests")
        play = textbook_replay if plan.policy in TEXTBOOK else replay
        try:
            yield play(trace, plan, bar.at)
        finally:
            bar.end()


def _print(arguments: argparse.Namespace, report: dict[str, Any], lines: Iterable[str]) -> None:
    print(json.dumps(report, indent=2) if arguments.json else "\n".join(lines))


def _route(basis: Basis, fleet: Fleet, prices: TokenPrices | None) -> dict[str, Any]:
    bar = ProgressBar(fleet.router.value, basis.trace.requests, unit="requests")
    try:
        return routed(basis, route(basis.trace, fleet, bar.at), prices)
    finally:
        bar.end()


def _tiers(arguments: argparse.Namespace, sizes: Sizes) -> list[dict[SimTier, int]]:
    chosen = [parse_tiers(text, sizes) for text in arguments.tiers]
    if arguments.capacities is not None:
        amounts = arguments.capacities.split(",")
        chosen += [{SimTier.HOST: parse_amount(part.strip(), sizes)} for part in amounts]
    if not chosen:
        chosen = [{SimTier.HOST: parse_amount(f"{part}%", sizes)} for part in _LADDER_PERCENT]
    return chosen
