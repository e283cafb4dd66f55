"""What every test gets: one numeric thread, no network, and a check that nothing is left behind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

REPO = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repo() -> Path:
    """The root of the source tree."""
    return REPO


def open_files() -> set[str]:
    """What this process has open, as the kernel names it ("socket:[123]", "/path", ...)."""
    found = set()
    for entry in os.scandir("/proc/self/fd"):
        try:
            found.add(f"{entry.name} -> {os.readlink(entry.path)}")
        except FileNotFoundError:
            continue  # the descriptor of this very listing
    return found


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fails a test that leaves a thread or an open file behind. Ask for it by name.

    Threads get two seconds to end: joining is the business of close(), but a pool's last worker may
    still be on its way out.
    """
    threads = set(threading.enumerate())
    files = open_files()
    yield
    deadline = time.monotonic() + 2
    left = {thread for thread in threading.enumerate() if thread not in threads}
    while left and time.monotonic() < deadline:
        time.sleep(0.01)
        left = {thread for thread in threading.enumerate() if thread not in threads}
    assert not left, f"threads left behind: {sorted(thread.name for thread in left)}"
    extra = open_files() - files
    assert not extra, f"files left open: {sorted(extra)}"
