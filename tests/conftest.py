"""What every test gets: one numeric thread, no network, and a check that nothing is left behind."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc.aio
import pytest
from hypothesis import settings

from kvtier.testing.leaks import leak_audit
from tests.forks import Forker
from tests.workers import pytest_testnodeready

__all__ = ["leak_audit", "pytest_testnodeready"]

# Asserts of these show values too. Here, before anybody can have loaded them.
pytest.register_assert_rewrite(
    "damage_rig", "fault_rig", "tests.faults.fault_rig", "tests.faults.kinds_rig"
)

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As a shell starts what runs in its background: tests of Ctrl-C need what a terminal gives.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says something about the machine, not about the code.
settings.register_profile("kvtier", deadline=None, print_blob=True)
settings.load_profile("kvtier")


# Modules and tests stay: no search for garbage looks through them, now or later.
def pytest_collectstart() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


REPO = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repo() -> Path:
    """The root of the source tree."""
    return REPO


@pytest.fixture(scope="session", autouse=True)
def grpc_runtime() -> Iterator[None]:
    """Keeps gRPC's poller for the whole run, so that no test is charged with starting it."""
    grpc.aio.init_grpc_aio()
    yield
    grpc.aio.shutdown_grpc_aio()


@pytest.fixture(scope="session")
def forker() -> Iterator[Forker]:
    """What daemons and commands are forked from."""
    made = Forker()
    yield made
    made.close()
