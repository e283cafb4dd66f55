"""A million one-cell pages in one daemon: memory a page, time to READY, lookup latency over gRPC.

    python -m benchmarks.million_pages [--quick] [--pages 1000000] [--json FILE]

A one-cell page has 64 bytes of payload and takes an 8 KiB slot. Memory is the growth of the
daemon's anonymous memory (the arena is shared memory and counted apart). Lookups are timed while a
second client goes on putting pages, so that evictions and the garbage collector take part. Lookups
through the shared directory are timed too, as a program makes them: `ns.lookup(keys)`.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

import kvtier
from benchmarks.common import attach, daemon, resident_bytes
from benchmarks.local import grown
from benchmarks.plan import Measured, Plan, finish, parser_of, progress
from benchmarks.rows import Bound, Of, Row, Target
from kvtier.tiers.host import SLAB_BYTES

CELL = 64
SLOT = 8192
BATCH = 4096
LOOKUP_KEYS = 1000
#: Keys a call by the shared directory -> microseconds to reach.
LOCAL_LOOKUPS = {1: 5.0, 1_000: 30.0, 16_000: 1_000.0}

LAYOUT = kvtier.Layout.from_segments(
    [
        kvtier.Segment(
            name="cell",
            role=kvtier.Role.OPAQUE,
            dtype="uint8",
            layers=1,
            heads=1,
            dim=CELL,
            scale_rule=kvtier.ScaleRule.NONE,
        )
    ],
    model_id="one-cell",
    revision="1",
    page_tokens=1,
    kv_compute="uint8",
)


def key_batch(start: int, n: int) -> list[bytes]:
    return [hashlib.sha256(i.to_bytes(8, "little")).digest() for i in range(start, start + n)]


async def until_populated(kv: kvtier.aio.AsyncConnection, nbytes: int) -> None:
    for _ in range(300):
        if (await kv.status()).tiers[0].ready_bytes >= nbytes:
            return
        await asyncio.sleep(0.2)
    raise RuntimeError(f"the daemon did not populate {nbytes} bytes in a minute")


async def put_pages(ns: kvtier.aio.AsyncNamespace, start: int, end: int) -> int:
    """Puts pages [start, end); how many the daemon took."""
    cells: npt.NDArray[np.uint8] = np.zeros((BATCH, CELL), np.uint8)
    stored = 0
    for at in range(start, end, BATCH):
        n = min(BATCH, end - at)
        cells[:n, :8] = np.arange(at, at + n, dtype="<u8").view(np.uint8).reshape(n, 8)
        put = await ns.put(key_batch(at, n), cells[:n], chain=False)
        stored += put.stored
    return stored


async def time_lookups(ns: kvtier.aio.AsyncNamespace, pages: int, calls: int) -> list[float]:
    rng = np.random.default_rng(3)
    times = []
    for _ in range(calls):
        keys = key_batch(int(rng.integers(0, pages - LOOKUP_KEYS)), LOOKUP_KEYS)
        started = time.perf_counter()
        await ns.lookup(keys)
        times.append(time.perf_counter() - started)
    return times


@contextmanager
def another_process_putting(url: str, pages: int) -> Iterator[None]:
    command = [sys.executable, "-m", "benchmarks.million_pages", "--put-to", url]
    with subprocess.Popen([*command, "--pages", str(pages)]) as putter:
        time.sleep(2)  # until it has connected and puts
        try:
            yield
        finally:
            putter.kill()


async def put_more(url: str, pages: int) -> None:
    async with kvtier.aio.connect(url, deadline=30.0, plane="grpc") as kv:
        await put_pages(await kv.namespace(LAYOUT, tenant="bench"), pages, 2 * pages)


def at_most(number: float) -> Target:
    return Target(bound=Bound.AT_MOST, number=number, of=Of.VALUE)


def p99_row(name: str, what: str, times: list[float]) -> Row:
    """One round of many calls; low and high are the median and the slowest call."""
    return Row(
        name=name,
        what=what,
        value=float(np.percentile(times, 99)) * 1e3,
        unit="ms",
        target=at_most(20.0),
        rounds=1,
        low=float(np.percentile(times, 50)) * 1e3,
        high=max(times) * 1e3,
        note=f"{len(times)} calls; low is their median, high the slowest",
    )


async def measure(plan: Plan, url: str, pid: int, pages: int) -> list[Measured]:
    before = resident_bytes(pid)
    calls = plan.sized(500, 50)
    async with kvtier.aio.connect(url, deadline=30.0, plane="grpc") as kv:
        ns = await kv.namespace(LAYOUT, tenant="bench")
        await until_populated(kv, pages * SLOT)
        progress(f"million: {pages} pages are put")
        started = time.perf_counter()
        stored = await put_pages(ns, 0, pages)
        put_us = (time.perf_counter() - started) / stored * 1e6
        per_page = (resident_bytes(pid) - before) / stored
        quiet = await time_lookups(ns, pages, calls)
    local = await asyncio.to_thread(local_lookups, plan, url, pages)
    async with kvtier.aio.connect(url, deadline=30.0, plane="grpc") as kv:
        ns = await kv.namespace(LAYOUT, tenant="bench")
        with another_process_putting(url, pages):
            busy = await time_lookups(ns, pages, calls)
    what = f"lookup of {LOOKUP_KEYS} keys over gRPC, p99, {stored} pages"
    return [
        Row.of_values(
            "million/bytes-a-page", f"daemon memory a page, {stored} pages", [per_page],
            "bytes", target=at_most(250.0),
        ),
        Row.of_values("million/put", "put of a one-cell page over gRPC", [put_us], "us"),
        p99_row("million/lookup-p99", what, quiet),
        p99_row("million/lookup-p99-busy", what + ", another process puts and evicts", busy),
        *local,
    ]  # fmt: skip


def local_lookups(plan: Plan, url: str, pages: int) -> list[Measured]:
    """Of keys that are there, others in every call, as a caller has just made them."""
    rows: list[Measured] = []
    draw = np.random.default_rng(plan.seed)
    with kvtier.connect(url, deadline=30) as kv:
        ns = kv.namespace(LAYOUT, tenant="bench")
        attach(kv)
        for count, to_reach in LOCAL_LOOKUPS.items():
            if count >= pages:
                continue
            before = kv.local.counts
            times = []
            for _ in range(plan.sized(400, 20) + 1):
                keys = key_batch(int(draw.integers(0, pages - count)), count)
                started = time.perf_counter()
                found = ns.lookup(keys)
                times.append((time.perf_counter() - started) * 1e6)
                assert found.hits > count // 2, found
            by_memory = grown(before, kv.local.counts).get("lookups", 0)
            asked = count * len(times)
            note = "all by shared memory" if by_memory == asked else "OVER GRPC"
            what = f"ns.lookup of {count} keys on one host, {pages} pages"
            rows.append(
                Row.of_values(
                    f"million/local-lookup-{count}", what, times[1:], "us",
                    target=at_most(to_reach), note=f"{note}; other keys in every call",
                )
            )  # fmt: skip
    return rows


def rows(plan: Plan, pages: int | None = None) -> Iterator[Measured]:
    pages = pages or plan.sized(1_000_000, 20_000)
    slabs = -(-pages // (SLAB_BYTES // SLOT))
    with daemon(f"host.bytes={slabs * SLAB_BYTES}") as (url, pid, ready_s):
        yield Row.of_values(
            "million/ready", f"READY of a daemon with room for {pages} pages", [ready_s], "s",
            target=at_most(5.0), note="empty: host memory does not outlive its daemon",
        )  # fmt: skip
        yield from asyncio.run(measure(plan, url, pid, pages))


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--pages", type=int)
    parser.add_argument("--put-to", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.put_to:
        asyncio.run(put_more(arguments.put_to, arguments.pages))
        return 0
    return finish("A million pages", lambda: rows(Plan.of(arguments), arguments.pages), arguments)


if __name__ == "__main__":
    sys.exit(main())
