"""Eviction policies beside each other on one trace: hit ratio, and processor time for each page.

    python -m benchmarks.policies mooncake_conversation.jsonl.gz --sizes 1Mtok,3Mtok
    python -m benchmarks.policies claude_code_v6.jsonl.gz --sizes 1Mtok --seed 2 --hours 24
    python -m benchmarks.policies claude_code_v6.jsonl.gz --sizes 1Mtok --hints both
    python -m benchmarks.policies made:flip --sizes 0.3Mtok,0.7Mtok

Sizes are tokens of one tier; made:NAME is one of benchmarks/hard_traces.py, and other traces are
looked for in the folder that KVTIER_TRACES names. The hit ratio is of input tokens, from an empty
cache. Time is that of the process in the whole replay over the block references of the trace, so
what a policy costs is the difference to another one; a first replay of a few requests is not
counted, because it compiles.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from benchmarks.hard_traces import hard_trace
from kvtier.bench.arrivals import Arrivals
from kvtier.bench.bounds import Optimum, ceiling
from kvtier.bench.capacity import Sizes, parse_amount
from kvtier.bench.figures import ratios
from kvtier.bench.formats import ReadOptions, read_trace
from kvtier.bench.replay import ReplayPlan, SimTier, replay
from kvtier.bench.returns import Hints
from kvtier.bench.trace import Trace

_MADE = "made:"
_POLICIES = "lru,arc,gittins,gittins-bypass"


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.policies", description=__doc__)
    parser.add_argument("trace")
    parser.add_argument("--sizes", default="1Mtok,3Mtok")
    parser.add_argument("--policies", default=_POLICIES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hours", type=float, default=8.0)
    parser.add_argument("--block-tokens", type=int)
    parser.add_argument("--hints", choices=tuple(Hints), default=Hints.NONE)
    arguments = parser.parse_args()
    trace = _read(arguments)
    names = arguments.policies.split(",")
    for name in names:
        _play(trace.head(50), name, 100)
    optimum, sizes = Optimum(trace), Sizes(trace, None)
    print(f"{arguments.trace}: {trace.requests} requests, {trace.references} block references")
    for note in trace.notes:
        print(note)
    best = 100 * ratios(trace, ceiling(trace)).cold
    print(
        f"{'size':>8} {'policy':>16} {'hit %':>7} {'us a page':>10}   (no eviction: {best:.1f} %)"
    )
    for size in arguments.sizes.split(","):
        slots = parse_amount(size, sizes)
        for name in names:
            hit, seconds = _play(trace, name, slots, Hints(arguments.hints))
            print(f"{size:>8} {name:>16} {hit:7.2f} {1e6 * seconds / trace.references:10.2f}")
        hit = 100 * ratios(trace, optimum.hits(slots)).cold
        print(f"{size:>8} {'optimum':>16} {hit:7.2f}", flush=True)
    return 0


def _read(arguments: argparse.Namespace) -> Trace:
    if arguments.trace.startswith(_MADE):
        return hard_trace(arguments.trace.removeprefix(_MADE), seed=arguments.seed)
    arrivals = Arrivals(hours=arguments.hours, seed=arguments.seed)
    options = ReadOptions(block_tokens=arguments.block_tokens, arrivals=arrivals)
    return read_trace(Path(os.environ.get("KVTIER_TRACES", "")) / arguments.trace, options)


def _play(trace: Trace, policy: str, slots: int, hints: Hints = Hints.NONE) -> tuple[float, float]:
    """(hit ratio in percent, seconds of the process)."""
    begin = time.process_time()
    done = replay(trace, ReplayPlan(slots={SimTier.HOST: slots}, policy=policy, hints=hints))
    return 100 * ratios(trace, done.prefix).cold, time.process_time() - begin


if __name__ == "__main__":
    raise SystemExit(main())
