"""A layout is sound when it exists, and says for every shard and codec where each byte lies."""

from __future__ import annotations

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing_samples import family, layout, segment

from kvtier.core.page import Codec
from kvtier.errors import LayoutError
from kvtier.packing.layout import Layout, Role, ScaleRule, Segment, Shard

WHOLE = Shard(layers=(0, 4), heads=(0, 2))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_id": ""}, "model_id is empty"),
        ({"model_id": None}, "model_id is None"),
        ({"weights_revision": ""}, "weights_revision is empty"),
        ({"kv_compute": ""}, "kv_compute is empty"),
        ({"key_scheme": ""}, "key_scheme is empty"),
        ({"rope": "\ud800"}, "rope is not valid Unicode"),
        ({"model_id": "x" * 4097}, "model_id has 4097 bytes"),
        ({"adapter_id": "lora"}, "adapter_revision ''"),
        ({"adapter_revision": "7"}, "adapter_id ''"),
        ({"page_tokens": 0}, "page_tokens is 0"),
        ({"page_tokens": -1}, "page_tokens is -1"),
        ({"page_tokens": True}, "page_tokens is True"),
        ({"page_tokens": 64.0}, "page_tokens is 64.0"),
        ({"page_tokens": 65537}, "page_tokens is 65537"),
        ({"storage_order": "LTH"}, "storage_order 'LTH'"),
        ({"storage_order": "LTHH"}, "storage_order 'LTHH'"),
        ({"storage_order": "lthd"}, "storage_order 'lthd'"),
        ({"storage_order": 4}, "storage_order is 4"),
        ({"segments": ()}, "segments is empty"),
        ({"segments": [segment()]}, "segments is ["),
        ({"segments": ("k",)}, "segments is ('k',)"),
        ({"segments": (segment(), segment())}, "same name"),
        ({"shard_count": 0}, "shard_count is 0"),
        ({"shard": None}, "shard is None"),
        ({"shard": Shard(index=1, layers=(0, 4), heads=(0, 2))}, "shard.index 1"),
        ({"shard": Shard(layers=(0, 5), heads=(0, 2))}, "shard.layers (0, 5)"),
        ({"shard": Shard(layers=(0, 4), heads=(0, 3))}, "shard.heads (0, 3)"),
        ({"shard": Shard(layers=(0, 3), heads=(0, 2))}, "shard.layers (0, 3) leaves"),
        ({"shard": Shard(layers=(0, 4), heads=(1, 2))}, "shard.heads (1, 2) leaves"),
        ({"segments": (segment(dim=2**20, layers=512),)}, "a page of this shard has"),
    ],
)
def test_a_bad_field_is_named(change, named):
    good = {
        "model_id": "m",
        "weights_revision": "r",
        "kv_compute": "bfloat16",
        "page_tokens": 4,
        "segments": (segment(),),
        "shard": WHOLE,
    }
    Layout(**good)
    if change.get("segments") == (segment(dim=2**20, layers=512),):
        change["shard"] = Shard(layers=(0, 512), heads=(0, 2))
    with pytest.raises(LayoutError) as caught:
        Layout(**{**good, **change})
    assert named in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"name": ""}, "segment name is empty"),
        ({"role": 1}, "role is 1"),
        ({"scale_rule": 2}, "scale_rule is 2"),
        ({"dtype": "float64"}, "dtype 'float64'"),
        ({"dtype": "torch.bfloat16"}, "dtype 'torch.bfloat16'"),
        ({"layers": 0}, "layers is 0"),
        ({"heads": 0}, "heads is 0"),
        ({"dim": 0}, "dim is 0"),
        ({"dim": 2**20 + 1}, "dim is 1048577"),
        ({"dtype": "uint8"}, "scale_rule LAYER_HEAD on a KEY segment of uint8"),
        ({"dtype": "float8_e4m3fn"}, "LAYER_HEAD on a KEY segment of float8_e4m3fn"),
        ({"role": Role.ROPE}, "LAYER_HEAD on a ROPE segment"),
        ({"role": Role.OPAQUE}, "LAYER_HEAD on a OPAQUE segment"),
    ],
)
def test_a_bad_segment_is_refused(change, named):
    good = dataclasses.asdict(segment())
    with pytest.raises(LayoutError) as caught:
        Segment(**{**good, **change})
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"index": -1},
        {"index": "0"},
        {"layers": (2, 2)},
        {"layers": (-1, 2)},
        {"layers": [0, 2]},
        {"layers": (0, 1, 2)},
        {"heads": (1, 0)},
        {"heads": None},
    ],
)
def test_a_bad_shard_is_refused(change):
    with pytest.raises(LayoutError, match=f"shard.{next(iter(change))}"):
        Shard(**{"layers": (0, 4), "heads": (0, 2), **change})


def test_the_raw_payload_is_the_bytes_of_the_tensors():
    """An array element by element, at the place and in the order that the spans say."""
    for order in ("LTHD", "LHTD", "THLD", "DHTL"):
        page = layout(segment(), segment("v", Role.VALUE, dim=6), storage_order=order)
        sizes = {"L": 4, "T": 4, "H": 2}
        whole = {
            "k": np.arange(4 * 4 * 2 * 8, dtype=np.float32).reshape(4, 4, 2, 8),
            "v": -np.arange(4 * 4 * 2 * 6, dtype=np.float32).reshape(4, 4, 2, 6),
        }
        axes = ["LTHD".index(axis) for axis in order]
        payload = b"".join(
            np.ascontiguousarray(whole[name].transpose(axes).astype(ml_dtypes.bfloat16)).tobytes()
            for name in ("k", "v")
        )
        assert page.raw_bytes == page.payload_bytes(Codec.RAW) == len(payload)
        for span in page.spans(Codec.RAW):
            dim = span.segment.dim
            assert span.shape == tuple({**sizes, "D": dim}[axis] for axis in order)
            part = payload[span.offset : span.offset + span.nbytes]
            got = np.frombuffer(part, ml_dtypes.bfloat16).reshape(span.shape)
            for place in np.ndindex(got.shape):
                at = dict(zip(order, place, strict=True))
                want = whole[span.segment.name][at["L"], at["T"], at["H"], at["D"]]
                assert got[place] == np.asarray(want).astype(ml_dtypes.bfloat16)


def test_fp8_spans_and_scales():
    page = layout(
        segment("latent", Role.LATENT, heads=1, dim=7),
        segment("rope", Role.ROPE, heads=1, dim=3),
        page_tokens=3,
    )
    latent, rope = page.spans(Codec.FP8)
    assert (latent.offset, latent.nbytes, latent.dtype) == (0, 4 * 3 * 7, "float8_e4m3fn")
    assert (rope.offset, rope.nbytes, rope.dtype) == (84, 4 * 3 * 3 * 2, "bfloat16")
    assert (latent.is_packed, rope.is_packed) == (True, False)
    # 84 + 72 = 156 ends inside a block of 16; the scales start at the next one.
    assert page.scales_span == (160, 4)
    assert page.fp8_bytes == page.payload_bytes(Codec.FP8) == 176


def test_scales_are_ordered_by_segment_layer_head():
    k, v = layout(segment(), segment("v", Role.VALUE, heads=2)).spans(Codec.FP8)
    assert (k.scale_start, k.scale_shape) == (0, (4, 2))
    assert (v.scale_start, v.scale_shape) == (8, (4, 2))


@pytest.mark.parametrize(
    "only",
    [
        segment("extra", Role.OPAQUE),
        segment("rope", Role.ROPE),
        segment(dtype="float8_e5m2", scale_rule=ScaleRule.NONE),
        segment(dtype="uint8", scale_rule=ScaleRule.NONE),
        segment(scale_rule=ScaleRule.NONE),
    ],
)
def test_what_cannot_be_packed_says_so(only):
    page = layout(only)
    assert page.fp8_bytes == 0
    for ask in (
        lambda: page.payload_bytes(Codec.FP8),
        lambda: page.spans(Codec.FP8),
        lambda: page.scales_span,
    ):
        with pytest.raises(LayoutError, match="no segment"):
            ask()


def held(page: Layout) -> dict[str, tuple]:
    return {s.segment.name: (s.layers, s.heads) for s in page.spans(Codec.RAW)}


def test_each_role_is_cut_by_its_own_rule():
    first = family()
    assert held(first) == {
        "k": ((0, 2), (1, 2)),
        "v": ((0, 2), (1, 2)),
        "latent": ((0, 2), (0, 1)),
        "rope": ((0, 2), (0, 1)),
        "extra": ((0, 1), (0, 1)),
    }
    last = first.with_shard(Shard(index=3, layers=(2, 4), heads=(0, 1)))
    assert held(last) == {
        "k": ((2, 4), (0, 1)),
        "v": ((2, 4), (0, 1)),
        "latent": ((2, 4), (0, 1)),
        "rope": ((2, 4), (0, 1)),
        "draft_k": ((0, 1), (0, 1)),
        "draft_v": ((0, 1), (0, 1)),
        "extra": ((0, 1), (0, 1)),
    }
    assert first.fingerprint("t") == last.fingerprint("t")


def test_a_draft_with_fewer_heads_is_cut_in_proportion():
    segments = (segment(heads=8), segment("draft", Role.DRAFT_KEY, layers=1, heads=4))
    shard = Shard(index=1, layers=(0, 4), heads=(4, 8))
    assert held(layout(*segments, shard_count=2, shard=shard))["draft"] == ((0, 1), (2, 4))
    odd = Shard(index=1, layers=(0, 4), heads=(3, 6))
    with pytest.raises(LayoutError, match="'draft': heads 4 cannot be cut"):
        layout(*segments, shard_count=2, shard=odd)


def test_segments_of_unequal_depth_are_held_whole_or_not_cut():
    segments = (segment(layers=4), segment("window", Role.KEY, layers=2))
    assert held(layout(*segments))["window"] == ((0, 2), (0, 2))
    with pytest.raises(LayoutError, match="'window': layers 2 cannot be cut"):
        layout(*segments, shard_count=2, shard=Shard(layers=(0, 2), heads=(0, 2)))


def test_shard_must_be_given_when_there_are_several():
    with pytest.raises(LayoutError, match="shard_count is 2 and shard is missing"):
        layout(shard_count=2)


@given(
    layers=st.integers(1, 6),
    heads=st.integers(1, 6),
    dim=st.integers(1, 9),
    tokens=st.integers(1, 5),
    cut=st.data(),
)
def test_all_shards_together_are_the_whole_page(layers, heads, dim, tokens, cut):
    segments = (
        segment(layers=layers, heads=heads, dim=dim),
        segment("v", Role.VALUE, layers=layers, heads=heads, dim=dim, dtype="float32"),
    )
    whole = layout(*segments, page_tokens=tokens)
    layer_cut, head_cut = cut.draw(st.integers(0, layers)), cut.draw(st.integers(0, heads))
    layer_parts = [r for r in ((0, layer_cut), (layer_cut, layers)) if r[0] < r[1]]
    head_parts = [r for r in ((0, head_cut), (head_cut, heads)) if r[0] < r[1]]
    count = len(layer_parts) * len(head_parts)
    ranges = [(lr, hr) for lr in layer_parts for hr in head_parts]
    shards = [
        layout(
            *segments,
            page_tokens=tokens,
            shard_count=count,
            shard=Shard(index=i, layers=lr, heads=hr),
        )
        for i, (lr, hr) in enumerate(ranges)
    ]
    assert sum(s.raw_bytes for s in shards) == whole.raw_bytes
    assert sum(s.scales_span[1] for s in shards) == whole.scales_span[1]
    for shard in shards:
        for codec in Codec:
            end = 0
            for span in shard.spans(codec):
                assert span.offset == end
                assert math.prod(span.shape) * np.dtype(
                    {"bfloat16": "u2", "float32": "u4", "float8_e4m3fn": "u1"}[span.dtype]
                ).itemsize == (span.nbytes)
                end += span.nbytes
        offset, scales = shard.scales_span
        assert offset % 16 == 0
        assert 0 <= offset - end < 16
        assert shard.fp8_bytes == offset + 4 * scales


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"page_tokens": 8}, "page_tokens: 4 and 8"),
        ({"model_id": "other"}, "model_id: 'maker/model' and 'other'"),
        ({"storage_order": "LHTD"}, "storage_order: 'LTHD' and 'LHTD'"),
    ],
)
def test_difference_names_the_field_and_both_values(other, named):
    assert layout().difference(layout(**other)) == named


def test_difference_looks_into_segments_and_shards():
    base = layout()
    assert base.difference(layout()) is None
    assert base.difference(layout(segment())) == "segments: ['k', 'v'] and ['k']"
    other = layout(segment(), segment("v", Role.VALUE, dim=16))
    assert base.difference(other) == "segments['v'].dim: 8 and 16"
    moved = family().with_shard(Shard(index=2, layers=(2, 4), heads=(0, 1)))
    assert family().difference(moved).startswith("shard: Shard(index=1,")
