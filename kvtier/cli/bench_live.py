"""Runs `kvtier bench hit-ratio --live`: a trace against a running daemon, beside its replay.

Exit code 0: done, every byte right, the hit ratios within the tolerance; 1: not so, or pages were
CORRUPT or IO_ERROR, or the daemon stopped answering (what was measured until then is printed); 2:
options that make no sense; 3: all right but for the hit ratios, which cannot be compared.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any, Final

from kvtier.bench.errors import BenchInput
from kvtier.bench.live import LiveOptions, page_bytes_checked, run_live
from kvtier.bench.live_report import live_document, plan_of
from kvtier.bench.replay import WritePolicy, replay
from kvtier.bench.report import percent, size_text
from kvtier.cli.bench_trace import load_trace
from kvtier.cli.options import naming
from kvtier.cli.progress_bar import ProgressBar
from kvtier.config.kinds import Size
from kvtier.core.policy import POLICIES

__all__ = ["run"]

_PAGE_BYTES: Final = Size(low=1 << 10, high=64 << 20)
_SPEEDUP_MAX: Final = 1e9
_EXIT_FAILED: Final = 1
_EXIT_NO_VERDICT: Final = 3
_REPLAYS_ONLY: Final = (
    "csv",
    "plot",
    "ttl",
    "put_ttl",
    "hints",
    "price_cached",
    "price_uncached",
    "router",
    "shared",
    "rate",
    "affinity_adoption",
    "model",
    "layout",
    "bytes_per_token",
    "kv_dtype",
)
_HELP: Final = "see `kvtier bench hit-ratio --help`"


def run(arguments: argparse.Namespace) -> int:
    """The exit code. Raises KvtierError for a daemon that cannot be reached at all."""
    options = _options(arguments)
    policy, write = arguments.policy, WritePolicy(arguments.write or "back")
    trace = load_trace(arguments)
    total = min(trace.requests, options.requests_max or trace.requests)
    bar = ProgressBar("live", total, unit="requests")
    try:
        with naming(options.url, None):
            done = run_live(trace, options, bar.at)
    finally:
        bar.end()
    head, plan = trace.head(done.requests), plan_of(done, policy, write)
    report = live_document(head, done, replay(head, plan))
    print(json.dumps(report, indent=2) if arguments.json else "\n".join(_lines(report)))
    if done.not_deleted is not None:
        print(f"warning: the pages of this run are still there: {done.not_deleted}",
              file=sys.stderr)  # fmt: skip
    if done.ended is not None:
        print(f"error: after {done.requests} of {total} requests: {done.ended}", file=sys.stderr)
        print("remedy: see that the daemon runs (kvtier status), and run this again",
              file=sys.stderr)  # fmt: skip
        return _EXIT_FAILED
    return _exit_code(report)


def _exit_code(report: dict[str, Any]) -> int:
    """Of a run that was done."""
    verdict = report["is_within_tolerance"]
    if report["pages_wrong"] or report["pages_faulty"] or verdict is False:
        return _EXIT_FAILED
    return _EXIT_NO_VERDICT if verdict is None else 0


def _options(arguments: argparse.Namespace) -> LiveOptions:
    requests, speedup = arguments.requests, arguments.speedup
    for name, is_wrong in (
        ("--requests must be 1 or more", requests is not None and requests < 1),
        ("--speedup must be from 0 to 1e9", not 0 <= (speedup or 0.0) <= _SPEEDUP_MAX),
        (
            "--live has the daemon's own tiers: no --tiers, --capacities, --replicas, --one-pass",
            arguments.tiers
            or arguments.capacities is not None
            or arguments.replicas is not None
            or arguments.one_pass,
        ),
        (
            f"--{next(iter(_unused(arguments)), '')} changes nothing with --live",
            _unused(arguments),
        ),
        (
            f"--live compares {', '.join(POLICIES)} alone: --policy {arguments.policy}",
            arguments.policy not in POLICIES,
        ),
        ("--write is none of back, through, selective",
         arguments.write not in (None, *WritePolicy)),
    ):  # fmt: skip
        if is_wrong:
            raise BenchInput(name, remedy=_HELP)
    try:
        size = _PAGE_BYTES.parse_text(arguments.page_bytes or "64KiB")
    except ValueError as error:
        raise BenchInput(f"--page-bytes: {error}", remedy=_HELP) from error
    return LiveOptions(
        url=arguments.live,
        page_bytes=page_bytes_checked(size),
        speedup=speedup or 0.0,
        requests_max=requests,
        plane=arguments.plane or "grpc",
    )


def _unused(arguments: argparse.Namespace) -> list[str]:
    """Options that are for replays alone, and were given."""
    given = [name for name in _REPLAYS_ONLY if getattr(arguments, name) is not None]
    if arguments.untold:
        given.append("untold")
    return [name.replace("_", "-") for name in given]


def _lines(report: dict[str, Any]) -> Iterator[str]:
    simulated = report["simulated"]
    sizes = ", ".join(f"{name} {pages:,}" for name, pages in simulated["pages"].items())
    yield (
        f"live: {report['requests']:,} requests in {report['wall_s']:.1f} s over "
        f"{report['plane'] or 'no plane'}, pages of {size_text(report['page_bytes'])}"
    )
    yield f"simulated: {simulated['policy']}, {simulated['write']}, pages: {sizes}"
    for name in ("get", "put"):
        one = report[name]
        latency = ", ".join(f"p{at} {1e3 * one[f'p{at}_s']:.2f} ms" for at in (50, 95, 99))
        yield (
            f"{name}: {size_text(one['bytes'])} at {one['gigabytes_per_s']:.2f} GB/s; of a request "
            f"{latency}"
        )
    yield f"behind the trace's time: p95 {report['late_p95_s']:.3f} s"
    yield "outcomes: " + ", ".join(f"{name} {n:,}" for name, n in report["outcomes"].items())
    wrong = report["pages_wrong"]
    checked = f"{report['pages_checked']:,} pages read, every byte checked: "
    yield checked + (
        f"{wrong:,} WRONG, first {report['first_wrong_key']}" if wrong else "all right"
    )
    if report["pages_faulty"]:
        yield f"{report['pages_faulty']:,} pages CORRUPT or IO_ERROR"
    for name, tier in report["tiers"].items():
        yield (
            f"{name}: {percent(tier['hit_ratio'])} of input tokens, in the simulator "
            f"{percent(tier['hit_ratio_simulated'])}: {tier['difference_points']:+.2f} points"
        )
    yield ""
    yield (
        f"The daemon found {percent(report['hit_ratio'])} of input tokens, the simulator "
        f"{percent(simulated['hit_ratio'])}: {report['difference_points']:+.2f} points, "
        f"{_verdict(report)}."
    )


def _verdict(report: dict[str, Any]) -> str:
    if report["no_verdict"]:
        return f"without a verdict: {report['no_verdict']}"
    word = "within" if report["is_within_tolerance"] else "NOT within"
    return f"{word} the tolerance of {report['tolerance_points']:g}"
