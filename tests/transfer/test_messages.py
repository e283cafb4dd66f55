"""A layout goes through its message unchanged, and a message that cannot be is refused by field."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import LayoutError
from kvtier.packing.layout import Layout, Role, ScaleRule, Segment, Shard
from kvtier.transfer.messages import (
    layout_from_proto,
    layout_to_proto,
    shard_from_proto,
    shard_to_proto,
)
from kvtier.v1 import page_pb2

names = st.text(min_size=1, max_size=12)


@st.composite
def layouts(draw):
    layers, heads = draw(st.integers(1, 80)), draw(st.integers(1, 16))
    dtype = draw(st.sampled_from(["bfloat16", "float16", "float32"]))
    rule = draw(st.sampled_from(list(ScaleRule)))
    segments = tuple(
        Segment(
            name=name,
            role=role,
            dtype=dtype,
            layers=layers,
            heads=heads,
            dim=draw(st.integers(1, 256)),
            scale_rule=rule,
        )
        for name, role in (("k", Role.KEY), ("v", Role.VALUE))
    )
    layer_start = draw(st.integers(0, layers - 1))
    head_start = draw(st.integers(0, heads - 1))
    adapter = draw(st.sampled_from([("", ""), ("lora", "r2")]))
    return Layout(
        model_id=draw(names),
        weights_revision=draw(names),
        adapter_id=adapter[0],
        adapter_revision=adapter[1],
        kv_compute=draw(names),
        rope=draw(st.text(max_size=12)),
        key_scheme=draw(names),
        page_tokens=draw(st.integers(1, 256)),
        storage_order="".join(draw(st.permutations("LTHD"))),
        segments=segments,
        shard_count=8,
        shard=Shard(
            index=draw(st.integers(0, 7)),
            layers=(layer_start, draw(st.integers(layer_start + 1, layers))),
            heads=(head_start, draw(st.integers(head_start + 1, heads))),
        ),
    )


@given(layout=layouts())
def test_round_trip(layout):
    message = page_pb2.Layout.FromString(layout_to_proto(layout).SerializeToString())
    shard = page_pb2.Shard.FromString(shard_to_proto(layout.shard).SerializeToString())
    back = layout_from_proto(message, shard)
    assert back == layout
    assert back.fingerprint("t", b"s") == layout.fingerprint("t", b"s")
    assert shard_from_proto(shard) == layout.shard


@pytest.fixture
def message():
    return page_pb2.Layout(
        model_id="m",
        weights_revision="w",
        kv_compute="bfloat16",
        key_scheme="sha256-chain-u32",
        page_tokens=4,
        storage_order="LTHD",
        segments=[
            page_pb2.Segment(
                name="k", role=1, dtype="bfloat16", layers=2, heads=2, dim=8, scale_rule=2
            )
        ],
        shard_count=1,
    )


SHARD = page_pb2.Shard(layer_end=2, head_end=2)


def test_unknown_enum_values_name_their_field(message):
    assert layout_from_proto(message, SHARD).segments[0].role is Role.KEY
    message.segments[0].role = 99
    with pytest.raises(LayoutError, match=r"layout.segments\[0\].role is 99"):
        layout_from_proto(message, SHARD)
    message.segments[0].role = 1
    message.segments[0].scale_rule = 0
    with pytest.raises(LayoutError, match=r"layout.segments\[0\].scale_rule is 0"):
        layout_from_proto(message, SHARD)


def test_an_empty_message_is_a_layout_error():
    with pytest.raises(LayoutError):
        layout_from_proto(page_pb2.Layout(), page_pb2.Shard())
    with pytest.raises(LayoutError):
        shard_from_proto(page_pb2.Shard(layer_start=3, layer_end=2, head_end=1))
