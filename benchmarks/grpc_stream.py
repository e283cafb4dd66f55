"""Put and get of 2 MiB pages over gRPC, beside a raw-bytes gRPC stream in Python
(benchmarks/raw_stream.py).

    python -m benchmarks.grpc_stream [--quick] [--rounds 15] [--page-mib 2] [--json FILE]

One client process, one daemon, one reference server; unix sockets; batches of 32 pages; the two are
measured in turn in every round and medians are reported. kvtier verifies on (the default): the
client sums what it puts, the daemon verifies what arrives and what leaves, the client verifies what
it got. The arena is full from the second put round on, so every put evicts. All memory is populated
before the first round.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterator

import numpy as np

import kvtier
from benchmarks.common import daemon, layout_of, malloc_environment
from benchmarks.plan import Measured, Plan, finish, parser_of
from benchmarks.raw_stream import RawClient, raw_server
from benchmarks.rows import Bound, Row, Target, size_text

PAGES = 32
TARGET = Target(bound=Bound.AT_LEAST, number=0.8)


def key_batch(number: int) -> list[bytes]:
    return [hashlib.sha256(b"%d/%d" % (number, i)).digest() for i in range(PAGES)]


async def timed(what: Awaitable[object]) -> float:
    started = time.perf_counter()
    await what
    return time.perf_counter() - started


async def measure(url: str, raw_url: str, page_bytes: int, rounds: int) -> dict[str, list[float]]:
    total = PAGES * page_bytes
    source = np.random.default_rng(2).integers(0, 255, (PAGES, page_bytes), np.uint8)
    target = np.ones_like(source)
    raw_target = memoryview(bytearray(b"\1") * total)
    times: dict[str, list[float]] = {"put": [], "raw put": [], "get": [], "raw get": []}
    raw = RawClient(raw_url)
    async with kvtier.aio.connect(url, deadline=60.0, plane="grpc") as kv:
        ns = await kv.namespace(layout_of(page_bytes), tenant="bench")
        for number in range(rounds + 2):  # the first two warm up
            keys = key_batch(number)
            took = {
                "raw put": await timed(raw.put(memoryview(source).cast("B"))),
                "put": await timed(put_all(ns, keys, source)),
                "raw get": await timed(raw.get(raw_target)),
                "get": await timed(get_all(ns, keys, target)),
            }
            assert (target == source).all()
            target.fill(1)
            if number >= 2:
                for name, seconds in took.items():
                    times[name].append(total / seconds / 1e9)
    await raw.close()
    return times


async def put_all(ns: kvtier.aio.AsyncNamespace, keys: list[bytes], source: np.ndarray) -> None:
    put = await ns.put(keys, source)
    assert put.stored == PAGES, [result.reason for result in put]


async def get_all(ns: kvtier.aio.AsyncNamespace, keys: list[bytes], target: np.ndarray) -> None:
    got = await ns.get(keys, out=target)
    assert got.prefix == PAGES, [result.reason for result in got]


def rows(plan: Plan, page_bytes: int) -> Iterator[Measured]:
    with tempfile.TemporaryDirectory() as home:
        raw_url = f"unix:{home}/raw.sock"
        arena = max(1 << 29, 4 * PAGES * page_bytes)
        with daemon(f"host.bytes={arena}") as (url, _, _), raw_server(raw_url, PAGES * page_bytes):
            rates = asyncio.run(measure(url, raw_url, page_bytes, plan.rounds(15)))
    size = size_text(page_bytes)
    for name in ("put", "get"):
        yield Row.of_pairs(
            f"grpc/{name}-{size.replace(' ', '')}-{PAGES}",
            f"{name} over gRPC, {size} pages, {PAGES} a call",
            list(zip(rates[name], rates[f"raw {name}"], strict=True)),
            "GB/s",
            "raw bytes over a gRPC stream",
            target=TARGET,
            note="full arena, every put evicts" if name == "put" else "",
        )


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--page-mib", type=float, default=2.0)
    arguments = parser.parse_args()
    page_bytes = int(arguments.page_mib * (1 << 20))
    return finish("gRPC streaming", lambda: rows(Plan.of(arguments), page_bytes), arguments)


if __name__ == "__main__":
    if os.environ.get("MALLOC_TRIM_THRESHOLD_") is None:
        os.execve(
            sys.executable,
            [sys.executable, "-m", "benchmarks.grpc_stream", *sys.argv[1:]],
            malloc_environment(),
        )
    sys.exit(main())
