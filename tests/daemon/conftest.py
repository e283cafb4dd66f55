"""Real daemons for tests: each in a short private directory, killed at the end."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from raw_calls import RawClient

from kvtier.testing.daemon_process import DaemonProcess
from tests.forks import ForkedDaemon, Forker


@pytest.fixture
def base() -> Iterator[Path]:
    """A directory with a name short enough for a socket path, mode 0700."""
    path = Path(tempfile.mkdtemp(prefix="kvt-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def make_daemon(base: Path, forker: Forker) -> Iterator[Callable[..., DaemonProcess]]:
    """Makes a daemon that is not started yet; `name` gives it a directory and socket of its own,
    `fresh` a process that loads its code itself, as further options do.
    """
    made: list[DaemonProcess] = []

    def make(*settings: str, name: str = "", fresh: bool = False, **options) -> DaemonProcess:
        place = base / name if name else base
        place.mkdir(mode=0o700, exist_ok=True)
        if fresh or options:
            daemon = DaemonProcess(place, *settings, **options)
        else:
            daemon = ForkedDaemon(forker, place, *settings)
        made.append(daemon)
        return daemon

    yield make
    for daemon in made:
        daemon.close()


@pytest.fixture
def daemon(make_daemon) -> DaemonProcess:
    """A READY daemon with default limits and a small arena."""
    return make_daemon().start()


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[RawClient]:
    with RawClient(daemon.url) as raw:
        yield raw
