"""How loads and pools of one connection end, or are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

import kvtier
from kvtier.client import Connection
from kvtier.client.device import DevicePool, LayeredLoad, LoadResult, PoolNameTaken
from kvtier_engine.cache.tiers import KvtierTiers
from kvtier_engine.engine import Engine
from kvtier_engine.model.load import LoadedModel
from tests.engine.engine_rig import answers, greedy, pool_of, prompt_of, tiny_model
from tests.forks import ForkedDaemon, Forker

REQUEST = greedy(prompt_of(40, seed=40), 4)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny_model()


@pytest.fixture
def kv(tmp_path: Path, forker: Forker) -> Iterator[Connection]:
    kvtier.warm_up()
    with ForkedDaemon(forker, tmp_path) as daemon, kvtier.connect(daemon.url) as connection:
        yield connection


def test_a_copy_that_fails_after_its_outcome_was_known_is_noted(
    model: LoadedModel, kv: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not done when the outcome is asked for, and failed when it is looked at the next time."""

    def arrived(load: LayeredLoad) -> LoadResult | None:
        load.wait(60)
        result = asked(load)
        monkeypatch.setattr(LayeredLoad, "poll", fails)
        return result

    def fails(_: object) -> NoReturn:
        raise RuntimeError("CUDA error: planted")

    asked, found, counts = LayeredLoad.arrived, [], []
    for turn in range(2):
        pool = pool_of(model)
        tiers = KvtierTiers(kv, pool, deadline_seconds=60)
        engine = Engine(model, pool, tiers=tiers)
        if turn:
            monkeypatch.setattr(LayeredLoad, "arrived", arrived)
        (done,) = answers(engine, [REQUEST])
        monkeypatch.undo()
        assert tiers.drain(60)
        tiers.close()
        found.append((done.tokens, done.cached.host))
        counts.append(engine.stats().get("transfers_failed", 0))
    assert found == [(found[0][0], 0), (found[0][0], 32)]
    assert counts == [0, 1]


def test_two_pools_of_one_name_are_refused_by_name(model: LoadedModel, kv: Connection) -> None:
    layout = pool_of(model).layout
    pools = [DevicePool(layout, pages, name="mine") for pages in (3, 5)]
    tiers = KvtierTiers(kv, pools[0])
    with pytest.raises(PoolNameTaken, match="'mine' is told of"):
        KvtierTiers(kv, pools[1])  # and leaves no thread behind, which the audit would find
    tiers.close()
    KvtierTiers(kv, pools[1]).close()
