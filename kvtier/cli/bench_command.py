"""`kvtier bench`: what a cache would have done for recorded requests; only `--live` has a daemon.

Exit code 0: done; 1: `advise` found nothing that reaches the target; 2: a trace, tiers or options
that make no sense; 3: `--live` has no verdict (see bench_live.py).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

__all__ = ["register"]

_HIT_RATIO = """\
How many of the input tokens of recorded requests a KV cache of some size would have held.

  kvtier bench hit-ratio trace.jsonl.gz
      the hit ratio at eight sizes, from 1 % to all of the working set
  kvtier bench hit-ratio trace.jsonl --model kimi-k2 --tiers gpu=30GiB,host=1.5TB,nvme=15TB
      how much comes from which tier, and what is read from and written to each
  kvtier bench hit-ratio trace.jsonl --model llama-3.1-8b --capacities 64GiB,256GiB,1TiB \\
      --policy lru,arc,s3-fifo --plot out.svg
      which policy, and how much memory: a curve for each, with ceiling and optimum
  kvtier bench hit-ratio trace.jsonl --tiers gpu=2Mtok --replicas 8 --router rr,session,kv
      what session affinity or a KV-aware router gains (add --shared 16Mtok for a shared tier)
  kvtier bench hit-ratio trace.jsonl --live unix:///run/kvtier/kvtier.sock --page-bytes 256KiB
      the same requests against a daemon, every byte checked, beside the replay
"""

_ADVISE = """\
The cheapest sizes of host memory and NVMe (and GPU memory, if it has a price and a target) that
reach a hit ratio for recorded requests, found by replaying them.

  kvtier bench advise trace.jsonl.gz --model llama-3.1-70b --target 0.5 --prices host=3,nvme=0.1
      the cheapest of host memory alone and of host memory with NVMe behind it
  kvtier bench advise trace.jsonl.gz --model kimi-k2 --target 0.9 --prices host=3,nvme=0.1 \\
      --have gpu=30GiB --target-memory 0.7 --at-most host=1.5TB
      with a GPU tier that is there already; 70 % must not come from as far away as NVMe
"""

_FORMATS = """\
traces (gzip or not; the format is found out):
  Mooncake JSON lines (timestamp ms, input_length, output_length, hash_ids), also with session_id
  or chat_id and parent_chat_id; Bailian; kv-cache-tester's JSON (a file or a folder); RAGPulse.
  A name that is no file is looked for in the folder that KVTIER_TRACES names.
  Sessions that a file does not name are reconstructed: a request belongs to the session that owns
  the deepest of its blocks, the first block not counted.
sizes: 30GiB or 1.5TB (with --model or --bytes-per-token), 3Mtok, or 25% of the working set
tier gpu is an engine's own radix cache; host and nvme are kvtier's.
"""


def register(commands: Any) -> Any:
    """Adds `kvtier bench`; its subparsers, for kinds that other packages add."""
    parser = commands.add_parser(
        "bench", help="replay recorded requests: hit ratios, tiers, routing", description=__doc__
    )
    kinds = parser.add_subparsers(metavar="KIND", required=True)
    hit_ratio = kinds.add_parser(
        "hit-ratio",
        help="hit ratio of a trace by tiers, policies and routers",
        description=_HIT_RATIO,
        epilog=_FORMATS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_trace(hit_ratio)
    _add_tiers(hit_ratio)
    _add_routing(hit_ratio)
    _add_prices(hit_ratio)
    _add_live(hit_ratio)
    _add_output(hit_ratio)
    hit_ratio.set_defaults(run=_run)
    _add_compare(kinds)
    _add_advise(kinds)
    return kinds


def _add_compare(kinds: Any) -> None:
    parser = kinds.add_parser(
        "compare",
        help="two results of hit-ratio --json, row by row",
        description="What changed between two results of `kvtier bench hit-ratio --json`, in "
        "points.",
    )
    parser.add_argument("a", type=Path, metavar="A.json", help="before")
    parser.add_argument("b", type=Path, metavar="B.json", help="after; points are of B above A")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=_run_compare)


def _add_advise(kinds: Any) -> None:
    parser = kinds.add_parser(
        "advise",
        help="the cheapest tiers that reach a hit ratio",
        description=_ADVISE,
        epilog=_FORMATS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_trace(parser)
    group = parser.add_argument_group("what is wanted")
    group.add_argument(
        "--target",
        type=float,
        required=True,
        metavar="0..1",
        help="hit ratio from all tiers, of input tokens, cold start",
    )
    group.add_argument(
        "--target-memory", type=float, metavar="0..1", help="of it from gpu and host"
    )
    group.add_argument("--target-gpu", type=float, metavar="0..1", help="of it from gpu")
    group.add_argument(
        "--prices",
        required=True,
        metavar="host=P,nvme=P",
        help="what a GiB costs; tiers without a price are not bought",
    )
    group.add_argument(
        "--have", metavar="gpu=SIZE", help="tiers that are there, as they are, at no cost"
    )
    group.add_argument("--at-most", metavar="host=SIZE,..", help="the most of a tier")
    group.add_argument(
        "--policy",
        default="lru",
        metavar="NAME",
        help="of the daemon: lru (default), arc, s3-fifo, gittins",
    )
    group.add_argument(
        "--write", metavar="NAME", help="from host to nvme: back (default), through, selective"
    )
    _add_model(group)
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=_run_advise)


def _add_trace(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the trace")
    group.add_argument("trace", type=Path, metavar="TRACE", help="a file or folder, see below")
    group.add_argument(
        "--block-tokens", type=int, metavar="N", help="default: what the trace says, or fits"
    )
    group.add_argument(
        "--start-hours",
        type=float,
        metavar="H",
        help="for traces that have times inside a session only: starts are drawn over H hours "
        "(default: 8)",
    )
    group.add_argument(
        "--gap-max", type=float, metavar="S", help="and gaps clipped to S seconds (default: 3600)"
    )
    group.add_argument("--seed", type=int, help="of those starts (default: 1)")


def _add_tiers(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the cache")
    group.add_argument(
        "--tiers",
        action="append",
        default=[],
        metavar="gpu=..,host=..,nvme=..",
        help="any of the three; may be repeated",
    )
    group.add_argument(
        "--capacities",
        metavar="SIZE,SIZE",
        help="host memory alone, of each of these sizes",
    )
    group.add_argument(
        "--policy",
        default="lru",
        metavar="NAME,NAME",
        help="the daemon's lru, arc, s3-fifo; gittins, gittins-bypass, which learn from requests; "
        "to compare with, fifo and arc-textbook (one tier)",
    )
    group.add_argument(
        "--one-pass",
        action="store_true",
        help="LRU at all sizes at once, much sooner, without the daemon's own code (one tier)",
    )
    group.add_argument(
        "--write",
        metavar="NAME,NAME",
        help="when pages go from host to nvme: back (default, as the daemon), through, selective",
    )
    group.add_argument(
        "--untold",
        action="store_true",
        help="host and nvme do not hear of the pages that the engine found in its own cache",
    )
    group.add_argument(
        "--hints",
        choices=("none", "end", "return", "both"),
        help="what engines say of a session, as the trace shows it, to gittins: its end, when it "
        "returns, both (default: none)",
    )
    group.add_argument(
        "--ttl",
        metavar="S,S",
        help="the ceiling of a cache that forgets what was not used for so many seconds, beside",
    )
    group.add_argument(
        "--put-ttl",
        metavar="S",
        help="what every put says: its pages give way first, in host memory, once they were not "
        "used for so many seconds (default: nothing is said)",
    )
    _add_model(group)


def _add_model(group: Any) -> None:
    group.add_argument("--model", help="for sizes in bytes: kimi-k2, llama-3.1-8b, ...")
    group.add_argument(
        "--layout", type=Path, metavar="FILE", help="or the config.json of a Hugging Face model"
    )
    group.add_argument(
        "--bytes-per-token", type=int, metavar="N", help="or the bytes of KV of a token"
    )
    group.add_argument("--kv-dtype", choices=("bf16", "fp8"), help="default: bf16")


def _add_routing(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "several replicas (each with a cache of the size of tier gpu)"
    )
    group.add_argument("--replicas", type=int, metavar="N", help="how many engines, up to 4096")
    group.add_argument(
        "--router",
        metavar="NAME,NAME",
        help="rr (default), least, session, session-bounded, prefix, kv",
    )
    group.add_argument(
        "--affinity-adoption",
        type=float,
        metavar="0..1",
        help="sessions that send their id (default: 1, all); the others are routed by rr",
    )
    group.add_argument("--shared", metavar="SIZE", help="a tier that all replicas share")
    group.add_argument(
        "--rate",
        type=float,
        metavar="TOKENS/S",
        help="prefill of a replica (default: 8000)",
    )


def _add_live(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "against a running daemon of your own, which this fills (with its own tiers; --policy and "
        "--write say how it is set, for the replay beside it)"
    )
    group.add_argument(
        "--live",
        metavar="URL",
        help="unix:///path or grpc://127.0.0.1:port; exit code 1: wrong bytes, damaged pages "
        "or another hit ratio; 3: all right, and no verdict on the hit ratio",
    )
    group.add_argument("--page-bytes", metavar="SIZE", help="of a block (default: 64KiB)")
    group.add_argument(
        "--speedup",
        type=float,
        metavar="X",
        help="the trace's time is X times ours (default: 0, one request after the other)",
    )
    group.add_argument("--requests", type=int, metavar="N", help="the first N only")
    group.add_argument(
        "--plane",
        choices=("grpc", "auto"),
        help="grpc (default): the daemon hears of each use at once, as in the replay; auto: by "
        "shared memory where it can be",
    )


def _add_prices(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what a million input tokens cost, in any currency")
    group.add_argument("--price-cached", type=float, metavar="P", help="found in a cache")
    group.add_argument("--price-uncached", type=float, metavar="P", help="computed")


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="the whole report as JSON")
    group.add_argument("--csv", type=Path, metavar="FILE", help="a row for each result and tier")
    group.add_argument("--plot", type=Path, metavar="FILE", help="out.png, out.svg or out.html")


def _run(arguments: argparse.Namespace) -> int:
    if arguments.live is not None:
        from kvtier.cli import bench_live

        return bench_live.run(arguments)
    from kvtier.cli.bench_hit_ratio import run

    return run(arguments)


def _run_compare(arguments: argparse.Namespace) -> int:
    from kvtier.cli.bench_compare import run

    return run(arguments)


def _run_advise(arguments: argparse.Namespace) -> int:
    from kvtier.cli.bench_advise import run

    return run(arguments)
