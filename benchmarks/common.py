"""What several benchmarks need: a daemon of their own, rounds in turn, and pages to move.

Promise: a daemon ends with the block it was started for; the two sides of a comparison begin by
turns, so that neither always finds the other's caches. One thread.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import kvtier
from kvtier.client import Connection
from kvtier.core.page import Tier
from kvtier.testing.daemon_process import DaemonProcess

__all__ = [
    "PAGE_BYTES", "attach", "daemon", "in_turn", "layout_of", "malloc_environment",
    "resident_bytes", "wait_populated",
]  # fmt: skip

#: The page of comparisons that have one size.
PAGE_BYTES = 2 << 20
ATTACH_S = 120.0
POPULATE_S = 120.0
#: The daemon keeps a few pages of the arena for itself.
_POPULATED = 0.99


def malloc_environment() -> dict[str, str]:
    """glibc keeps message-sized blocks instead of giving them back: both sides of a comparison."""
    return os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "1073741824",
        "MALLOC_TRIM_THRESHOLD_": "8589934592",
    }


@contextmanager
def daemon(*settings: str) -> Iterator[tuple[str, int, float]]:
    """A daemon in a directory of its own: (url, process id, seconds until READY)."""
    with tempfile.TemporaryDirectory(prefix="kvt-") as home:
        process = DaemonProcess(Path(home), *settings)
        started = time.monotonic()
        with process as running:
            yield running.url, running.pid, time.monotonic() - started


def attach(kv: Connection) -> str:
    """Waits until shared memory is used; by which inner loops. A namespace must be open."""
    deadline = time.monotonic() + ATTACH_S
    while not (state := kv.local).is_attached:
        assert time.monotonic() < deadline, state.reason
        time.sleep(0.05)
    return state.kernels


def wait_populated(kv: Connection, nbytes: int) -> None:
    """Waits until that much of the arena is memory: a page fault is no part of a put."""
    deadline = time.monotonic() + POPULATE_S
    while True:
        ready = next(t.ready_bytes for t in kv.status().tiers if t.tier is Tier.HOST)
        if ready >= nbytes * _POPULATED:
            return
        assert time.monotonic() < deadline, f"{ready} of {nbytes} bytes populated"
        time.sleep(0.1)


def layout_of(page_bytes: int) -> kvtier.Layout:
    """Pages of opaque bytes, a multiple of 64 of them."""
    return kvtier.Layout.from_segments(
        [
            kvtier.Segment(
                name="bytes",
                role=kvtier.Role.OPAQUE,
                dtype="uint8",
                layers=1,
                heads=1,
                dim=page_bytes // 64,
                scale_rule=kvtier.ScaleRule.NONE,
            )
        ],
        model_id="bench",
        revision="1",
        page_tokens=64,
        kv_compute="uint8",
    )


def resident_bytes(pid: int) -> int:
    """Anonymous resident memory of a process: what it holds beside the shared arena and files."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no RssAnon for process {pid}")


def in_turn(
    ours: Callable[[int], float], theirs: Callable[[int], float], rounds: int, *, warm: int = 1
) -> list[tuple[float, float]]:
    """What both sides return, round by round, after `warm` rounds that do not count. They are given
    the number of the round.
    """
    pairs = []
    for number in range(rounds + warm):
        if number % 2:
            first = ours(number)
            pair = (first, theirs(number))
        else:
            second = theirs(number)
            pair = (ours(number), second)
        if number >= warm:
            pairs.append(pair)
    return pairs
