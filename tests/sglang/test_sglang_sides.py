"""Side pools: their families, what is refused, and pages to a real daemon and back."""

from __future__ import annotations

import signal
import time
from dataclasses import replace

import pytest
import torch
from pool_rig import (
    IDENTITY,
    PAGE,
    hashes,
    index_pool,
    latent_pool,
    pool_with_heads,
    states_pool,
    store_for,
)
from side_rig import LATENT, MODEL, POOLS, sides_for, transfer

import kvtier
from kvtier_sglang.layouts import Ranks
from kvtier_sglang.options import Options
from kvtier_sglang.side_pools import side_pool
from kvtier_sglang.sides import SidePools
from kvtier_sglang.store import StoreState


def prints(name, pool, model=MODEL):
    return [part.layout.fingerprint("t") for part in side_pool(name, pool, model).parts]


def buffers(name, pool):
    if name == "mamba":
        return [pool.temporal_buffer, *pool.conv_buffer, *pool.slot_state_buffers]
    if name == "indexer":
        return [pool.index_k_with_scale_buffer]
    return [pool.kv_buffer] if name == "draft" else list(pool.kv_buffer)


# -- families -------------------------------------------------------------------------------------


def test_a_side_pool_is_a_family_of_its_own():
    made = [prints(name, make(), model) for name, (make, model) in POOLS.items()]
    made.append(prints("draft_swa", pool_with_heads("page_first_direct")))
    primary = pool_with_heads("page_first_direct")
    made.append(prints("draft", primary))
    every = [one for family in made for one in family]
    assert len(set(every)) == len(every) == 2 + 3 + 1 + 1 + 2 + 2


@pytest.mark.parametrize(
    "change",
    [
        {"identity": replace(IDENTITY, model_id="n")},
        {"identity": replace(IDENTITY, weights_revision="r2")},
        {"identity": replace(IDENTITY, kv_format="float8_e4m3fn")},
    ],
    ids=["model", "weights", "kv format"],
)
@pytest.mark.parametrize("name", POOLS)
def test_every_field_of_the_model_is_in_every_family(name, change):
    make, model = POOLS[name]
    assert not set(prints(name, make(), model)) & set(
        prints(name, make(), replace(model, **change))
    )


@pytest.mark.parametrize(
    ("change", "model", "differing"),
    [
        ({"layers": 4}, MODEL, [True, True, False]),
        ({"conv": (6, 4)}, MODEL, [False, True, False]),
        ({}, replace(MODEL, page_tokens=2 * PAGE), [True] * 3),
        ({}, replace(MODEL, state_kernels="flashinfer"), [True] * 3),
        ({}, replace(MODEL, ranks=Ranks(tp_size=2)), [True] * 3),
    ],
    ids=["layers", "shape", "page size", "kernels", "ranks"],
)
def test_what_changes_a_state_is_in_its_family(change, model, differing):
    """Of its recurrence, its convolution, and what is beside its layers."""
    mine, other = prints("mamba", states_pool()), prints("mamba", states_pool(**change), model)
    assert [one != two for one, two in zip(mine, other, strict=True)] == differing


def test_drafts_of_other_draft_models_are_apart():
    pool = latent_pool("page_first_direct")
    assert prints("draft", pool, LATENT) != prints("draft", pool, replace(LATENT, draft="e"))
    same = replace(MODEL, draft="e")
    assert prints("swa", pool_with_heads("page_head")) == prints(
        "swa", pool_with_heads("page_head"), same
    )


def test_states_are_divided_among_ranks_also_where_kv_is_not():
    parts = [
        side_pool("mamba", states_pool(), replace(LATENT, ranks=Ranks(tp_rank=rank, tp_size=2)))
        for rank in range(2)
    ]
    shards = [[part.layout.shard.index for part in pool.parts] for pool in parts]
    assert shards == [[0] * 3, [1] * 3]
    indexers = [
        side_pool(
            "indexer",
            index_pool("page_first"),
            replace(LATENT, ranks=Ranks(tp_rank=rank, tp_size=2)),
        ).parts
        for rank in range(2)
    ]
    assert indexers[0] == indexers[1]


def test_a_draft_of_another_format_is_stored_as_what_it_is():
    model = replace(MODEL, stated_format="fp8_e4m3")
    made = side_pool("draft", pool_with_heads("page_first_direct"), model)
    assert made.parts[0].layout.segments[0].dtype == "bfloat16"


@pytest.mark.parametrize(
    ("name", "pool", "model", "said"),
    [
        ("deepseek_v4_c4", states_pool(), MODEL, "only swa, draft, draft_swa, indexer"),
        ("auxiliary_swa", pool_with_heads("page_first"), MODEL, "only swa, draft"),
        ("swa", pool_with_heads("page_first"), replace(MODEL, ranks=Ranks(pp_size=2)), "pipeline"),
        (
            "draft",
            pool_with_heads("page_first"),
            replace(LATENT, ranks=Ranks(tp_size=2)),
            "different heads",
        ),
        ("mamba", pool_with_heads("page_first"), MODEL, "it has no temporal_buffer, conv_buffer"),
        ("indexer", pool_with_heads("page_first"), LATENT, "it has no index_k_with_scale_buffer"),
        ("swa", states_pool(), MODEL, "it has no layer_num"),
        (
            "indexer",
            index_pool("page_first"),
            replace(MODEL, ranks=Ranks(tp_size=2)),
            "nobody says what of it each rank holds",
        ),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(name, pool, model, said):
    with pytest.raises(kvtier.LayoutError, match=said) as caught:
        side_pool(name, pool, model)
    assert "without --hicache-storage-backend" in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("mamba", {"layout": "layer_first"}, "its layout is layer_first"),
        ("mamba", {"page_size": 4}, "4 slots a page"),
        ("mamba", {"mtp_draft_buffer_infos": (1,)}, "draft model"),
        ("mamba", {"num_mamba_layers": 7}, "its temporal is of shape"),
        ("indexer", {"index_k_with_scale_buffer": None}, "no buffer of its own"),
        ("indexer", {"target_layer_num": 2}, "draft model"),
        ("indexer", {"layout": "layer_first"}, "in layout layer_first"),
        ("indexer", {"layout": "page_head"}, "in layout page_head"),
    ],
)
def test_pools_of_another_form_are_refused_by_name(name, changed, said):
    make, model = POOLS[name]
    pool = make()
    for field, value in changed.items():
        setattr(pool, field, value)
    with pytest.raises(kvtier.LayoutError, match=said):
        side_pool(name, pool, model)


# -- pages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POOLS)
def test_pages_come_back_to_their_places_and_nowhere_else(kv, name):
    one, pools = sides_for(kv, name)
    other, others = sides_for(kv, name, seed=9)
    before = [buffer.clone() for buffer in buffers(name, others[name])]
    assert one.set([transfer(name, hashes(3), [6, 1, 3])]) == {name: [True] * 3}
    asked = transfer(name, hashes(4), [5, 1, 2, 0])
    assert other.get([asked]) == {name: [True, True, True, False]}
    for mine, theirs, was in zip(
        buffers(name, pools[name]), buffers(name, others[name]), before, strict=True
    ):
        assert torch.equal(theirs[[5, 1, 2]], mine[[6, 1, 3]])
        assert torch.equal(theirs[[3, 4, 6, 7]], was[[3, 4, 6, 7]])


def test_an_indexer_by_layers_and_one_by_pages_have_the_same_pages(kv):
    made = [
        (pool, SidePools(kv, Options()))
        for pool in (index_pool("layer_first"), index_pool("page_first", seed=9))
    ]
    for pool, sides in made:
        sides.add(side_pool("indexer", pool, LATENT))
    assert made[0][1].set([transfer("indexer", hashes(2), [2, 5])]) == {"indexer": [True] * 2}
    assert made[1][1].get([transfer("indexer", hashes(2), [0, 1])]) == {"indexer": [True] * 2}
    mine, theirs = (pool.index_k_with_scale_buffer for pool, _ in made)
    assert torch.equal(theirs[:2, :, 0], mine[:, [2, 5]].transpose(0, 1))


def test_prefixes_are_what_all_pools_can_restore(kv):
    primary = store_for(kv, pool_with_heads("page_first_direct"), exists_deadline=5.0)
    sides, _ = sides_for(kv, "swa", "mamba")
    primary.set(hashes(6), list(range(6)))
    for page in (0, 1, 3, 4):
        sides.set([transfer("swa", hashes(6)[page : page + 1], [page])])
    for page in (1, 4):
        sides.set([transfer("mamba", hashes(6)[page : page + 1], [page])])
    window = transfer("swa", ["", ""], policy="trailing_pages")
    last = transfer("mamba", [""], policy="trailing_pages")
    found = sides.exists(primary, hashes(6), [window, last])
    assert (found.lengths, found.longest) == ([2, 5], 5)
    assert found.by_pool == {"kv": 6, "swa": 5, "mamba": 5}
    found = sides.exists(primary, hashes(6), [transfer("swa"), last])
    assert (found.lengths, found.by_pool) == ([2], {"kv": 6, "swa": 2, "mamba": 5})
    assert sides.exists(primary, hashes(6), []).lengths == [1, 2, 3, 4, 5, 6]
    found = sides.exists(primary, hashes(6, prompt=1), [last])
    assert (found.longest, found.by_pool) == (0, {})


@pytest.mark.parametrize(
    "asked",
    [transfer("draft", [""]), transfer("swa", [""], policy="block_groups")],
    ids=["a pool nobody registered", "a rule nobody knows"],
)
def test_what_is_not_known_restores_nothing(kv, asked):
    primary = store_for(kv, pool_with_heads("page_first_direct"))
    sides, _ = sides_for(kv, "swa")
    primary.set(hashes(2), [0, 1])
    sides.set([transfer("swa", hashes(2), [0, 1])])
    assert sides.exists(primary, hashes(2), [asked]).longest == 0


def test_every_pool_has_its_answer_whatever_is_asked(kv):
    sides, _ = sides_for(kv, "swa", "mamba")
    sides.set([transfer("mamba", hashes(1), [0])])
    cut = transfer("swa", hashes(2), [0, 1])
    cut.host_indices = cut.host_indices[:-1]
    asked = [cut, transfer("draft", hashes(2), [0, 1]), transfer("mamba", hashes(1), [3])]
    assert sides.get(asked) == {"swa": [False] * 2, "draft": [False] * 2, "mamba": [True]}
    assert sides.get([transfer("swa", hashes(2))]) == {"swa": [False] * 2}
    assert sides.get([transfer("swa")]) == {"swa": []}
    assert sides.set([transfer("draft", hashes(1), [0])]) == {"draft": [False]}


def test_a_part_of_a_state_that_is_gone_is_a_miss(kv):
    sides, _ = sides_for(kv, "mamba")
    sides.set([transfer("mamba", hashes(2), [0, 1])])
    part = sides.stores[0]._parts[1].namespace
    part.delete(part.keys_from(hashes(1)))
    asked = transfer("mamba", hashes(2)[:1], [3])
    assert sides.get([asked]) == {"mamba": [False]}
    assert sides.stores[0].present(hashes(3)) == [False, True, False]


def test_a_long_prompt_is_looked_up_behind_its_gaps(kv):
    sides, _ = sides_for(kv, "mamba")
    named = hashes(9000)
    places = [0, 4095, 8191, 8192, 8999]
    for place in places:
        assert sides.set([transfer("mamba", [named[place]], [0])]) == {"mamba": [True]}
    there = sides.stores[0].present(named)
    assert [place for place, is_there in enumerate(there) if is_there] == places


def test_an_update_of_the_weights_ends_states_too(kv):
    sides, _ = sides_for(kv, "mamba")
    (store,) = sides.stores
    sides.set([transfer("mamba", hashes(1), [0])])
    store.pause()
    assert store.state is StoreState.PAUSED
    assert sides.get([transfer("mamba", hashes(1), [1])]) == {"mamba": [False]}
    assert sides.set([transfer("mamba", hashes(1), [1])]) == {"mamba": [False]}
    store.resume("r2")
    assert sides.get([transfer("mamba", hashes(1), [1])]) == {"mamba": [False]}
    found = {item.weights_revision: item.pages for item in kv.status().namespaces}
    assert found == {"r1": 0, "r2": 0}


def test_ranks_have_states_of_their_own_and_count_only_together(kv):
    ranks = [
        sides_for(
            kv, "mamba", seed=rank, model=replace(MODEL, ranks=Ranks(tp_rank=rank, tp_size=2))
        )
        for rank in range(2)
    ]
    ranks[0][0].set([transfer("mamba", hashes(1), [0])])
    assert [sides.stores[0].present(hashes(1)) for sides, _ in ranks] == [[False], [False]]
    ranks[1][0].set([transfer("mamba", hashes(1), [0])])
    for sides, pools in ranks:
        assert sides.get([transfer("mamba", hashes(1), [3])]) == {"mamba": [True]}
        assert torch.equal(pools["mamba"].temporal_buffer[3], pools["mamba"].temporal_buffer[0])


def test_calls_for_many_pools_end_in_one_time(daemon):
    """With a daemon that is stopped, and memory that only it can read."""
    with kvtier.connect(daemon.url, plane="grpc") as kv:
        times = {f"{call}_deadline": 0.3 for call in ("exists", "get", "set")}
        sides, _ = sides_for(kv, "swa", "mamba", **times)
        primary = store_for(kv, pool_with_heads("page_first_direct"), **times)
        asked = [transfer("swa", hashes(2), [0, 1]), transfer("mamba", hashes(2), [0, 1])]
        daemon.signal(signal.SIGSTOP)
        try:
            for call in (
                lambda: sides.exists(primary, hashes(2), asked).longest,
                lambda: sides.get(asked)["mamba"][0],
                lambda: sides.set(asked)["swa"][0],
            ):
                began = time.monotonic()
                assert not call()
                assert time.monotonic() - began < 1.0
        finally:
            daemon.signal(signal.SIGCONT)
