"""A million one-cell pages in one daemon: memory a page, time to READY, lookup latency over gRPC.

    python -m benchmarks.million_pages [--pages 1000000] [--json FILE]

A one-cell page has 64 bytes of payload and takes an 8 KiB slot. Memory is the growth of the
daemon's anonymous memory (the arena is shared memory and counted apart). Lookups are timed while a
second client goes on putting pages, so that evictions and the garbage collector take part.
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
from benchmarks.common import daemon, report, resident_bytes
from kvtier.tiers.host import SLAB_BYTES

CELL = 64
SLOT = 8192
BATCH = 4096
LOOKUP_KEYS = 1000

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


async def measure(url: str, pid: int, pages: int) -> dict[str, object]:
    before = resident_bytes(pid)
    async with kvtier.aio.connect(url, deadline=30.0, plane="grpc") as kv:
        ns = await kv.namespace(LAYOUT, tenant="bench")
        await until_populated(kv, pages * SLOT)
        started = time.perf_counter()
        stored = await put_pages(ns, 0, pages)
        put_s = time.perf_counter() - started
        per_page = (resident_bytes(pid) - before) / stored
        quiet = await time_lookups(ns, pages, 500)
        with another_process_putting(url, pages):
            busy = await time_lookups(ns, pages, 500)
    return {
        "pages": stored,
        "daemon bytes a page": per_page,
        "put us a page": put_s / stored * 1e6,
        "lookup of 1,000 p50 ms": float(np.percentile(quiet, 50)) * 1e3,
        "p99 ms": float(np.percentile(quiet, 99)) * 1e3,
        "p99 ms while another client puts": float(np.percentile(busy, 99)) * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", type=int, default=1_000_000)
    parser.add_argument("--json")
    parser.add_argument("--put-to", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.put_to:
        asyncio.run(put_more(arguments.put_to, arguments.pages))
        return
    slabs = -(-arguments.pages // (SLAB_BYTES // SLOT))
    with daemon(f"host.bytes={slabs * SLAB_BYTES}") as (url, pid, ready_s):
        row = asyncio.run(measure(url, pid, arguments.pages))
    report("A million pages", [{"READY s": ready_s} | row], arguments.json)


if __name__ == "__main__":
    main()
