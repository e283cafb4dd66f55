"""Records of the NVMe tier beside fio, on the same segment files.

    python -m benchmarks.nvme_io [--quick] [--dir DIR] [--gib 2] [--rounds 9] [--json FILE]

kvtier: NvmeTier behind the IoPool, as many threads as fio has jobs, one record an access, from and
into memory that is populated and aligned (as the arena is). fio: `psync`, which is the same engine
class (one blocking pread or pwrite a thread), the same block size (a record: 2 MiB and its 4 KiB
header), O_DIRECT, random over the same files, which were written whole before. The two take turns
in every round; medians and ratios of the rounds are reported. A sweep over the number of threads
comes last: it is what `nvme.io_threads` was chosen by.

fio must be on the PATH, or named by KVTIER_FIO or `--fio FILE`; without it the benchmark says so
and ends with 2.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.common import in_turn
from benchmarks.plan import Measured, Plan, finish, fio_command, parser_of, progress
from benchmarks.rows import Bound, Missing, Row, Target
from kvtier.tiers.direct_file import DirectMode, aligned_buffer
from kvtier.tiers.io_pool import IoClass, IoPool
from kvtier.tiers.nvme import NvmeTier, open_device
from kvtier.tiers.nvme_geometry import slab_number

PAGE_BYTES = 2 << 20
RECORD_BYTES = PAGE_BYTES + 4096
SECONDS, QUICK_SECONDS = 1.0, 0.25
SEED = 11
TARGET = Target(bound=Bound.AT_LEAST, number=0.85)
THREADS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    tier: NvmeTier
    files: list[Path]
    slots: list[int]
    fio: str
    seconds: float

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
            f"--runtime={self.seconds:g}",
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
            while time.perf_counter() - started < self.seconds:
                await pool.submit(IoClass.GET, access(buffer)).wait(60)
                moved += RECORD_BYTES

        await asyncio.gather(*(work(buffer) for buffer in buffers))
        took = time.perf_counter() - started
        pool.close(5)
        return moved / took / 1e9


def prepared(directory: Path, total_bytes: int, fio: str, seconds: float) -> Bench:
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
    files = sorted(directory.glob("segment-*"))
    return Bench(tier=tier, files=files, slots=slots, fio=fio, seconds=seconds)


def compare(bench: Bench, plan: Plan, kind: str, jobs: int) -> Row:
    name = kind.removeprefix("rand")
    progress(f"nvme/{name}")
    return Row.of_pairs(
        f"nvme/{name}",
        f"NVMe {name} of records of 2 MiB, {jobs} at once, O_DIRECT",
        in_turn(
            lambda _: asyncio.run(bench.run_kvtier(kind, jobs)),
            lambda _: bench.run_fio(kind, jobs),
            plan.rounds(9),
        ),
        "GB/s",
        "fio",
        target=TARGET,
    )


def sweep(bench: Bench, threads: int) -> Iterator[Row]:
    for kind in ("randread", "randwrite"):
        name = kind.removeprefix("rand")
        rates = [asyncio.run(bench.run_kvtier(kind, threads)) for _ in range(3)]
        what = f"NVMe {name} of records, {threads} threads"
        yield Row.of_values(f"nvme/sweep-{name}-{threads}", what, rates, "GB/s")


def rows(
    plan: Plan, fio: str | None, gib: float | None = None, jobs: int = 4
) -> Iterator[Measured]:
    if fio is None:
        reason = "fio is not installed: put it on the PATH, or name it with KVTIER_FIO"
        yield Missing(name="nvme", reason=reason)
        return
    total_bytes = int((gib or plan.sized(2.0, 0.25)) * (1 << 30))
    with tempfile.TemporaryDirectory(prefix="kvt-", dir=plan.directory) as home:
        seconds = plan.sized(SECONDS, QUICK_SECONDS)
        bench = prepared(Path(home), total_bytes, fio, seconds)
        try:
            for kind in ("randread", "randwrite"):
                if plan.wants_some(f"nvme/{kind.removeprefix('rand')}"):
                    yield compare(bench, plan, kind, jobs)
            for threads in plan.sized(THREADS, ()) if plan.wants_some("nvme/sweep") else ():
                yield from sweep(bench, threads)
        finally:
            bench.tier.close()


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--gib", type=float)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--fio", default=fio_command())
    arguments = parser.parse_args()
    return finish(
        "NVMe records beside fio",
        lambda: rows(Plan.of(arguments), arguments.fio, arguments.gib, arguments.jobs),
        arguments,
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
