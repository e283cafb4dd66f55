"""Small layouts and pages for the tests of this folder."""

from __future__ import annotations

import dataclasses

from kvtier.core.page import Codec, PageMeta, Tier
from kvtier.packing.checksum import payload_sum
from kvtier.packing.layout import Layout, Role, ScaleRule, Segment, Shard
from kvtier.packing.record import RecordHeader

KEY = bytes(range(32))
PARENT = bytes(range(32, 64))
FINGERPRINT = bytes(range(64, 96))


def segment(name="k", role=Role.KEY, **changes) -> Segment:
    fields = {
        "dtype": "bfloat16",
        "layers": 4,
        "heads": 2,
        "dim": 8,
        "scale_rule": ScaleRule.LAYER_HEAD,
    }
    if role in (Role.ROPE, Role.OPAQUE):
        fields["scale_rule"] = ScaleRule.NONE
    return Segment(name=name, role=role, **{**fields, **changes})


def layout(*segments: Segment, **changes) -> Layout:
    """Two bfloat16 segments k and v of 4 layers, 2 heads, 8 numbers, unless told otherwise."""
    chosen = segments or (segment(), segment("v", Role.VALUE))
    fields = {
        "model_id": "maker/model",
        "revision": "0123abcd",
        "page_tokens": 4,
        "kv_compute": "bfloat16",
    }
    return Layout.from_segments(chosen, **{**fields, **changes})


def one_head(dtype="bfloat16", dim=8, page_tokens=4, **changes) -> Layout:
    """One segment of one layer and one head: a page with one scale."""
    only = segment(dtype=dtype, layers=1, heads=1, dim=dim)
    return layout(only, page_tokens=page_tokens, **changes)


def family() -> Layout:
    """Every field set, every role in use, sharded: the base of the fingerprint tests."""
    return Layout(
        model_id="maker/model",
        weights_revision="0123abcd",
        adapter_id="lora",
        adapter_revision="7",
        kv_compute="bfloat16",
        rope='{"rope_theta":10000.0,"rope_type":"default"}',
        key_scheme="sha256-chain-u32",
        page_tokens=64,
        storage_order="LTHD",
        segments=(
            segment(),
            segment("v", Role.VALUE),
            segment("latent", Role.LATENT, heads=1, dim=32),
            segment("rope", Role.ROPE, heads=1, dim=16),
            segment("draft_k", Role.DRAFT_KEY, layers=1),
            segment("draft_v", Role.DRAFT_VALUE, layers=1),
            segment("extra", Role.OPAQUE, dtype="uint8", layers=1, heads=1, dim=5),
        ),
        shard_count=4,
        shard=Shard(index=1, layers=(0, 2), heads=(1, 2)),
    )


def identity(page_layout: Layout, codec: Codec, length: int) -> dict:
    """The keyword arguments of payload_sum and verify_payload for a page of `page_layout`."""
    return {
        "key": KEY,
        "fingerprint": FINGERPRINT,
        "namespace_generation": 3,
        "shard": page_layout.shard.index,
        "codec": codec,
        "length": length,
    }


def meta_of(page_layout: Layout, payload, codec=Codec.RAW, **changes) -> PageMeta:
    """The meta that the maker of `payload` sends with it."""
    length = memoryview(payload).nbytes
    made = payload_sum(payload, **identity(page_layout, codec, length))
    meta = PageMeta(key=KEY, length=length, codec=codec, payload_sum=made, parent=PARENT, depth=1)
    return dataclasses.replace(meta, **changes)


def header(**changes) -> RecordHeader:
    fields = {
        "fingerprint": FINGERPRINT,
        "namespace_generation": 3,
        "shard": 5,
        "key": KEY,
        "length": 2_097_153,
        "codec": Codec.FP8,
        "lossy": True,
        "payload_sum": bytes(range(96, 112)),
        "origin_sum": bytes(range(112, 128)),
        "generation": 0x1122334455667788,
        "sequence": 0x0102030405060708,
        "tier": Tier.NVME,
        "slot": 2**52 - 1,
        "parent": PARENT,
        "depth": 77,
        "session": "séance-1",
        "ttl_ms": 600_000,
        "priority": -2,
        "boot_id": 2**64 - 1,
        "created_ms": 1_700_000_000_123,
    }
    return RecordHeader(**{**fields, **changes})
