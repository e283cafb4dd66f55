"""A daemon, and a process with a real SGLang that outlives the tests."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from dynamo_rig import Indexer
from server_tiers import nvme_daemon
from sglang_rig import Walks
from sglang_standin import StandIn, stand_in

import kvtier
from kvtier.client import Connection
from kvtier.packing import fp8
from kvtier_engine.smollm2 import ensure_model
from kvtier_sglang.weights import LoadedWeights
from tests.forks import daemon_of_its_own

WORKERS = count(1)


@pytest.fixture
def daemon(forker):
    with daemon_of_its_own(forker, "host.bytes=64MiB") as running:
        yield running


@pytest.fixture
def kv(daemon) -> Iterator[Connection]:
    with kvtier.connect(daemon.url, deadline=5) as connection:
        yield connection


@pytest.fixture
def roomy(forker):
    """With room for pages of several sizes: each has slabs of its own."""
    with daemon_of_its_own(forker, "host.bytes=512MiB") as running:
        yield running


@pytest.fixture(scope="module")
def tiers(forker):
    """A daemon with NVMe, for the servers of a module."""
    with nvme_daemon(forker) as running:
        yield running


@pytest.fixture
def sglang(monkeypatch) -> Iterator[StandIn]:
    """SGLang's storage; its server is a stand-in, in which updates of the weights are seen."""
    with stand_in() as made:
        weights = LoadedWeights()
        weights.is_watching = True
        monkeypatch.setattr(made.backend, "WEIGHTS", weights)
        yield made


@pytest.fixture(scope="module")
def indexer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Indexer]:
    """Dynamo's, for tests that are skipped without it."""
    made = Indexer(tmp_path_factory.mktemp("dynamo") / "log")
    yield made
    made.close()


@pytest.fixture
def worker(indexer: Indexer) -> Iterator[int]:
    """A number that the test registers with the indexer."""
    made = next(WORKERS)
    yield made
    indexer.unregister(made)


@pytest.fixture(scope="session")
def packing() -> None:
    """What packs pages is loaded, and compiled: the first page would wait for it."""
    fp8.warm_up()


@pytest.fixture(scope="session")
def model() -> Path:
    """A small model's directory."""
    return ensure_model().directory


@pytest.fixture(scope="session")
def walks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walks]:
    made = Walks(tmp_path_factory.mktemp("walks") / "log")
    yield made
    made.close()
