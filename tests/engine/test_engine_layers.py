"""A load whose layers come one after the other: the engine computes those that are there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvtier
from kvtier.client import Connection
from kvtier.testing.held_stream import HeldStream
from kvtier_engine.cache.tiers import KvtierTiers
from kvtier_engine.engine import Engine
from kvtier_engine.model.llama import Llama
from kvtier_engine.model.load import LoadedModel
from tests.engine.engine_rig import answers, greedy, pool_of, prompt_of, tiny_model
from tests.forks import ForkedDaemon, Forker

REQUEST = greedy(prompt_of(100, seed=100), 10)


@contextmanager
def engine_on(
    model: LoadedModel, kv: Connection, stream: HeldStream | None = None
) -> Iterator[Engine]:
    pool = pool_of(model)
    tiers = KvtierTiers(kv, pool, deadline_seconds=60.0, stream=stream)
    engine = Engine(model, pool, tiers=tiers)
    try:
        yield engine
        assert tiers.drain(20), "offloads hang"
    finally:
        tiers.close()
    engine.check_idle()
    assert pool.occupancy.pinned == 0


def until(condition: Callable[[], object]) -> None:
    limit = time.monotonic() + 40
    while not condition():
        assert time.monotonic() < limit, "did not come about"
        time.sleep(0.002)


def test_layers_are_computed_as_they_arrive(
    tmp_path: Path, forker: Forker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer is computed while the copy of the second one has not been made."""
    kvtier.warm_up()
    model = tiny_model()
    begun: list[int] = []
    attention = Llama._attention

    def seen(self: Llama, number: int, *rest: object) -> object:
        begun.append(number)
        return attention(self, number, *rest)

    monkeypatch.setattr(Llama, "_attention", seen)
    with ForkedDaemon(forker, tmp_path) as daemon, kvtier.connect(daemon.url) as kv:
        with engine_on(model, kv) as engine:
            (cold,) = answers(engine, [REQUEST])
        stream = HeldStream()
        with engine_on(model, kv, stream) as engine:
            begun.clear()
            with engine:
                handle = engine.submit(REQUEST)
                stream.wait_for_copies(2)  # one for each layer
                assert begun == []
                stream.release_one()
                until(lambda: begun)
                assert (begun, stream.held) == ([0], 1)
                stream.let_go()
                done = handle.result(60)
    assert (done.tokens, done.cached.host) == (cold.tokens, 96)
