"""A real daemon for the commands, and a way to run them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvtier.testing.daemon_process import DaemonProcess

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def daemon() -> Iterator[DaemonProcess]:
    base = Path(tempfile.mkdtemp(prefix="kvt-"))
    with DaemonProcess(base) as running:
        yield running
    shutil.rmtree(base, ignore_errors=True)


@pytest.fixture
def kvtier() -> Run:
    """Runs `kvtier WORDS...` in a process of its own, with an environment of its own."""

    def run(*words: str, env: dict[str, str] | None = None, **options):
        return subprocess.run(
            [sys.executable, "-m", "kvtier", *words],
            capture_output=True,
            text=True,
            timeout=30,
            env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"} | (env or {}),
            **options,
        )

    return run
