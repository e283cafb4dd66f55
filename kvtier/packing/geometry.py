"""Where each segment lies in a payload, for one shard and codec.

The raw payload is the shard's part of each segment, one after the other, each in `storage_order`
without gaps: for the segments (k, v) in bfloat16 it is exactly the bytes of the two tensors. The
fp8 payload has the same order, one byte a number where a segment is packed and the raw bytes where
it is kept; then zeros up to a multiple of 16; then the float32 scales of all packed segments,
ordered by segment, layer, head.

Pure functions of a checked layout; plans are cached, so asking again is cheap.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Final

from kvtier.core.page import Codec
from kvtier.errors import LayoutError
from kvtier.packing.dtypes import DTYPE_BYTES
from kvtier.packing.segments import Role, Segment, Shard, check_kind

if TYPE_CHECKING:
    from kvtier.packing.layout import Layout

__all__ = [
    "CODE_DTYPE",
    "SCALES_ALIGN",
    "PagePlan",
    "Span",
    "check_shard",
    "model_heads",
    "model_layers",
    "plan_page",
    "whole_shard",
]

CODE_DTYPE: Final = "float8_e4m3fn"
SCALES_ALIGN: Final = 16
SCALE_BYTES: Final = 4
PAYLOAD_BYTES_MAX: Final = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The place of one segment in a payload.

    `shape` is the shape as stored, that is in the layout's `storage_order`; `dtype` the format as
    stored. `layers` and `heads` are the half-open ranges, in the whole model's numbers, that this
    shard holds. `is_packed`: the numbers are codes whose scales lie in the payload's scale block
    from `scale_start`.
    """

    segment: Segment
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    layers: tuple[int, int]
    heads: tuple[int, int]
    is_packed: bool
    scale_start: int = 0

    @property
    def scale_shape(self) -> tuple[int, int]:
        """(layers, heads) of this shard; only meaningful where `is_packed`."""
        return self.layers[1] - self.layers[0], self.heads[1] - self.heads[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePlan:
    """All spans of a payload, its size, and the place of the scales (`scales_count` 0: there are
    none).
    """

    spans: tuple[Span, ...]
    nbytes: int
    scales_offset: int
    scales_count: int


def model_layers(segments: tuple[Segment, ...]) -> int:
    """Layers of the main model: what Shard.layers is a range of."""
    return max(segment.layers for segment in _main(segments))


def model_heads(segments: tuple[Segment, ...]) -> int:
    """KV heads of the main model: what Shard.heads is a range of."""
    main = _main(segments)
    cut = [segment.heads for segment in main if segment.role.is_cut_by_heads]
    return max(cut or [segment.heads for segment in main])


def whole_shard(segments: tuple[Segment, ...]) -> Shard:
    """The shard of a family that is not sharded."""
    return Shard(layers=(0, model_layers(segments)), heads=(0, model_heads(segments)))


@lru_cache(maxsize=256)
def plan_page(layout: Layout, codec: Codec) -> PagePlan:
    """Raises LayoutError for FP8 if the shard holds nothing that can be packed."""
    spans: list[Span] = []
    offset = scales = 0
    for segment in layout.segments:
        held = _held(layout, segment)
        if held is None:
            continue
        layers, heads = held
        sizes = {
            "L": layers[1] - layers[0],
            "T": layout.page_tokens,
            "H": heads[1] - heads[0],
            "D": segment.dim,
        }
        shape = tuple(sizes[axis] for axis in layout.storage_order)
        is_packed = codec == Codec.FP8 and segment.is_packable
        dtype = CODE_DTYPE if is_packed else segment.dtype
        span = Span(
            segment=segment,
            offset=offset,
            nbytes=prod(shape) * DTYPE_BYTES[dtype],
            shape=shape,
            dtype=dtype,
            layers=layers,
            heads=heads,
            is_packed=is_packed,
            scale_start=scales,
        )
        spans.append(span)
        offset += span.nbytes
        scales += prod(span.scale_shape) if is_packed else 0
    if codec == Codec.FP8 and not scales:
        raise LayoutError(
            "no segment of this layout can be packed as fp8",
            remedy="use the raw codec, or give a bfloat16, float16 or float32 segment "
            "ScaleRule.LAYER_HEAD",
        )
    scales_offset = -(-offset // SCALES_ALIGN) * SCALES_ALIGN if scales else offset
    return PagePlan(
        spans=tuple(spans),
        nbytes=scales_offset + SCALE_BYTES * scales,
        scales_offset=scales_offset,
        scales_count=scales,
    )


def check_shard(layout: Layout) -> None:
    """Raises LayoutError unless each segment of the layout can be cut to its shard."""
    check_kind("shard", layout.shard, Shard)
    shard, segments = layout.shard, layout.segments
    totals = {"layers": model_layers(segments), "heads": model_heads(segments)}
    if shard.index >= layout.shard_count:
        raise LayoutError(
            f"shard.index {shard.index} with a shard_count of {layout.shard_count}",
            remedy="shards are numbered from 0 to shard_count - 1",
        )
    for field, total in totals.items():
        start, end = getattr(shard, field)
        if end > total:
            raise LayoutError(
                f"shard.{field} ({start}, {end}) lies outside the model, which has {total} {field}",
                remedy=f"give ranges inside (0, {total}); latent and rope count as one head",
            )
        if layout.shard_count == 1 and (start, end) != (0, total):
            raise LayoutError(
                f"shard.{field} ({start}, {end}) leaves {field} of (0, {total}) uncovered although "
                "shard_count is 1",
                remedy="leave out shard, or set shard_count to the number of shards",
            )
    for segment in segments:
        _check_cut(layout, segment, totals)
    size = plan_page(layout, Codec.RAW).nbytes
    if not 0 < size <= PAYLOAD_BYTES_MAX:
        raise LayoutError(
            f"a page of this shard has {size} bytes",
            remedy=f"a page has 1 to {PAYLOAD_BYTES_MAX} bytes: change page_tokens or the shard",
        )


def _check_cut(layout: Layout, segment: Segment, totals: dict[str, int]) -> None:
    shard, role = layout.shard, segment.role
    is_cut_by_layers = not role.is_draft and role is not Role.OPAQUE
    if (
        is_cut_by_layers
        and shard.layers != (0, totals["layers"])
        and segment.layers != totals["layers"]
    ):
        raise LayoutError(
            f"segment {segment.name!r}: layers {segment.layers} cannot be cut by shard.layers, "
            f"a range of {totals['layers']}",
            remedy="a model cut by layers needs segments with equal layers; store the others under "
            "another layout",
        )
    if role.is_cut_by_heads and any(edge * segment.heads % totals["heads"] for edge in shard.heads):
        raise LayoutError(
            f"segment {segment.name!r}: heads {segment.heads} cannot be cut at {shard.heads} of "
            f"{totals['heads']} heads",
            remedy="choose shard.heads so that each segment is cut between two of its heads",
        )


def _held(layout: Layout, segment: Segment) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """The segment's layers and heads that the shard holds, None for none of them."""
    shard = layout.shard
    layers, heads = (0, segment.layers), (0, segment.heads)
    last = model_layers(layout.segments)
    if segment.role.is_draft:
        # The draft model runs where the main model's last hidden states are.
        if shard.layers[1] != last:
            return None
    elif segment.role is not Role.OPAQUE and shard.layers != (0, last):
        layers = shard.layers
    if segment.role.is_cut_by_heads:
        total = model_heads(layout.segments)
        heads = (shard.heads[0] * segment.heads // total, shard.heads[1] * segment.heads // total)
    return layers, heads


def _main(segments: tuple[Segment, ...]) -> list[Segment]:
    main = [s for s in segments if not s.role.is_draft and s.role is not Role.OPAQUE]
    return main or list(segments)
