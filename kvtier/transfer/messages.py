"""Layouts, shards and device pools as protobuf messages, and back.

Promise: a layout that went through a message is equal to the one that went in. What comes in is
checked by the layout's own rules; a number that names no known enum value is a LayoutError naming
its field, never a guess.

Functions without state: usable from any thread.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, TypeVar

from kvtier.errors import LayoutError
from kvtier.packing.layout import Layout, Role, ScaleRule, Segment, Shard
from kvtier.transfer.planes.values import PoolReport
from kvtier.v1 import page_pb2 as pb

__all__ = [
    "layout_from_proto",
    "layout_to_proto",
    "pool_from_proto",
    "pool_to_proto",
    "shard_from_proto",
    "shard_to_proto",
]

E = TypeVar("E", bound=IntEnum)


#: Far above what models have; bounds the work that one OpenNamespace can ask for.
_SEGMENTS_MAX = 256


def layout_to_proto(layout: Layout) -> pb.Layout:
    """Everything of `layout` but its shard, which travels beside it."""
    return pb.Layout(
        model_id=layout.model_id,
        weights_revision=layout.weights_revision,
        adapter_id=layout.adapter_id,
        adapter_revision=layout.adapter_revision,
        kv_compute=layout.kv_compute,
        rope=layout.rope,
        key_scheme=layout.key_scheme,
        page_tokens=layout.page_tokens,
        storage_order=layout.storage_order,
        segments=[_segment_to_proto(segment) for segment in layout.segments],
        shard_count=layout.shard_count,
    )


def shard_to_proto(shard: Shard) -> pb.Shard:
    return pb.Shard(
        index=shard.index,
        layer_start=shard.layers[0],
        layer_end=shard.layers[1],
        head_start=shard.heads[0],
        head_end=shard.heads[1],
    )


def layout_from_proto(layout: pb.Layout, shard: pb.Shard) -> Layout:
    """Raises LayoutError naming the field that cannot be."""
    if len(layout.segments) > _SEGMENTS_MAX:
        raise LayoutError(
            f"layout.segments has {len(layout.segments)} entries, the limit is {_SEGMENTS_MAX}",
            remedy="describe a page by tensors, not by rows of them",
        )
    return Layout(
        model_id=layout.model_id,
        weights_revision=layout.weights_revision,
        adapter_id=layout.adapter_id,
        adapter_revision=layout.adapter_revision,
        kv_compute=layout.kv_compute,
        rope=layout.rope,
        key_scheme=layout.key_scheme,
        page_tokens=layout.page_tokens,
        storage_order=layout.storage_order,
        segments=tuple(
            _segment_from_proto(segment, f"layout.segments[{index}]")
            for index, segment in enumerate(layout.segments)
        ),
        shard_count=layout.shard_count,
        shard=shard_from_proto(shard),
    )


def shard_from_proto(shard: pb.Shard) -> Shard:
    """Raises LayoutError for a range that cannot be."""
    return Shard(
        index=shard.index,
        layers=(shard.layer_start, shard.layer_end),
        heads=(shard.head_start, shard.head_end),
    )


def pool_to_proto(pool: PoolReport) -> pb.DevicePool:
    return pb.DevicePool(
        name=pool.name,
        device=pool.device,
        fingerprint=pool.fingerprint,
        page_bytes=pool.page_bytes,
        pages=pool.pages,
        pages_held=pool.held,
        pages_draining=pool.draining,
        pages_pinned=pool.pinned,
    )


def pool_from_proto(message: pb.DevicePool) -> PoolReport:
    """As it came; nothing is checked."""
    return PoolReport(
        name=message.name,
        device=message.device,
        fingerprint=message.fingerprint,
        page_bytes=message.page_bytes,
        pages=message.pages,
        held=message.pages_held,
        draining=message.pages_draining,
        pinned=message.pages_pinned,
    )


def _segment_to_proto(segment: Segment) -> pb.Segment:
    return pb.Segment(
        name=segment.name,
        role=_number(segment.role),
        dtype=segment.dtype,
        layers=segment.layers,
        heads=segment.heads,
        dim=segment.dim,
        scale_rule=_number(segment.scale_rule),
    )


def _segment_from_proto(segment: pb.Segment, field: str) -> Segment:
    return Segment(
        name=segment.name,
        role=_enum(Role, segment.role, f"{field}.role"),
        dtype=segment.dtype,
        layers=segment.layers,
        heads=segment.heads,
        dim=segment.dim,
        scale_rule=_enum(ScaleRule, segment.scale_rule, f"{field}.scale_rule"),
    )


def _number(member: IntEnum) -> Any:
    """The same number as a proto enum, which the generated types tell apart from every int."""
    return int(member)


def _enum(kind: type[E], number: int, field: str) -> E:
    try:
        return kind(number)
    except ValueError:
        known = ", ".join(f"{member.name} ({member.value})" for member in kind)
        raise LayoutError(
            f"{field} is {number}, which this version does not know",
            remedy=f"use one of {known}, or a daemon and client of the same version",
        ) from None
