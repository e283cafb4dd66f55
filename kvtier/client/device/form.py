"""How a page of a layout lies in device memory, and the layout of a pool that keeps KV as fp8.

A pool page is one kvtier page, byte for byte, so that offload and load move it as it lies:

    plain   k (layers, page_tokens, heads, dim), v the same             in the layout's dtype
    fp8     k and v the same as e4m3fn codes, then float32 scales (2, layers, heads), zeros

Pure functions of a checked layout, safe from any thread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch

from kvtier.core.page import Codec
from kvtier.errors import LayoutError
from kvtier.packing.geometry import CODE_DTYPE, SCALE_BYTES
from kvtier.packing.layout import Layout, Role, ScaleRule, Segment

__all__ = ["FP8_COMPUTE", "PageForm", "fp8_layout"]

#: `kv_compute` of KV that was computed by attention over fp8 KV: another family than over bf16.
FP8_COMPUTE: Final = "fp8_e4m3"
_ORDER: Final = "LTHD"
_DTYPES: Final = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    CODE_DTYPE: torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageForm:
    """One shard's page: (2, layers, page_tokens, heads, dim) numbers of `dtype`, and for fp8 the
    scales from byte `scales_offset` on. `nbytes` is the whole page.
    """

    layers: int
    page_tokens: int
    heads: int
    dim: int
    dtype: torch.dtype
    nbytes: int
    scales_offset: int

    @property
    def is_fp8(self) -> bool:
        return self.dtype == torch.float8_e4m3fn

    @classmethod
    def of(cls, layout: Layout) -> PageForm:
        """Raises LayoutError for pages that are not k and v of one shape in storage order LTHD."""
        spans = layout.spans(Codec.RAW)
        roles = [span.segment.role for span in spans]
        is_fp8 = spans[0].dtype == CODE_DTYPE
        wanted = [Role.KEY, Role.VALUE] + ([Role.OPAQUE] if is_fp8 else [])
        alike = len({(span.shape, span.dtype) for span in spans[:2]}) == 1
        if roles != wanted or not alike or layout.storage_order != _ORDER:
            raise LayoutError(
                f"a device pool of segments {[s.segment.name for s in spans]} in storage order "
                f"{layout.storage_order!r}",
                remedy="use a layout of k and v with equal shapes and storage_order='LTHD'; "
                "fp8_layout() makes that of an fp8 pool",
            )
        if spans[0].dtype not in _DTYPES:
            raise LayoutError(
                f"a device pool of {spans[0].dtype}", remedy=f"use one of {', '.join(_DTYPES)}"
            )
        layers, tokens, heads, dim = spans[0].shape
        codes = spans[0].nbytes + spans[1].nbytes
        if is_fp8 and layout.raw_bytes - codes < _scale_bytes(layers, heads):
            raise LayoutError(
                f"{layout.raw_bytes - codes} bytes behind the codes, "
                f"{_scale_bytes(layers, heads)} are needed for the scales",
                remedy="make the layout with fp8_layout()",
            )
        return cls(
            layers=layers,
            page_tokens=tokens,
            heads=heads,
            dim=dim,
            dtype=_DTYPES[spans[0].dtype],
            nbytes=layout.raw_bytes,
            scales_offset=codes,
        )


def fp8_layout(layout: Layout) -> Layout:
    """The layout of the pages of an fp8 pool for a model with plain `layout`: a family of its own.

    k and v as e4m3fn codes, then one segment with a float32 scale per (k or v, layer, head), which
    belong to this shard's own heads. Raises LayoutError as `PageForm.of`, and where the scales
    would not be aligned.
    """
    form = PageForm.of(layout)
    codes = 2 * form.layers * form.page_tokens * form.heads * form.dim
    if form.is_fp8 or codes % SCALE_BYTES:
        raise LayoutError(
            f"no fp8 form of a layout of {form.dtype} with {codes} numbers a page",
            remedy="start from a bfloat16, float16 or float32 layout; the numbers of a page must "
            f"be a multiple of {SCALE_BYTES}",
        )
    made = [
        replace(segment, dtype=CODE_DTYPE, scale_rule=ScaleRule.NONE) for segment in layout.segments
    ]
    # A segment has a whole number of bytes a token: the page's scales spread over its tokens.
    dim = -(-_scale_bytes(form.layers, form.heads) // form.page_tokens)
    while form.page_tokens * dim % SCALE_BYTES:
        dim += 1
    made.append(
        Segment(
            name="scales",
            role=Role.OPAQUE,
            dtype="uint8",
            layers=1,
            heads=1,
            dim=dim,
            scale_rule=ScaleRule.NONE,
        )
    )
    return replace(layout, segments=tuple(made), kv_compute=FP8_COMPUTE)


def _scale_bytes(layers: int, heads: int) -> int:
    return 2 * layers * heads * SCALE_BYTES
