"""What every test gets: one numeric thread, no network, and a check that nothing is left behind."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import grpc.aio
import pytest
from hypothesis import settings

from kvtier.testing.leaks import leak_audit
from tests.forks import Forker

__all__ = ["leak_audit"]

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# How long an example takes says something about the machine, not about the code.
settings.register_profile("kvtier", deadline=None, print_blob=True)
settings.load_profile("kvtier")


def pytest_collection_finish() -> None:
    """Modules and tests stay: a collection of garbage need not look through all of them again."""
    gc.collect()
    gc.freeze()


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
