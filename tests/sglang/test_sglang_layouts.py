"""What a host pool is to kvtier: which layouts are made of it, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pool_rig import IDENTITY, LAYERS, PAGE, PAGES, latent_pool, pool_with_heads, slots_of

import kvtier
from kvtier_sglang.layouts import Ranks, number_format, part_layouts
from kvtier_sglang.options import Options
from kvtier_sglang.pools import page_places, rows_of, shape_of

ALL = ["layer_first", "page_first", "page_first_direct", "page_head"]


def layouts(made, ranks=None, identity=IDENTITY, **changed):
    shape = replace(shape_of(made), **changed)
    return [part.layout for part in part_layouts(shape, identity, ranks or Ranks())]


def fingerprints(*args, **options):
    return [layout.fingerprint("t") for layout in layouts(*args, **options)]


@pytest.mark.parametrize("mem_layout", ALL)
def test_a_page_with_heads_is_two_objects_and_rows_are_views(mem_layout):
    pool = pool_with_heads(mem_layout)
    rows = rows_of(pool, shape_of(pool))
    for layout, buffer, row in zip(layouts(pool), pool.kv_buffer, rows, strict=True):
        assert len(row) == PAGES
        assert row[0].numel() * 2 == layout.raw_bytes == LAYERS * PAGE * 2 * 16 * 2
        assert row.data_ptr() == buffer.data_ptr()
        assert row[0].is_contiguous() == (mem_layout != "layer_first")


@pytest.mark.parametrize("mem_layout", ALL[:3])
def test_a_latent_page_is_one_object(mem_layout):
    pool = latent_pool(mem_layout)
    (layout,) = layouts(pool)
    assert layout.raw_bytes == LAYERS * PAGE * 80 * 2
    assert layout.segments[0].role is kvtier.Role.LATENT
    (row,) = rows_of(pool, shape_of(pool))
    assert row.shape[0] == PAGES


def test_keys_and_values_may_differ_in_size():
    pool = pool_with_heads("page_first_direct", dim=24, v_dim=16)
    assert [layout.raw_bytes for layout in layouts(pool)] == [
        LAYERS * PAGE * 2 * dim * 2 for dim in (24, 16)
    ]


def test_layouts_of_the_same_bytes_are_one_family_and_others_are_not():
    made = {mem_layout: tuple(fingerprints(pool_with_heads(mem_layout))) for mem_layout in ALL}
    assert made["layer_first"] == made["page_first_direct"]
    assert len(set(made.values())) == 3
    assert all(keys != values for keys, values in made.values())


@pytest.mark.parametrize(
    "change",
    [
        {"pool": "draft"},
        {"mem_layout": "page_head"},
        {"page_tokens": 8},
        {"layers": 4},
        {"heads": 4},
        {"key_dim": 32},
        {"row_form": "packed-fp8"},
    ],
    ids=str,
)
def test_every_field_of_the_pool_is_in_the_family(change):
    pool = pool_with_heads("page_first_direct")
    assert fingerprints(pool)[0] != fingerprints(pool, **change)[0]


@pytest.mark.parametrize(
    "change",
    [{"model_id": "n"}, {"weights_revision": "r2"}, {"kv_format": "float16"}],
    ids=str,
)
def test_every_field_of_the_model_is_in_the_family(change):
    pool = pool_with_heads("page_first_direct")
    assert fingerprints(pool)[0] != fingerprints(pool, identity=replace(IDENTITY, **change))[0]


def test_ranks_of_a_model_with_heads_are_shards_of_one_family():
    pool = pool_with_heads("page_first_direct")
    made = [layouts(pool, Ranks(tp_rank=rank, tp_size=2))[0] for rank in range(2)]
    assert made[0].fingerprint("t") == made[1].fingerprint("t")
    assert [layout.shard.index for layout in made] == [0, 1]
    assert [layout.shard.heads for layout in made] == [(0, 2), (2, 4)]
    assert {layout.shard_count for layout in made} == {2}
    assert made[0].fingerprint("t") != fingerprints(pool)[0]


def test_latent_pages_are_the_same_for_all_tensor_parallel_ranks():
    pool = latent_pool("page_first_direct")
    (one,), (two,) = layouts(pool), layouts(pool, Ranks(tp_rank=3, tp_size=8))
    assert one == two


def test_pipeline_stages_are_shards_by_layers():
    pool = pool_with_heads("page_first_direct")
    ranks = Ranks(pp_rank=1, pp_size=2, tp_rank=1, tp_size=2, model_layers=6)
    layout = layouts(pool, ranks, first_layer=3)[0]
    assert (layout.shard.index, layout.shard_count) == (3, 4)
    assert layout.shard.layers == (3, 6)
    with pytest.raises(kvtier.LayoutError, match="layers of the whole model"):
        layouts(pool, replace(ranks, model_layers=0))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layout": "page_unified"}, "--hicache-mem-layout page_unified is not one of"),
        ({"layout": "page_first_kv_split"}, "page_first_kv_split is not one of"),
        ({"kv_buffer": None}, "no buffer of its own"),
        ({"dcp_size": 2}, "decode context parallelism"),
        ({"stores_page_envelope": True}, "envelope"),
        ({"target_layer_num": 2}, "draft model"),
        ({"k_scale_host": None}, "MXFP8"),
    ],
    ids=str,
)
def test_pools_that_cannot_be_stored_are_refused_by_name(change, said):
    pool = pool_with_heads("page_first_direct")
    for name, value in change.items():
        setattr(pool, name, value)
    with pytest.raises(kvtier.LayoutError, match=said):
        shape_of(pool)


@pytest.mark.parametrize("mem_layout", ALL)
def test_a_pool_whose_keys_and_values_are_of_one_size_need_not_say_so(mem_layout):
    """As in SGLang up to 0.5.21."""
    pool = pool_with_heads(mem_layout)
    right = shape_of(pool)
    del pool.v_head_dim
    assert shape_of(pool) == right
    pool.kv_buffer = pool.kv_buffer[0]
    with pytest.raises(kvtier.LayoutError, match="has a buffer of"):
        rows_of(pool, shape_of(pool))


def test_a_pool_without_heads_is_refused_by_name():
    pool = pool_with_heads("page_first_direct")
    del pool.head_num
    with pytest.raises(kvtier.LayoutError, match="it has no head_num"):
        shape_of(pool)


def test_a_buffer_of_another_form_is_refused():
    pool = pool_with_heads("page_first_direct")
    pool.kv_buffer = pool.kv_buffer.transpose(2, 3)
    with pytest.raises(kvtier.LayoutError, match="page_first_direct would be"):
        rows_of(pool, shape_of(pool))


@pytest.mark.parametrize(
    ("stated", "pool_format", "itemsize", "name"),
    [
        ("auto", "bfloat16", 2, "bfloat16"),
        ("", "float16", 2, "float16"),
        ("fp8_e4m3", "uint8", 1, "float8_e4m3fn"),
        ("fp8_e5m2", "uint8", 1, "float8_e5m2"),
        ("bf16", "bfloat16", 2, "bfloat16"),
    ],
)
def test_the_format_of_the_numbers_is_that_of_the_model_and_not_of_the_pool(
    stated, pool_format, itemsize, name
):
    assert number_format(stated, pool_format, itemsize) == name


@pytest.mark.parametrize(
    ("stated", "pool_format", "itemsize", "said"),
    [
        ("auto", "uint8", 1, "does not say of which FP8"),
        ("nvfp4", "uint8", 1, "nvfp4"),
        ("mxfp8", "uint8", 1, "mxfp8"),
        ("fp8_e4m3", "bfloat16", 2, "2 bytes a number"),
    ],
)
def test_formats_that_cannot_be_told_or_stored_are_refused(stated, pool_format, itemsize, said):
    with pytest.raises(kvtier.LayoutError, match=said):
        number_format(stated, pool_format, itemsize)


def test_slots_are_whole_pages():
    assert page_places(slots_of([5, 0, 2]), PAGE, 3) == [5, 0, 2]
    for slots, count in [
        (slots_of([1])[:-1], 1),
        (slots_of([1, 2]), 1),
        (slots_of([1])[[0, 2, 1, 3]], 1),
        (torch.tensor([4, 5, 6, 3, 8, 9, 10, 11]), 2),
        (torch.arange(1, 5), 1),
    ]:
        with pytest.raises(kvtier.LayoutError, match="slots for"):
            page_places(slots, PAGE, count)


def test_options():
    given = {"backend_name": "kvtier", "interface_v1": 1, "kvtier_tenant": "a"}
    assert Options.of(given) == Options(tenant="a")
    assert Options.of(None) == Options()
    for wrong in ({"kvtier_tenant": 1}, {"kvtier_set_deadline": 0}, {"kvtier_model_layers": -1}):
        with pytest.raises(kvtier.errors.InvalidConfigValue, match=next(iter(wrong))):
            Options.of(wrong)
    with pytest.raises(kvtier.errors.UnknownConfigKey, match="kvtier_tennant"):
        Options.of({"kvtier_tennant": "a"})
