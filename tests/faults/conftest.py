"""Real daemons with an NVMe tier, in short private directories, killed at the end."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvtier
from kvtier.testing.daemon_process import DaemonProcess
from tests.faults.local_crew import Crew
from tests.forks import ForkedDaemon, Forker


@pytest.fixture
def base() -> Iterator[Path]:
    """A directory with a name short enough for a socket path, mode 0700."""
    path = Path(tempfile.mkdtemp(prefix="kvt-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def make_daemon(base: Path, forker: Forker) -> Iterator[Callable[..., DaemonProcess]]:
    """Makes a daemon that is not started yet, with its NVMe tier in `nv` beside its state, unless
    a setting says otherwise. `name` gives it a directory of its own.
    """
    made: list[DaemonProcess] = []

    def make(*settings: str, name: str = "", **options) -> DaemonProcess:
        place = base / name if name else base
        place.mkdir(mode=0o700, exist_ok=True)
        settings = (f"nvme.paths={place / 'nv'}", "daemon.metrics_listen=127.0.0.1:0", *settings)
        if options:
            daemon = DaemonProcess(place, *settings, **options)
        else:
            daemon = ForkedDaemon(forker, place, *settings)
        made.append(daemon)
        return daemon

    yield make
    for daemon in made:
        daemon.close()


@pytest.fixture(scope="session")
def whole_crew() -> Iterator[Crew]:
    made = Crew()
    yield made
    made.close()


@pytest.fixture
def crew(whole_crew: Crew) -> Iterator[Crew]:
    """Clients in processes of their own; those of a test end with it."""
    yield whole_crew
    whole_crew.end()


@pytest.fixture
def connect() -> Iterator[Callable[..., kvtier.client.Connection]]:
    """Connections that are closed at the end."""
    made = []

    def open_one(daemon: DaemonProcess, *, deadline: float = 10.0):
        # What these tests watch is the daemon; the local plane has tests of its own.
        connection = kvtier.connect(daemon.url, deadline=deadline, plane="grpc")
        made.append(connection)
        return connection

    yield open_one
    for connection in made:
        connection.close()
