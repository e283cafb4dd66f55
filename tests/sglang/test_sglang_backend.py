"""The backend itself: what it needs of SGLang, and its pools together. SGLang's storage classes are
its own, its server a stand-in.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, closing

import pytest
import torch
from pool_rig import hashes, index_pool, latent_pool, pool_with_heads, slots_of, states_pool
from prometheus_client import REGISTRY
from sglang_standin import config, needs_wheel, stand_in, transfer

import kvtier
import kvtier.client
from kvtier.errors import InvalidConfigValue
from kvtier_sglang.errors import UnsupportedSglang
from kvtier_sglang.store import StoreState
from kvtier_sglang.weights import Outcome

pytestmark = needs_wheel

PAGES_FIRST = "page_first_direct"


@pytest.fixture
def attach(sglang, daemon):
    """Attaches a backend with these pools, the primary one first."""
    with ExitStack() as stack:

        def make(primary, *, extra=None, ranks=None, **sides):
            times = {f"kvtier_{call}_deadline": 5.0 for call in ("exists", "get", "set")}
            given = times | {"kvtier_endpoint": daemon.url} | (extra or {})
            backend = sglang.backend.KvTierHiCacheStorage(
                config(extra_config=given, **(ranks or {}))
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
        transfer("swa", keys=hashes(count), host_indices=slots_of(places)),
        transfer("mamba", keys=hashes(count), host_indices=torch.tensor(places)),
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
    asked[1] = transfer("mamba", keys=[""], hit_policy="trailing_pages")
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
    backend = attach(latent_pool(PAGES_FIRST), ranks={"is_mla_model": True, "tp_size": 2})
    with pytest.raises(kvtier.LayoutError, match="deepseek_v4_c4"):
        backend.register_mem_host_pool_v2(latent_pool(PAGES_FIRST), "deepseek_v4_c4")
    with pytest.raises(kvtier.LayoutError, match="different heads"):
        backend.register_mem_host_pool_v2(pool_with_heads(PAGES_FIRST), "draft")
    backend.register_mem_host_pool_v2(index_pool(PAGES_FIRST), "indexer")
    with closing(sglang.backend.KvTierHiCacheStorage(config())) as empty:
        with pytest.raises(kvtier.LayoutError, match="without a primary one"):
            empty.register_mem_host_pool_v2(states_pool(), "mamba")
        assert empty.batch_exists_v2(hashes(1), transfers(1)).kv_hit_pages == 0


def test_drafts_of_two_draft_models_are_apart(sglang, attach):
    sglang.spec.speculative_draft_model_path = "one"
    primary = latent_pool(PAGES_FIRST)
    asked = [transfer("draft", keys=hashes(1), host_indices=slots_of([0]))]
    latent = {"is_mla_model": True}
    backend = attach(primary, draft=latent_pool(PAGES_FIRST, seed=1), ranks=latent)
    assert backend.batch_set_v2(asked) == {"draft": [True]}
    same = attach(primary, draft=latent_pool(PAGES_FIRST, seed=2), ranks=latent)
    assert same.batch_get_v2(asked) == {"draft": [True]}
    sglang.spec.speculative_draft_model_path = "two"
    other = attach(primary, draft=latent_pool(PAGES_FIRST, seed=3), ranks=latent)
    assert other.batch_get_v2(asked) == {"draft": [False]}


# -- what it needs of SGLang ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["PoolTransferResult", "StorageMetrics", "get_spec"])
def test_an_sglang_without_a_name_is_refused_by_it(name):
    with pytest.raises(UnsupportedSglang, match=name) as caught, stand_in(without=(name,)):
        pass
    assert "0.5.20 to 0.5.23" in caught.value.remedy


def test_an_sglang_without_a_method_or_a_field_is_refused_by_it(sglang, monkeypatch):
    monkeypatch.delattr(sglang.storage.HiCacheStorage, "batch_get_v2")
    with pytest.raises(UnsupportedSglang, match=r"has no HiCacheStorage\.batch_get_v2"):
        sglang.backend.KvTierHiCacheStorage(config())


@pytest.mark.parametrize(
    ("bag", "name"),
    [("model", "quantization_param_path"), ("model", "revision"), ("serving", "weight_version")],
)
def test_a_setting_that_is_not_there_is_not_taken_for_an_empty_one(sglang, bag, name):
    delattr(getattr(sglang, bag), name)
    with pytest.raises(UnsupportedSglang, match=f"has no setting {name}"):
        sglang.backend.KvTierHiCacheStorage(config())


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


# -- who shares with whom -------------------------------------------------------------------------

YARN = '{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}'


@pytest.mark.parametrize(
    ("bag", "name", "value"),
    [
        ("model", "json_model_override_args", YARN),
        ("model", "quantization", "fp8"),
        ("model", "modelopt_quant", {"algorithm": "fp8"}),
        ("model", "load_format", "dummy"),
        ("moe", "kt_weight_path", "experts"),
    ],
)
def test_servers_that_make_other_numbers_of_one_checkpoint_never_share(
    sglang, attach, bag, name, value
):
    store_all(hybrid(attach))
    setattr(getattr(sglang, bag), name, value)
    other = hybrid(attach, seed=9)
    assert found(other).kv_hit_pages == 0
    assert other.batch_get_v1(hashes(3), slots_of([0, 1, 2])) == [False] * 3
    assert other.batch_get_v2(transfers(3)) == {"swa": [False] * 3, "mamba": [False] * 3}
    store_all(other)
    assert found(hybrid(attach)).kv_hit_pages == 3


def test_servers_that_say_the_same_in_other_words_share(sglang, attach):
    store_all(hybrid(attach))
    sglang.model.load_format, sglang.model.json_model_override_args = "safetensors", "{ }"
    assert found(hybrid(attach)).kv_hit_pages == 3
    sglang.model.json_model_override_args = YARN
    store_all(hybrid(attach))
    sglang.model.json_model_override_args = YARN.replace(" ", "").replace("4.0", "4.00")
    assert found(hybrid(attach)).kv_hit_pages == 3


def test_drafts_that_are_quantized_are_apart(sglang, attach):
    asked = [transfer("draft", keys=hashes(1), host_indices=slots_of([0]))]
    heads = pool_with_heads(PAGES_FIRST)
    assert attach(heads, draft=heads).batch_set_v2(asked) == {"draft": [True]}
    assert attach(heads, draft=heads).batch_get_v2(asked) == {"draft": [True]}
    sglang.spec.speculative_draft_model_quantization = "fp8"
    assert attach(heads, draft=heads).batch_get_v2(asked) == {"draft": [False]}


# -- what else it says of itself ------------------------------------------------------------------


def test_where_updates_would_go_unseen_it_is_refused_by_the_name_of_the_plugin(sglang, attach):
    sglang.backend.WEIGHTS.is_watching = False
    with pytest.raises(UnsupportedSglang, match="plugin kvtier is not loaded") as caught:
        attach(pool_with_heads(PAGES_FIRST))
    assert "SGLANG_PLUGINS" in caught.value.remedy
    assert "kvtier_weights_fixed" in caught.value.remedy
    backend = attach(pool_with_heads(PAGES_FIRST), extra={"kvtier_weights_fixed": True})
    assert backend.state is StoreState.OPEN


@pytest.mark.parametrize("is_of_attention", [True, False], ids=["attention", "servers"])
def test_replicas_publish_events_side_by_side(sglang, attach, daemon, tmp_path, is_of_attention):
    extra = {"kvtier_events_endpoint": f"ipc://{tmp_path}/e"}
    for number in range(2):
        if is_of_attention:
            sglang.parallel.attn_dp_size = 2
        else:
            sglang.parallel.dp_rank = number
        ranks = {"dp_rank": number if is_of_attention else 0}
        attach(pool_with_heads(PAGES_FIRST), extra=extra, ranks=ranks)
    assert {path.name for path in tmp_path.iterdir()} >= {"e", "e_dp1"}
    with kvtier.connect(daemon.url, deadline=5) as kv:
        names = sorted(
            item.client_name for item in kv.status().sessions if "sglang" in item.client_name
        )
    assert [" dp 1 " in name for name in names] == [True, False]


def test_a_name_for_host_memory_that_no_router_knows_is_refused(attach, tmp_path):
    extra = {"kvtier_events_endpoint": f"ipc://{tmp_path}/e", "kvtier_events_host_medium": "GPU"}
    with pytest.raises(InvalidConfigValue, match="'GPU'") as caught:
        attach(pool_with_heads(PAGES_FIRST), extra=extra)
    assert "EXTERNAL or CPU_PINNED" in caught.value.remedy
    attach(pool_with_heads(PAGES_FIRST), extra=extra | {"kvtier_events_host_medium": "CPU_PINNED"})


def test_it_serves_only_while_all_pools_do(attach):
    backend = hybrid(attach, ranks={"enable_storage_metrics": True})
    labels = {"tp_rank": "0", "pp_rank": "0", "dp_rank": "0"}

    def serves():
        backend.get_stats()
        return REGISTRY.get_sample_value("kvtier:serving", labels)

    assert serves() == 1
    backend._sides.stores[1].pause()
    assert serves() == 0


def test_clearing_many_pools_ends_in_one_time(attach, monkeypatch):
    """It is called in the scheduler's thread."""
    backend = hybrid(attach, extra={"kvtier_set_deadline": 0.3})

    def silent(_connection, _layout, *, deadline, **_options):
        time.sleep(deadline)
        raise kvtier.DeadlineExceeded("silent", remedy="wait")

    monkeypatch.setattr(kvtier.client.Connection, "delete_namespace", silent)
    began = time.monotonic()
    backend.clear()
    assert time.monotonic() - began < 0.7
