"""Records of the NVMe tier beside fio, on the same segment files.

    python -m benchmarks.nvme_io [--dir DIR] [--gib 2] [--rounds 9] [--json FILE]

kvtier: NvmeTier behind the IoPool, as many threads as fio has jobs, one record an access, from and
into memory that is populated and aligned (as the arena is). fio: `psync`, which is the same engine
class (one blocking pread or pwrite a thread), the same block size (a record: 2 MiB and its 4 KiB
header), O_DIRECT, random over the same files, which were written whole before. The two take turns
in every round; medians and ratios of the rounds are reported. A sweep over the number of threads
comes last: it is what `nvme.io_threads` was chosen by.

fio must be on the PATH (or `--fio FILE`); without it the benchmark says so and ends with 2.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.common import median, report
from kvtier.tiers.direct_file import DirectMode, aligned_buffer
from kvtier.tiers.io_pool import IoClass, IoPool
from kvtier.tiers.nvme import NvmeTier, open_device
from kvtier.tiers.nvme_geometry import slab_number

PAGE_BYTES = 2 << 20
RECORD_BYTES = PAGE_BYTES + 4096
SECONDS = 1.0
SEED = 11
TO_REACH = 0.85


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    tier: NvmeTier
    files: list[Path]
    slots: list[int]
    fio: str

    def run_fio(self, kind: str, jobs: int) -> float:
        """GB/s of `randread` or `randwrite`."""
        command = [
            self.fio,
            "--name=nvme",
            f"--rw={kind}",
            f"--bs={RECORD_BYTES}",
            "--ioengine=psync",
            "--direct=1",
            f"--numjobs={jobs}",
            "--thread",
            "--group_reporting",
            "--time_based",
            f"--runtime={SECONDS:g}",
            f"--randseed={SEED}",
            "--norandommap",
            "--allow_file_create=0",
            f"--filename={':'.join(map(str, self.files))}",
            "--output-format=json",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        return float(job["read" if kind == "randread" else "write"]["bw_bytes"]) / 1e9

    async def run_kvtier(self, kind: str, threads: int) -> float:
        """GB/s of the same through the pool."""
        pool = IoPool(threads=threads, name="bench", queue_max=1024)
        buffers = [aligned_buffer(RECORD_BYTES) for _ in range(threads)]
        for buffer in buffers:
            np.frombuffer(buffer, np.uint8)[:] = 7
        draw = random.Random(SEED)
        moved = 0
        started = time.perf_counter()

        def access(buffer: memoryview) -> Callable[[], None]:
            slot = draw.choice(self.slots)
            if kind == "randread":
                return lambda: self.tier.read(slot, 0, buffer)
            parts = [buffer[:4096], buffer[4096:]]
            return lambda: self.tier.write(slot, parts)

        async def work(buffer: memoryview) -> None:
            nonlocal moved
            while time.perf_counter() - started < SECONDS:
                await pool.submit(IoClass.GET, access(buffer)).wait(60)
                moved += RECORD_BYTES

        await asyncio.gather(*(work(buffer) for buffer in buffers))
        took = time.perf_counter() - started
        pool.close(5)
        return moved / took / 1e9


def prepared(directory: Path, total_bytes: int, fio: str) -> Bench:
    """A tier of whole records, every byte of it written once."""
    segment_bytes = 256 << 20
    device = open_device(
        directory,
        directory_id=bytes(16),
        number=0,
        segment_bytes=segment_bytes,
        mode=DirectMode.REQUIRED,
    )
    tier = NvmeTier([device], segment_bytes=segment_bytes)
    buffer = aligned_buffer(RECORD_BYTES)
    np.frombuffer(buffer, np.uint8)[:] = np.random.default_rng(SEED).integers(
        0, 256, RECORD_BYTES, np.uint8
    )
    slots = []
    for local in range(total_bytes // segment_bytes):
        slab = slab_number(0, local)
        tier.create_segment(slab)
        first = tier.first_slot(slab)
        for place in range(segment_bytes // RECORD_BYTES):
            slots.append(first + place * (RECORD_BYTES // 4096))
            tier.write(slots[-1], [buffer])
    tier.sync()
    return Bench(tier=tier, files=sorted(directory.glob("segment-*")), slots=slots, fio=fio)


def compare(bench: Bench, kind: str, jobs: int, rounds: int) -> dict[str, object]:
    ours, theirs = [], []
    for number in range(rounds + 1):
        pair = {}
        # Who goes first changes with the round: the second finds a warmer device.
        for side in ("kvtier", "fio") if number % 2 else ("fio", "kvtier"):
            if side == "fio":
                pair[side] = bench.run_fio(kind, jobs)
            else:
                pair[side] = asyncio.run(bench.run_kvtier(kind, jobs))
        if number:  # the first warms up
            ours.append(pair["kvtier"])
            theirs.append(pair["fio"])
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "access": f"{kind[4:]}, 2 MiB pages, {jobs} at once",
        "kvtier GB/s": median(ours),
        "fio GB/s": median(theirs),
        "ratio": median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "to reach": TO_REACH,
        "reached": "yes" if median(ratios) >= TO_REACH else "no",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, help="on the device to measure (default: here)")
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--fio", default=shutil.which("fio"))
    parser.add_argument("--json")
    arguments = parser.parse_args()
    if not arguments.fio:
        sys.stderr.write("fio is not installed: put it on the PATH, or name it with --fio\n")
        return 2
    where = arguments.dir or Path.cwd()
    with tempfile.TemporaryDirectory(prefix="kvt-", dir=where) as home:
        bench = prepared(Path(home), int(arguments.gib * (1 << 30)), arguments.fio)
        rows = [
            compare(bench, kind, arguments.jobs, arguments.rounds)
            for kind in ("randread", "randwrite")
        ]
        sweep: list[dict[str, object]] = []
        for threads in (1, 2, 4, 8):
            measured = {
                kind: [asyncio.run(bench.run_kvtier(kind, threads)) for _ in range(3)]
                for kind in ("randread", "randwrite")
            }
            sweep.append(
                {
                    "threads": threads,
                    "read GB/s": median(measured["randread"]),
                    "write GB/s": median(measured["randwrite"]),
                }
            )
        bench.tier.close()
    report("NVMe records beside fio", rows, arguments.json)
    report("NVMe records by number of threads", sweep, None)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
