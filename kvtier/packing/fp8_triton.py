"""The fp8 codec for CUDA memory, in Triton, for NVIDIA devices.

No GPU has run this yet: it was compiled to PTX and read, and its arithmetic was run in Triton's
interpreter on a CPU. The tests of tests/packing compare it with the reference wherever there is a
device.

Promise: the bytes of kvtier/packing/fp8_torch.py. What could differ is written in PTX: `mul.rn`,
`add.rn` and `div.rn` are correctly rounded, are never contracted to a fused multiply-add, and
without `.ftz` keep subnormals. Everything else is done on bits, as in fp8_kernels.py.

Sources are flat uint8 tensors of the right size on a CUDA device; results are new ones there. Rows
of the numbers of one (layer, head) are what the kernels see; torch moves other storage orders there
and back. Calls wait for the device, to refuse numbers that are not finite. Importing this module
loads torch and triton, and raises ImportError where torch is not built for CUDA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch
import triton
import triton.language as tl

from kvtier.core.page import Codec
from kvtier.packing.fp8_torch import check_codes, refuse_number
from kvtier.packing.geometry import Span, plan_page

if TYPE_CHECKING:
    from kvtier.packing.layout import Layout

__all__ = ["pack", "unpack"]

if torch.version.cuda is None:
    raise ImportError("torch is not built for CUDA; this module is written in its PTX")

_BLOCK: Final = 1024


class _Format(NamedTuple):
    words: torch.dtype
    kind: int
    infinity: int


#: The type that a number's bits are seen as, what the kernels branch on when they are compiled,
#: and what infinity is.
_FORMATS: Final = {
    "bfloat16": _Format(torch.int16, 0, 0x7F80),
    "float16": _Format(torch.int16, 1, 0x7C00),
    "float32": _Format(torch.int32, 2, 0x7F800000),
}

# -- kernels ---------------------------------------------------------------------------------------
# Without annotations but for constants: Triton would look them up.


@triton.jit
def _multiply(left, right):
    return tl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [left, right], tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _add(left, right):
    return tl.inline_asm_elementwise(
        "add.rn.f32 $0, $1, $2;", "=f,f,f", [left, right], tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _divide(left, right):
    return tl.inline_asm_elementwise(
        "div.rn.f32 $0, $1, $2;", "=f,f,f", [left, right], tl.float32, is_pure=True, pack=1
    )


@triton.jit
def _rounded(bits, places: tl.constexpr):
    """Without the last places, to nearest, ties to even."""
    return (bits + ((1 << (places - 1)) - 1) + ((bits >> places) & 1)) >> places


@triton.jit
def _size(word, kind: tl.constexpr):
    """The bits without the sign: they order as the numbers do."""
    mask: tl.constexpr = 0x7FFFFFFF if kind == 2 else 0x7FFF
    return word.to(tl.int32) & mask


@triton.jit
def _widen(word, kind: tl.constexpr):
    """The float32 of a number's bits, exactly."""
    bits = word.to(tl.int32)
    if kind == 0:
        bits = bits << 16
    if kind == 1:
        size = bits & 0x7FFF
        small = _multiply(size.to(tl.float32), 5.9604644775390625e-08)  # 2^-24
        normal = (size << 13) + 0x38000000  # bias 127 for 15
        exact = tl.where(size >= 0x400, normal, small.to(tl.int32, bitcast=True))
        bits = exact | ((bits & 0x8000) << 16)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _narrow(value, kind: tl.constexpr):
    """The float32 rounded to the format, which it does not exceed: its bits are the lowest."""
    bits = value.to(tl.int32, bitcast=True)
    if kind == 0:
        bits = _rounded(bits, 16)
    if kind == 1:
        size = bits & 0x7FFFFFFF
        small = _add(size.to(tl.float32, bitcast=True), 0.5).to(tl.int32, bitcast=True) - 0x3F000000
        word = tl.where(size >= 0x38800000, _rounded(size, 13) - 0x1C000, small)
        bits = word | ((bits >> 16) & 0x8000)
    return bits


@triton.jit
def _encode(value):
    """The e4m3fn code of a float32, clamped to 448 first."""
    bits = value.to(tl.int32, bitcast=True)
    size = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)
    small = _add(size.to(tl.float32, bitcast=True), 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size >= 0x3C800000, _rounded(size, 20) - 960, small)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _decode(byte):
    """The float32 of a code that is not NaN, exactly."""
    code = byte.to(tl.int32)
    size = code & 0x7F
    small = _multiply(size.to(tl.float32), 0.001953125).to(tl.int32, bitcast=True)  # 2^-9
    bits = tl.where(size >= 8, (size << 20) + 0x3C000000, small)
    return (bits | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _pack_rows(
    words, codes, scales, sizes, count,
    kind: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, block)
    most = tl.zeros([block], tl.int32)
    for start in range(0, count, block):
        place = start + lane
        word = tl.load(words + row * count + place, mask=place < count, other=0)
        most = tl.maximum(most, _size(word, kind))
    largest = tl.zeros([block], tl.int32) + tl.max(most, axis=0)
    ratio = _divide(_widen(largest, kind), 448.0).to(tl.int32, bitcast=True)
    # Positive numbers order as their bits do: 2^-126 at least, and 1 for a row of zeros.
    scale = tl.where(largest == 0, 0x3F800000, tl.maximum(ratio, 0x00800000))
    scale = scale.to(tl.float32, bitcast=True)
    tl.store(scales + row + lane, scale, mask=lane == 0)
    tl.store(sizes + row + lane, largest, mask=lane == 0)
    inverse = _divide(1.0, scale)
    for start in range(0, count, block):
        place = start + lane
        word = tl.load(words + row * count + place, mask=place < count, other=0)
        code = _encode(_multiply(_widen(word, kind), inverse))
        tl.store(codes + row * count + place, code, mask=place < count)


@triton.jit
def _unpack_rows(codes, words, scales, count, kind: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * block + tl.arange(0, block)
    code = tl.load(codes + row * count + place, mask=place < count, other=0)
    scale = tl.load(scales + row)
    word = _narrow(_multiply(_decode(code), scale), kind)
    tl.store(words + row * count + place, word.to(words.dtype.element_ty), mask=place < count)


# -- pages -----------------------------------------------------------------------------------------


def pack(layout: Layout, source: torch.Tensor) -> torch.Tensor:
    """The fp8 payload of a raw one. Raises NonFinite."""
    plan, source_plan = plan_page(layout, Codec.FP8), plan_page(layout, Codec.RAW)
    payload = torch.zeros(plan.nbytes, dtype=torch.uint8, device=source.device)
    all_scales = torch.empty(plan.scales_count, dtype=torch.float32, device=source.device)
    for span, source_span in zip(plan.spans, source_plan.spans, strict=True):
        part = source[source_span.offset : source_span.offset + source_span.nbytes]
        target = payload[span.offset : span.offset + span.nbytes]
        if not span.is_packed:
            target[:] = part
            continue
        form = _FORMATS[source_span.dtype]
        words = _rows(layout, span, _as(part, form.words))
        rows, count = words.shape
        codes = torch.empty((rows, count), dtype=torch.uint8, device=source.device)
        sizes = torch.empty(rows, dtype=torch.int32, device=source.device)
        scales = all_scales[span.scale_start : span.scale_start + rows]
        with torch.cuda.device(source.device):
            _pack_rows[(rows,)](words, codes, scales, sizes, count, form.kind, _BLOCK)
        if int(sizes.max()) >= form.infinity:
            refuse_number(layout, span, _as(part, getattr(torch, source_span.dtype)))
        target[:] = _from_rows(layout, span, codes).reshape(-1)
    payload[plan.scales_offset :] = all_scales.view(torch.uint8)
    return payload


def unpack(layout: Layout, source: torch.Tensor) -> torch.Tensor:
    """The raw payload of an fp8 one. Raises NonFinite."""
    plan, target_plan = plan_page(layout, Codec.FP8), plan_page(layout, Codec.RAW)
    all_scales = source[plan.scales_offset :].clone().view(torch.float32)
    check_codes(layout, plan, source, all_scales)
    raw = torch.empty(target_plan.nbytes, dtype=torch.uint8, device=source.device)
    for span, target_span in zip(plan.spans, target_plan.spans, strict=True):
        part = source[span.offset : span.offset + span.nbytes]
        target = raw[target_span.offset : target_span.offset + target_span.nbytes]
        if not span.is_packed:
            target[:] = part
            continue
        form = _FORMATS[target_span.dtype]
        codes = _rows(layout, span, part)
        rows, count = codes.shape
        words = torch.empty((rows, count), dtype=form.words, device=source.device)
        scales = all_scales[span.scale_start : span.scale_start + rows]
        grid = (rows, triton.cdiv(count, _BLOCK))
        with torch.cuda.device(source.device):
            _unpack_rows[grid](codes, words, scales, count, form.kind, _BLOCK)
        target[:] = _from_rows(layout, span, words).reshape(-1).view(torch.uint8)
    return raw


def _as(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bytes of a span as numbers, copied where they lie askew."""
    if part.data_ptr() % dtype.itemsize or part.storage_offset() % dtype.itemsize:
        part = part.clone()
    return part.view(dtype)


def _rows(layout: Layout, span: Span, stored: torch.Tensor) -> torch.Tensor:
    """(layers * heads, tokens * dim) of numbers in storage order."""
    order = [layout.storage_order.index(axis) for axis in "LHTD"]
    layers, heads = span.scale_shape
    return stored.reshape(span.shape).permute(order).reshape(layers * heads, -1).contiguous()


def _from_rows(layout: Layout, span: Span, rows: torch.Tensor) -> torch.Tensor:
    """In storage order again."""
    sizes = dict(zip(layout.storage_order, span.shape, strict=True))
    order = ["LHTD".index(axis) for axis in layout.storage_order]
    return rows.reshape([sizes[axis] for axis in "LHTD"]).permute(order).contiguous()
