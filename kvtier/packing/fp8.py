"""The fp8 codec: e4m3fn codes with one float32 scale per (layer, head) of each packed segment.

    amax   = the largest |x| of the segment's numbers of one layer and head
    scale  = 1 if amax == 0 else max(fl32(amax / 448), 2^-126)
    inv    = fl32(1 / scale)
    code   = RNE_e4m3fn(clamp(fl32(x * inv), -448, 448))
    decode = RNE_dtype(fl32(code * scale))

fl32 is one correctly rounded float32 operation: no fused multiply-add, no flush to zero, no fast
division. The formula is the format: x / scale instead of x * inv gives other codes. Numbers are
checked to be finite before anything else, because a cast alone turns infinity into 448 or NaN and
hides that the page was broken. Segments that are not packed keep their bytes, whatever they hold.

This module is the reference, in torch, for every device; other implementations must give identical
bytes. See kvtier/packing/geometry.py for where codes and scales lie. Torch is loaded on the first
call.

What goes in decides what comes out: a tensor gives a flat uint8 tensor on its device, anything else
(a bytes-like object, an ndarray) a flat uint8 ndarray. The result is always new memory. Input
numbers may have the segments' dtype or be the bytes as uint8, contiguous or not. Calls are
independent and safe from any thread, provided the thread has not turned on
torch.set_flush_denormal; the caller must own the input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, overload

import numpy as np
from numpy.typing import NDArray

from kvtier.core.page import Codec
from kvtier.errors import LayoutError
from kvtier.packing._torch import is_tensor, load_torch
from kvtier.packing.fp8_check import CODE_MAX, SCALE_MIN, check_payload, check_scales, refuse_at
from kvtier.packing.geometry import CODE_DTYPE, PagePlan, Span, plan_page
from kvtier.packing.payloads import check_bytes, host_bytes

if TYPE_CHECKING:
    import torch
    from typing_extensions import Buffer

    from kvtier.packing.layout import Layout

__all__ = ["check_payload", "pack", "unpack"]

_NAN_BITS: Final = 0x7F


@overload
def pack(layout: Layout, raw: torch.Tensor) -> torch.Tensor: ...
@overload
def pack(layout: Layout, raw: Buffer | NDArray[Any]) -> NDArray[np.uint8]: ...
def pack(
    layout: Layout, raw: torch.Tensor | Buffer | NDArray[Any]
) -> torch.Tensor | NDArray[np.uint8]:
    """The fp8 payload of a raw payload: `layout.fp8_bytes` bytes from `layout.raw_bytes`.

    Raises NonFinite, naming segment, layer and head, if a number to pack is infinite or NaN;
    PageSizeError for another size; LayoutError where fp8 is impossible or for numbers of a dtype
    that the layout does not have; MissingExtra without torch.
    """
    torch = load_torch()
    plan, source_plan = plan_page(layout, Codec.FP8), plan_page(layout, Codec.RAW)
    source = _flat_bytes(layout, raw, source_plan.nbytes, "the raw payload")
    payload = torch.zeros(plan.nbytes, dtype=torch.uint8, device=source.device)
    all_scales = []
    for span, source_span in zip(plan.spans, source_plan.spans, strict=True):
        part = source[source_span.offset : source_span.offset + source_span.nbytes]
        if span.is_packed:
            values = _typed(part, source_span).to(torch.float32)
            codes, scales = _pack_span(layout, span, values)
            all_scales.append(scales.reshape(-1))
            part = codes.reshape(-1).view(torch.uint8)
        payload[span.offset : span.offset + span.nbytes] = part
    payload[plan.scales_offset :] = torch.cat(all_scales).view(torch.uint8)
    return _result(payload, raw)


@overload
def unpack(layout: Layout, payload: torch.Tensor) -> torch.Tensor: ...
@overload
def unpack(layout: Layout, payload: Buffer | NDArray[Any]) -> NDArray[np.uint8]: ...
def unpack(
    layout: Layout, payload: torch.Tensor | Buffer | NDArray[Any]
) -> torch.Tensor | NDArray[np.uint8]:
    """The raw payload of an fp8 payload: `layout.raw_bytes` bytes, every packed number rounded.

    Raises what `check_payload` raises: a scale is never assumed, and no NaN comes out of a code.
    MissingExtra without torch.
    """
    torch = load_torch()
    plan, target_plan = plan_page(layout, Codec.FP8), plan_page(layout, Codec.RAW)
    source = _flat_bytes(layout, payload, plan.nbytes, "the fp8 payload")
    # A fresh tensor, so that the view as float32 is aligned wherever the payload begins.
    scales = source[plan.scales_offset :].clone().view(torch.float32)
    _check(layout, plan, source, scales)
    raw = torch.empty(target_plan.nbytes, dtype=torch.uint8, device=source.device)
    for span, target in zip(plan.spans, target_plan.spans, strict=True):
        part = source[span.offset : span.offset + span.nbytes]
        if span.is_packed:
            codes = _typed(part, span).to(torch.float32)
            values = codes * _spread(layout, span, scales)
            part = values.to(_dtype(target.dtype)).reshape(-1).view(torch.uint8)
        raw[target.offset : target.offset + target.nbytes] = part
    return _result(raw, payload)


def _pack_span(
    layout: Layout, span: Span, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes in storage order, scales as (layers, heads)) of float32 values in storage order."""
    torch = load_torch()
    is_finite = torch.isfinite(values)
    if not bool(is_finite.all()):
        first = int(torch.logical_not(is_finite).reshape(-1).to(torch.uint8).argmax())
        refuse_at(layout, span, first, f"the number {float(values.reshape(-1)[first])!r}")
    order = layout.storage_order
    amax = values.abs().amax(dim=(order.index("T"), order.index("D")), keepdim=True)
    # Tensors, not Python numbers: torch on CUDA divides by a number with its rounded reciprocal.
    code_max = torch.full_like(amax, CODE_MAX)
    one = torch.ones_like(amax)
    scale = torch.where(amax == 0, one, (amax / code_max).clamp(min=SCALE_MIN))
    inverse = one / scale
    scaled = (values * inverse).clamp(-CODE_MAX, CODE_MAX)
    codes = scaled.to(_dtype(CODE_DTYPE))
    kept = scale.permute([order.index(axis) for axis in "LHTD"])
    return codes, kept.reshape(span.scale_shape)


def _spread(layout: Layout, span: Span, scales: torch.Tensor) -> torch.Tensor:
    """The span's scales, shaped to multiply its numbers in storage order."""
    layers, heads = span.scale_shape
    mine = scales[span.scale_start : span.scale_start + layers * heads]
    spread = mine.reshape(layers, heads, 1, 1)
    return spread.permute(["LHTD".index(axis) for axis in layout.storage_order])


def _check(layout: Layout, plan: PagePlan, source: torch.Tensor, scales: torch.Tensor) -> None:
    """What check_payload does, with the codes left on their device."""
    torch = load_torch()
    check_scales(plan.spans, scales.cpu().numpy())
    for span in plan.spans:
        if not span.is_packed:
            continue
        codes = source[span.offset : span.offset + span.nbytes]
        is_nan = (codes & _NAN_BITS) == _NAN_BITS
        if bool(is_nan.any()):
            first = int(is_nan.to(torch.uint8).argmax())
            refuse_at(layout, span, first, "a code that stands for NaN")


def _flat_bytes(layout: Layout, given: Any, want: int, what: str) -> torch.Tensor:
    """`given` as a flat uint8 tensor on its device, after checking its size and dtype."""
    torch = load_torch()
    if is_tensor(given):
        known = {torch.uint8, *(_dtype(segment.dtype) for segment in layout.segments)}
        if given.dtype not in known:
            raise LayoutError(
                f"{what} is a tensor of {given.dtype}, the layout has "
                f"{', '.join(sorted({segment.dtype for segment in layout.segments}))}",
                remedy="pass the numbers in the dtype of the layout, or their bytes as uint8",
            )
        flat = given.detach().contiguous().reshape(-1).view(torch.uint8)
        check_bytes(flat.numel(), want, what)
        return flat
    data = host_bytes(given)
    check_bytes(data.nbytes, want, what)
    # A copy: torch cannot wrap read-only memory, and this one is small beside the arithmetic.
    return _tensor_of(data)


def _tensor_of(data: NDArray[np.uint8]) -> torch.Tensor:
    tensor: torch.Tensor = load_torch().from_numpy(data.copy())
    return tensor


def _result(made: torch.Tensor, given: object) -> torch.Tensor | NDArray[np.uint8]:
    """`made` in the kind that the caller gave."""
    return made if is_tensor(given) else np.asarray(made.numpy())


def _typed(part: torch.Tensor, span: Span) -> torch.Tensor:
    """The bytes of a span as numbers in storage order."""
    size = _dtype(span.dtype).itemsize
    if part.data_ptr() % size or part.storage_offset() % size:
        part = part.clone()
    return part.view(_dtype(span.dtype)).reshape(span.shape)


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(load_torch(), name)
    return dtype
