"""Gets by shared memory beside memcpy: two processes, every page verified, in turn.

    python -m benchmarks.local [--rounds N] [--json FILE]

Each side copies pages of one size, in batches, from 512 MiB of populated memory to other 512 MiB,
in the same random order: kvtier from the daemon's arena by `ns.get(keys, out=pool, at=ids)`, the
reference from private memory by memmove. Ratios are of one round; the table has their median, the
lowest and the highest.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import random
import sys
import time

import numpy as np

import kvtier
from benchmarks.common import daemon, median, report
from benchmarks.grpc_stream import layout_of
from kvtier.client import Connection, Namespace

POOL_BYTES = 512 << 20
SIZES = (64 << 10, 368 << 10, 2 << 20, 8 << 20)
BATCH = 32
ATTACH_S = 120.0
PUT_BYTES = 64 << 20


def attach(kv: Connection) -> str:
    """Waits until shared memory is read; by which inner loops."""
    deadline = time.monotonic() + ATTACH_S
    while not (state := kv.local).is_attached:
        assert time.monotonic() < deadline, state.reason
        time.sleep(0.05)
    return state.kernels


class Pages:
    """A pool full of pages of one size, stored under as many keys, and memory to get them into."""

    def __init__(self, kv: Connection, nbytes: int) -> None:
        self.nbytes = nbytes
        self.count = POOL_BYTES // nbytes
        total = self.count * nbytes
        self.source = np.random.default_rng(nbytes).integers(0, 256, total, np.uint8)
        self.target = np.ones(total, np.uint8)
        self.keys = [hashlib.sha256(b"%d/%d" % (nbytes, i)).digest() for i in range(self.count)]
        self.ns: Namespace = kv.namespace(layout_of(nbytes), tenant="bench")
        pages = self.source.reshape(self.count, nbytes)
        step = max(1, PUT_BYTES // nbytes)
        for at in range(0, self.count, step):
            self.ns.put(self.keys[at : at + step], pages[at : at + step]).raise_for_refused()

    def get(self, order: list[int], batch: int) -> float:
        """Seconds."""
        pool = self.target.reshape(self.count, self.nbytes)
        began = time.perf_counter()
        for at in range(0, len(order), batch):
            some = order[at : at + batch]
            got = self.ns.get([self.keys[i] for i in some], out=pool, at=some)
            assert got.prefix == len(some), got.reasons
        return time.perf_counter() - began

    def memmove(self, order: list[int]) -> float:
        source, target, nbytes = self.source.ctypes.data, self.target.ctypes.data, self.nbytes
        move = ctypes.memmove
        began = time.perf_counter()
        for i in order:
            move(target + i * nbytes, source + i * nbytes, nbytes)
        return time.perf_counter() - began


def measure(pages: Pages, batch: int, rounds: int, to_reach: float | None) -> dict[str, object]:
    rng = random.Random(pages.nbytes + batch)
    ratios, ours, theirs = [], [], []
    seen: set[int] = set()
    count = min(pages.count, 4096) if batch > 1 else min(pages.count, 256)
    for number in range(rounds + 1):
        order = rng.sample(range(pages.count), count)
        took = pages.get(order, batch)
        copied = pages.memmove(order)
        if number:  # the first round warms both up
            moved = count * pages.nbytes / 1e9
            ours.append(moved / took)
            theirs.append(moved / copied)
            ratios.append(copied / took)
        seen.update(order)
    for i in seen:
        piece = slice(i * pages.nbytes, (i + 1) * pages.nbytes)
        assert np.array_equal(pages.target[piece], pages.source[piece])
    label = f"{pages.nbytes >> 10} KiB" if pages.nbytes < 1 << 20 else f"{pages.nbytes >> 20} MiB"
    return {
        "get, host tier": f"{label} pages, {batch} a call",
        "kvtier GB/s": median(ours),
        "memcpy GB/s": median(theirs),
        "ratio": median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "to reach": "" if to_reach is None else f">= {to_reach}",
        "reached": "" if to_reach is None else "yes" if median(ratios) >= to_reach else "no",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    rows, kernels = [], ""
    for nbytes in SIZES:
        # One size at a time: pages of another one would take memory from these.
        with (
            daemon("host.bytes=768MiB") as (url, _, _),
            kvtier.connect(url, deadline=60) as kv,
        ):
            pages = Pages(kv, nbytes)
            kernels = attach(kv)
            before = kv.local.counts
            rows.append(measure(pages, BATCH, arguments.rounds, 0.8))
            if nbytes == 2 << 20:
                rows.append(measure(pages, 1, arguments.rounds, None))
            after = kv.local.counts
            assert after.left == before.left, "pages came over gRPC"
            assert after.hits > before.hits
    report(f"Gets by shared memory, inner loops by {kernels}", rows, arguments.json)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
