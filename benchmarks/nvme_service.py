"""The NVMe tier as its users meet it: the start, the scrub, and what verification costs.

    python -m benchmarks.nvme_service [--quick] [--tier-gib 10] [--dir DIR] [--json FILE]

1. READY of a daemon with a 1 GiB arena and a warm tier, after an orderly end and after SIGKILL (the
   tier written since the last checkpoint has to be scanned).
2. p99 of putting one 2 MiB page, while a scrub of the tier runs and without, in turn.
3. Pages got over gRPC from host memory with verification on and off, in turn: both ends.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path

import numpy as np

import kvtier
from benchmarks.common import PAGE_BYTES, in_turn, layout_of
from benchmarks.plan import Measured, Plan, finish, parser_of, progress
from benchmarks.rows import Bound, Of, Row, Target
from kvtier.client import Connection, Namespace
from kvtier.core.page import Tier
from kvtier.testing.daemon_process import DaemonProcess

BATCH = 32
DEADLINE_S = 120.0
READY = Target(bound=Bound.AT_MOST, number=2.0, of=Of.VALUE)
SCRUB = Target(bound=Bound.AT_MOST, number=2.0)
VERIFY = Target(bound=Bound.AT_LEAST, number=0.9)


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


def measure_tier(plan: Plan, home: Path, tier_gib: float) -> Iterator[Measured]:
    """READY, and then puts under a scrub, of one daemon with a warm tier."""
    pages = int(tier_gib * (1 << 30)) // (PAGE_BYTES + 4096)
    process = DaemonProcess(
        home,
        f"host.bytes={plan.sized('1GiB', '256MiB')}",
        f"nvme.paths={home}/nvme",
        f"nvme.bytes={int((tier_gib + 1) * (1 << 30))}",
        "nvme.checkpoint_s=86400",
    )
    try:
        process.start()
        progress("service/ready: the tier is filled")
        fill(process.url, pages // BATCH)
        for name, how, end in (
            ("kill", "SIGKILL", process.kill),
            ("stop", "an orderly end", process.stop),
        ):
            times = []
            for _ in range(plan.sized(3, 1)):
                end()
                times.append(ready_seconds(process))
            with kvtier.connect(process.url, deadline=DEADLINE_S) as kv:
                found = next(t.pages_sealed for t in kv.status().tiers if t.tier is Tier.NVME)
            what = f"READY after {how}, {found} pages of 2 MiB on NVMe"
            yield Row.of_values(f"service/ready-{name}", what, times, "s", target=READY)
        progress("service/put-p99-scrub")
        yield measure_scrub(plan, process.url)
    finally:
        process.kill()


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


def measure_scrub(plan: Plan, url: str) -> Row:
    """p99 of a put while pages are verified over p99 without, in turn. The p99 are of the puts of
    all rounds: those of one round, of a few hundred puts, are what low and high come from.
    """
    count = plan.sized(600, 10)
    quiet: list[list[float]] = []
    busy: list[list[float]] = []
    with (
        kvtier.connect(url, deadline=DEADLINE_S) as kv,
        kvtier.connect(url, deadline=DEADLINE_S) as other,
    ):
        ns = space_of(kv)
        put_seconds(ns, 50, "warm")
        for number in range(plan.rounds(6)):
            quiet.append(put_seconds(ns, count, f"quiet/{number}"))
            with scrub(other) as running:
                busy.append(put_seconds(ns, count, f"busy/{number}"))
                assert running.is_alive(), "the scrub ended before the puts did: use a larger tier"
    ratios = [_p99(one) / _p99(two) for one, two in zip(busy, quiet, strict=True)]
    value, reference = (_p99(list(chain.from_iterable(times))) for times in (busy, quiet))
    return Row(
        name="service/put-p99-scrub",
        what="put of one 2 MiB page, p99 while a scrub runs",
        value=value * 1e3,
        unit="ms",
        reference="p99 without a scrub",
        reference_value=reference * 1e3,
        ratio=value / reference,
        target=SCRUB,
        rounds=len(ratios),
        low=min(ratios),
        high=max(ratios),
        note=f"{count} puts a round; the ratio is of all puts",
    )


def _p99(times: list[float]) -> float:
    return float(np.percentile(times, 99))


def measure_verification(plan: Plan, home: Path) -> Row:
    """Throughput of gets with `verify` always at both ends beside off at both. With always the
    client checks the bytes, and tells the daemon that it does.
    """
    source = source_pages()
    target = np.ones_like(source)
    spaces: dict[str, Namespace] = {}
    with ExitStack() as until_end:
        for verify in ("always", "off"):
            place = home / verify
            place.mkdir()
            process = DaemonProcess(place, "host.bytes=256MiB", f"host.verify={verify}")
            until_end.enter_context(process)
            kv = kvtier.connect(process.url, deadline=DEADLINE_S, verify=verify, plane="grpc")
            until_end.callback(kv.close)
            spaces[verify] = space_of(kv)
            spaces[verify].put(keys_of(0), source).raise_for_refused()

        def rate(verify: str) -> float:
            started = time.perf_counter()
            got = spaces[verify].get(keys_of(0), out=target)
            seconds = time.perf_counter() - started
            assert got.prefix == BATCH, got.reasons
            return source.nbytes / seconds / 1e9

        pairs = in_turn(lambda _: rate("always"), lambda _: rate("off"), plan.rounds(151), warm=2)
    return Row.of_pairs(
        "service/verify",
        "get over gRPC, 2 MiB pages, 32 a call, verification on (bytes by the client, headers by "
        "the daemon)",
        pairs,
        "GB/s",
        "the same, verification off",
        target=VERIFY,
    )


def rows(plan: Plan, tier_gib: float | None = None) -> Iterator[Measured]:
    with tempfile.TemporaryDirectory(prefix="kvt-", dir=plan.directory) as home:
        base = Path(home)
        (base / "tier").mkdir(mode=0o700)
        if plan.wants_some("service/ready") or plan.wants_some("service/put"):
            yield from measure_tier(plan, base / "tier", tier_gib or plan.sized(10.0, 0.5))
        if plan.wants_some("service/verify"):
            progress("service/verify")
            yield measure_verification(plan, base)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--tier-gib", type=float)
    arguments = parser.parse_args()
    return finish(
        "NVMe tier as a service", lambda: rows(Plan.of(arguments), arguments.tier_gib), arguments
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
