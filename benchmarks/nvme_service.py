"""The NVMe tier as its users meet it: the start, the scrub, and what verification costs.

    python -m benchmarks.nvme_service [--tier-gib 10] [--dir DIR] [--json FILE]

1. READY of a daemon with a 1 GiB arena and a warm tier, after an orderly end and after SIGKILL (the
   tier written since the last checkpoint has to be scanned).
2. p99 of putting one 2 MiB page, while a scrub of the tier runs and without, in turn.
3. Pages got over gRPC from host memory with verification on and off, in turn: both ends.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

import kvtier
from benchmarks.common import median, report
from benchmarks.grpc_stream import layout_of
from kvtier.client import Connection, Namespace
from kvtier.core.page import Tier
from kvtier.testing.daemon_process import DaemonProcess

PAGE_BYTES = 2 << 20
BATCH = 32
DEADLINE_S = 120.0


def keys_of(batch: int) -> list[bytes]:
    return [hashlib.sha256(b"%d/%d" % (batch, i)).digest() for i in range(BATCH)]


def source_pages() -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, (BATCH, PAGE_BYTES), np.uint8)


def space_of(kv: Connection) -> Namespace:
    return kv.namespace(layout_of(PAGE_BYTES), tenant="bench")


def ready_seconds(process: DaemonProcess) -> float:
    started = time.monotonic()
    process.start()
    return time.monotonic() - started


def fill(url: str, batches: int) -> None:
    source = source_pages()
    with kvtier.connect(url, deadline=DEADLINE_S) as kv:
        ns = space_of(kv)
        for batch in range(batches):
            put = ns.put(keys_of(batch), source, durable="nvme")
            assert put.durable == BATCH, put


def measure_ready(home: Path, tier_gib: float) -> list[dict[str, object]]:
    pages = int(tier_gib * (1 << 30)) // (PAGE_BYTES + 4096)
    process = DaemonProcess(
        home,
        "host.bytes=1GiB",
        f"nvme.paths={home}/nvme",
        f"nvme.bytes={int((tier_gib + 1) * (1 << 30))}",
        "nvme.checkpoint_s=86400",
    )
    rows: list[dict[str, object]] = []
    try:
        process.start()
        fill(process.url, pages // BATCH)
        for how, end in (("SIGKILL", process.kill), ("an orderly end", process.stop)):
            times = []
            for _ in range(3):
                end()
                times.append(ready_seconds(process))
            with kvtier.connect(process.url, deadline=DEADLINE_S) as kv:
                found = next(t.pages_sealed for t in kv.status().tiers if t.tier is Tier.NVME)
            rows.append(
                {
                    "measured": f"READY after {how}, {found} pages of 2 MiB on NVMe",
                    "value": median(times),
                    "unit": "s",
                    "to reach": "<= 2",
                    "reached": "yes" if median(times) <= 2 else "no",
                }
            )
        rows.append(measure_scrub(process.url))
    finally:
        process.kill()
    return rows


def put_seconds(ns: Namespace, count: int, prefix: str) -> list[float]:
    page = source_pages()[:1]
    took = []
    for i in range(count):
        key = hashlib.sha256(f"{prefix}/{i}".encode()).digest()
        started = time.perf_counter()
        ns.put([key], page).raise_for_refused()
        took.append(time.perf_counter() - started)
    return took


class _Enough(Exception):
    """Nobody watches this verify any more."""


@contextmanager
def scrub(kv: Connection) -> Iterator[threading.Thread]:
    """A verify of the tier that reads from the beginning of the block to its end."""
    reading, is_enough = threading.Event(), threading.Event()

    def on_progress(_progress: object) -> None:
        reading.set()
        if is_enough.is_set():
            raise _Enough

    def run() -> None:
        with suppress(_Enough):
            kv.verify(Tier.NVME, on_progress=on_progress)

    running = threading.Thread(target=run)
    running.start()
    try:
        assert reading.wait(30), "no report of the scrub in 30 s"
        yield running
    finally:
        is_enough.set()
        running.join()


def measure_scrub(url: str, *, rounds: int = 6, count: int = 200) -> dict[str, object]:
    """p99 of a put while pages are verified over p99 without, in turn."""
    quiet: list[float] = []
    busy: list[float] = []
    with (
        kvtier.connect(url, deadline=DEADLINE_S) as kv,
        kvtier.connect(url, deadline=DEADLINE_S) as other,
    ):
        ns = space_of(kv)
        put_seconds(ns, 50, "warm")
        for number in range(rounds):
            quiet += put_seconds(ns, count, f"quiet/{number}")
            with scrub(other) as running:
                busy += put_seconds(ns, count, f"busy/{number}")
                assert running.is_alive(), "the scrub ended before the puts did: use a larger tier"
    p99 = [float(np.percentile(times, 99)) for times in (quiet, busy)]
    return {
        "measured": "put of one page, p99 under a scrub over p99 without",
        "value": p99[1] / p99[0],
        "unit": f"({p99[1] * 1e3:.1f} ms / {p99[0] * 1e3:.1f} ms)",
        "to reach": "<= 2",
        "reached": "yes" if p99[1] <= 2 * p99[0] else "no",
    }


def measure_verification(home: Path, *, rounds: int = 15) -> dict[str, object]:
    """Throughput of gets with `verify` always over the same with off, at both ends."""
    source = source_pages()
    target = np.ones_like(source)
    took: dict[str, list[float]] = {"always": [], "off": []}
    processes = {}
    for verify in took:
        place = home / verify
        place.mkdir()
        processes[verify] = DaemonProcess(place, "host.bytes=256MiB", f"host.verify={verify}")
    try:
        connections = {}
        for verify, process in processes.items():
            process.start()
            kv = kvtier.connect(process.url, deadline=DEADLINE_S, verify=verify, plane="grpc")
            connections[verify] = kv
            space_of(kv).put(keys_of(0), source).raise_for_refused()
        for number in range(rounds + 2):
            for verify, kv in connections.items():
                started = time.perf_counter()
                got = space_of(kv).get(keys_of(0), out=target)
                seconds = time.perf_counter() - started
                assert got.prefix == BATCH
                if number >= 2:
                    took[verify].append(seconds)
        for kv in connections.values():
            kv.close()
    finally:
        for process in processes.values():
            process.kill()
    ratios = [off / on for on, off in zip(took["always"], took["off"], strict=True)]
    return {
        "measured": "get over gRPC, throughput with verification over without",
        "value": median(ratios),
        "unit": f"({min(ratios):.2f} to {max(ratios):.2f})",
        "to reach": ">= 0.9",
        "reached": "yes" if median(ratios) >= 0.9 else "no",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tier-gib", type=float, default=10.0)
    parser.add_argument("--dir", type=Path, help="on the device to measure (default: here)")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvt-", dir=arguments.dir or Path.cwd()) as home:
        base = Path(home)
        (base / "tier").mkdir(mode=0o700)
        rows = measure_ready(base / "tier", arguments.tier_gib)
        rows.append(measure_verification(base))
    report("NVMe tier as a service", rows, arguments.json)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
