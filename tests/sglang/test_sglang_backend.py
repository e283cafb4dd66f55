"""The backend itself: what it needs of SGLang, and its pools together. SGLang is a stand-in."""

from __future__ import annotations

from contextlib import ExitStack, closing

import pytest
import torch
from pool_rig import hashes, index_pool, latent_pool, pool_with_heads, slots_of, states_pool
from sglang_standin import Config, Storage, Transfer, stand_in

import kvtier
from kvtier_sglang.errors import UnsupportedSglang
from kvtier_sglang.store import StoreState
from kvtier_sglang.weights import LoadedWeights, Outcome

PAGES_FIRST = "page_first_direct"


@pytest.fixture
def sglang(monkeypatch):
    with stand_in() as made:
        monkeypatch.setattr(made.backend, "WEIGHTS", LoadedWeights())
        yield made


@pytest.fixture
def attach(sglang, daemon):
    """Attaches a backend with these pools, the primary one first."""
    with ExitStack() as stack:

        def make(primary, *, extra=None, config=None, **sides):
            times = {f"kvtier_{call}_deadline": 5.0 for call in ("exists", "get", "set")}
            given = times | {"kvtier_endpoint": daemon.url} | (extra or {})
            backend = sglang.backend.KvTierHiCacheStorage(
                Config(extra_config=given, **(config or {}))
            )
            stack.enter_context(closing(backend))
            backend.register_mem_pool_host(primary)
            backend.register_mem_host_pool_v2(primary, "kv")
            for name, pool in sides.items():
                backend.register_mem_host_pool_v2(pool, name)
            return backend

        yield make


def hybrid(attach, seed=0, **options):
    return attach(
        pool_with_heads(PAGES_FIRST, seed=seed),
        swa=pool_with_heads(PAGES_FIRST, seed=seed + 1),
        mamba=states_pool(seed=seed + 2),
        **options,
    )


def transfers(count):
    places = list(range(count))
    return [
        Transfer(name="swa", keys=hashes(count), host_indices=slots_of(places)),
        Transfer(name="mamba", keys=hashes(count), host_indices=torch.tensor(places)),
    ]


def store_all(backend, count=3):
    assert backend.batch_set_v2(transfers(count)) == {
        "swa": [True] * count,
        "mamba": [True] * count,
    }
    slots = slots_of(list(range(count)))
    assert backend.batch_set_v1(hashes(count), slots) == [True] * count


def found(backend, count=3):
    asked = transfers(count)
    asked[1].hit_policy = "trailing_pages"
    asked[1].keys = [""]
    return backend.batch_exists_v2(hashes(count), asked)


def test_what_one_server_stored_another_restores(attach):
    store_all(hybrid(attach))
    other = hybrid(attach, seed=9)
    result = found(other, 5)
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (3, [1, 2, 3])
    assert result.extra_pool_hit_pages == {"kv": 3, "swa": 3, "mamba": 3}
    assert other.batch_get_v2(transfers(3)) == {"swa": [True] * 3, "mamba": [True] * 3}


def test_an_update_of_the_weights_ends_the_pages_of_all_pools(sglang, attach, daemon):
    weights = sglang.backend.WEIGHTS
    backend = hybrid(attach)
    store_all(backend)
    weights.change_begins()
    assert backend.state is StoreState.PAUSED
    assert found(backend).kv_hit_pages == 0
    assert backend.batch_get_v2(transfers(3)) == {"swa": [False] * 3, "mamba": [False] * 3}
    assert backend.batch_set_v2(transfers(3)) == {"swa": [False] * 3, "mamba": [False] * 3}
    weights.change_ends("v2", Outcome.DONE)
    assert backend.state is StoreState.PAUSED, "KV of before is left"
    weights.flushed()
    assert backend.state is StoreState.OPEN
    assert found(backend).extra_pool_hit_pages == {}
    assert backend.batch_get_v2(transfers(3)) == {"swa": [False] * 3, "mamba": [False] * 3}
    with kvtier.connect(daemon.url, deadline=5) as kv:
        before = [item for item in kv.status().namespaces if "v2" not in item.weights_revision]
    assert [(item.pages, item.generation) for item in before] == [(0, 2)] * 7
    store_all(backend)
    assert found(backend).kv_hit_pages == 3


def test_a_pool_that_comes_after_an_update_is_of_the_present_weights(sglang, attach):
    weights = sglang.backend.WEIGHTS
    late = attach(pool_with_heads(PAGES_FIRST), swa=pool_with_heads(PAGES_FIRST, seed=1))
    weights.change_begins()
    late.register_mem_host_pool_v2(states_pool(), "mamba")
    assert late.batch_set_v2(transfers(1)) == {"swa": [False], "mamba": [False]}
    weights.change_ends("v2", Outcome.DONE)
    weights.flushed()
    store_all(late)
    other = hybrid(attach)
    assert found(other).kv_hit_pages == 3
    weights.lost()
    assert found(other).kv_hit_pages == 0


def test_the_state_of_the_backend_is_the_worst_of_its_pools(attach):
    backend = hybrid(attach)
    assert backend.state is StoreState.OPEN
    backend._sides.stores[1].pause()
    assert backend.state is StoreState.PAUSED


def test_clear_deletes_the_pages_of_all_pools(attach):
    backend = hybrid(attach)
    store_all(backend)
    backend.clear()
    assert found(backend).extra_pool_hit_pages == {}
    assert backend.batch_get_v2(transfers(1)) == {"swa": [False], "mamba": [False]}
    store_all(backend)
    assert found(backend).kv_hit_pages == 3


def test_an_error_inside_is_a_miss_of_every_pool_that_was_asked(attach, caplog):
    """What is left out of an answer would not limit what SGLang takes as loaded."""
    backend = hybrid(attach)
    backend.close()
    expected = {"swa": [False] * 2, "mamba": [False] * 2}
    assert backend.batch_get_v2(transfers(2)) == expected
    backend = hybrid(attach)
    for store in backend._sides.stores:
        store._rows = None
    assert backend.batch_get_v2(transfers(2)) == expected
    assert backend.batch_set_v2(transfers(2)) == expected
    assert backend.batch_exists_v2([1, 2], transfers(2)).kv_hit_pages == 0
    assert "counts as a miss" in caplog.text


def test_pools_are_refused_by_name(sglang, attach):
    backend = attach(latent_pool(PAGES_FIRST), config={"is_mla_model": True, "tp_size": 2})
    with pytest.raises(kvtier.LayoutError, match="deepseek_v4_c4"):
        backend.register_mem_host_pool_v2(latent_pool(PAGES_FIRST), "deepseek_v4_c4")
    with pytest.raises(kvtier.LayoutError, match="different heads"):
        backend.register_mem_host_pool_v2(pool_with_heads(PAGES_FIRST), "draft")
    backend.register_mem_host_pool_v2(index_pool(PAGES_FIRST), "indexer")
    with closing(sglang.backend.KvTierHiCacheStorage(Config())) as empty:
        with pytest.raises(kvtier.LayoutError, match="without a primary one"):
            empty.register_mem_host_pool_v2(states_pool(), "mamba")
        assert empty.batch_exists_v2(hashes(1), transfers(1)).kv_hit_pages == 0


def test_drafts_of_two_draft_models_are_apart(sglang, attach):
    sglang.spec.speculative_draft_model_path = "one"
    primary = latent_pool(PAGES_FIRST)
    asked = [Transfer(name="draft", keys=hashes(1), host_indices=slots_of([0]))]
    latent = {"is_mla_model": True}
    backend = attach(primary, draft=latent_pool(PAGES_FIRST, seed=1), config=latent)
    assert backend.batch_set_v2(asked) == {"draft": [True]}
    same = attach(primary, draft=latent_pool(PAGES_FIRST, seed=2), config=latent)
    assert same.batch_get_v2(asked) == {"draft": [True]}
    sglang.spec.speculative_draft_model_path = "two"
    other = attach(primary, draft=latent_pool(PAGES_FIRST, seed=3), config=latent)
    assert other.batch_get_v2(asked) == {"draft": [False]}


# -- what it needs of SGLang ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["PoolTransferResult", "StorageMetrics", "get_spec"])
def test_an_sglang_without_a_name_is_refused_by_it(name):
    with pytest.raises(UnsupportedSglang, match=name) as caught, stand_in(without=(name,)):
        pass
    assert "0.5.20 to 0.5.23" in caught.value.remedy


def test_an_sglang_without_a_method_or_a_field_is_refused_by_it(sglang, monkeypatch):
    monkeypatch.delattr(Storage, "batch_get_v2")
    with pytest.raises(UnsupportedSglang, match=r"has no Storage\.batch_get_v2"):
        sglang.backend.KvTierHiCacheStorage(Config())


@pytest.mark.parametrize(
    ("bag", "name"),
    [("model", "quantization_param_path"), ("model", "revision"), ("serving", "weight_version")],
)
def test_a_setting_that_is_not_there_is_not_taken_for_an_empty_one(sglang, bag, name):
    delattr(getattr(sglang, bag), name)
    with pytest.raises(UnsupportedSglang, match=f"has no setting {name}"):
        sglang.backend.KvTierHiCacheStorage(Config())


def test_settings_of_side_pools_are_looked_for_with_the_pool(sglang, attach):
    del sglang.mamba.linear_attn_backend
    backend = attach(pool_with_heads(PAGES_FIRST))
    with pytest.raises(UnsupportedSglang, match="has no setting linear_attn_backend"):
        backend.register_mem_host_pool_v2(states_pool(), "mamba")


def test_a_result_without_a_place_for_lengths_has_none(sglang, monkeypatch):
    class Older:
        def __init__(self, kv_hit_pages, extra_pool_hit_pages):
            self.kv_hit_pages = kv_hit_pages
            self.extra_pool_hit_pages = extra_pool_hit_pages

    monkeypatch.setattr(sglang.api, "PoolTransferResult", Older)
    result = sglang.api.transfer_result(2, {"kv": 2}, [2])
    assert not hasattr(result, "restorable_prefix_pages")
    assert (result.kv_hit_pages, result.extra_pool_hit_pages) == (2, {"kv": 2})
