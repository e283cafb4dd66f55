"""The fp8 formula in torch, for every device: the reference that others give identical bytes to.

kvtier/packing/fp8.py has the formula and checks what comes in; here sources are flat uint8 tensors
of the right size, and so are the results, on the same device. Torch is loaded on the first call.
Calls are independent and safe from any thread that has not turned on torch.set_flush_denormal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn

from kvtier.core.page import Codec
from kvtier.errors import LayoutError
from kvtier.packing._torch import load_torch
from kvtier.packing.fp8_check import CODE_MAX, SCALE_MIN, check_scales, refuse_at
from kvtier.packing.geometry import CODE_DTYPE, PagePlan, Span, plan_page

if TYPE_CHECKING:
    import torch

    from kvtier.packing.layout import Layout

__all__ = ["check_codes", "flat_bytes", "pack", "quantized", "refuse_number", "unpack"]

_NAN_BITS: Final = 0x7F


def pack(layout: Layout, source: torch.Tensor) -> torch.Tensor:
    """The fp8 payload of a raw one. Raises NonFinite."""
    library = load_torch()
    plan, source_plan = plan_page(layout, Codec.FP8), plan_page(layout, Codec.RAW)
    payload: torch.Tensor = library.zeros(plan.nbytes, dtype=library.uint8, device=source.device)
    all_scales = []
    for span, source_span in zip(plan.spans, source_plan.spans, strict=True):
        part = source[source_span.offset : source_span.offset + source_span.nbytes]
        if span.is_packed:
            values = _typed(part, source_span).to(library.float32)
            codes, scales = _pack_span(layout, span, values)
            all_scales.append(scales.reshape(-1))
            part = codes.reshape(-1).view(library.uint8)
        payload[span.offset : span.offset + span.nbytes] = part
    payload[plan.scales_offset :] = library.cat(all_scales).view(library.uint8)
    return payload


def unpack(layout: Layout, source: torch.Tensor) -> torch.Tensor:
    """The raw payload of an fp8 one. Raises NonFinite."""
    library = load_torch()
    plan, target_plan = plan_page(layout, Codec.FP8), plan_page(layout, Codec.RAW)
    # A fresh tensor, so that the view as float32 is aligned wherever the payload begins.
    scales = source[plan.scales_offset :].clone().view(library.float32)
    check_codes(layout, plan, source, scales)
    raw: torch.Tensor = library.empty(target_plan.nbytes, dtype=library.uint8, device=source.device)
    for span, target in zip(plan.spans, target_plan.spans, strict=True):
        part = source[span.offset : span.offset + span.nbytes]
        if span.is_packed:
            codes = _typed(part, span).to(library.float32)
            values = codes * _spread(layout, span, scales)
            part = values.to(_dtype(target.dtype)).reshape(-1).view(library.uint8)
        raw[target.offset : target.offset + target.nbytes] = part
    return raw


def flat_bytes(layout: Layout, given: torch.Tensor, what: str) -> torch.Tensor:
    """The bytes of a tensor as a flat uint8 tensor on its device. Raises LayoutError for a dtype
    that the layout does not have.
    """
    torch = load_torch()
    known = {torch.uint8, *(_dtype(segment.dtype) for segment in layout.segments)}
    if given.dtype not in known:
        raise LayoutError(
            f"{what} is a tensor of {given.dtype}, the layout has "
            f"{', '.join(sorted({segment.dtype for segment in layout.segments}))}",
            remedy="pass the numbers in the dtype of the layout, or their bytes as uint8",
        )
    return given.detach().contiguous().reshape(-1).view(torch.uint8)


def quantized(values: torch.Tensor, over: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of finite float32 values; numbers that differ in the dimensions `over` alone
    share one scale. `scales` keeps these dimensions, with one entry each.
    """
    torch = load_torch()
    amax = values.abs().amax(dim=over, keepdim=True)
    # Tensors, not Python numbers: torch on CUDA divides by a number with its rounded reciprocal.
    code_max = torch.full_like(amax, CODE_MAX)
    one = torch.ones_like(amax)
    scale = torch.where(amax == 0, one, (amax / code_max).clamp(min=SCALE_MIN))
    inverse = one / scale
    scaled = (values * inverse).clamp(-CODE_MAX, CODE_MAX)
    return scaled.to(_dtype(CODE_DTYPE)), scale


def _pack_span(
    layout: Layout, span: Span, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes in storage order, scales as (layers, heads)) of float32 values in storage order."""
    torch = load_torch()
    if not bool(torch.isfinite(values).all()):
        refuse_number(layout, span, values)
    order = layout.storage_order
    codes, scale = quantized(values, (order.index("T"), order.index("D")))
    kept = scale.permute([order.index(axis) for axis in "LHTD"])
    return codes, kept.reshape(span.scale_shape)


def _spread(layout: Layout, span: Span, scales: torch.Tensor) -> torch.Tensor:
    """The span's scales, shaped to multiply its numbers in storage order."""
    layers, heads = span.scale_shape
    mine = scales[span.scale_start : span.scale_start + layers * heads]
    spread = mine.reshape(layers, heads, 1, 1)
    return spread.permute(["LHTD".index(axis) for axis in layout.storage_order])


def refuse_number(layout: Layout, span: Span, values: torch.Tensor) -> NoReturn:
    """Raises NonFinite for the first of the numbers, in storage order, that is not finite."""
    flat = values.reshape(-1)
    first = int(load_torch().logical_not(flat.isfinite()).to(dtype=_dtype("uint8")).argmax())
    refuse_at(layout, span, first, f"the number {float(flat[first])!r}")


def check_codes(layout: Layout, plan: PagePlan, source: torch.Tensor, scales: torch.Tensor) -> None:
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


def _typed(part: torch.Tensor, span: Span) -> torch.Tensor:
    """The bytes of a span as numbers in storage order."""
    size = _dtype(span.dtype).itemsize
    if part.data_ptr() % size or part.storage_offset() % size:
        part = part.clone()
    return part.view(_dtype(span.dtype)).reshape(span.shape)


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(load_torch(), name)
    return dtype
