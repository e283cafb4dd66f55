"""The fp8 codec for host memory, by the kernels of kvtier/packing/fp8_kernels.py.

Sources are flat uint8 arrays of the right size, at any address, read-only or not; results are new
ones. Importing this module loads numba and the kernels. Safe from any thread; the kernels run
without the interpreter lock.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from kvtier.core.page import Codec
from kvtier.packing.dtypes import DTYPE_BYTES
from kvtier.packing.fp8_check import check_scales, refuse_at
from kvtier.packing.fp8_kernels import pack_span, unpack_span
from kvtier.packing.geometry import Span, plan_page

if TYPE_CHECKING:
    from kvtier.packing.layout import Layout

__all__ = ["pack", "unpack"]

_Walk = tuple[int, int, int, int, int]

#: How the kernels are told a format: by the type of its bits.
_WORDS: Final = {"bfloat16": np.uint16, "float16": np.int16, "float32": np.uint32}
#: The most numbers of a block, where it can be chosen: they stay in the nearest cache.
_BLOCK_NUMBERS: Final = 4096
#: The most numbers of a row, where it can be cut.
_ROW_NUMBERS: Final = 1024
_NAN_BITS: Final = 0x7F


def pack(layout: Layout, source: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The fp8 payload of a raw one. Raises NonFinite."""
    plan, source_plan = plan_page(layout, Codec.FP8), plan_page(layout, Codec.RAW)
    payload = np.empty(plan.nbytes, np.uint8)
    all_scales = np.empty(plan.scales_count, np.float32)
    for span, source_span in zip(plan.spans, source_plan.spans, strict=True):
        part = source[source_span.offset : source_span.offset + source_span.nbytes]
        codes = payload[span.offset : span.offset + span.nbytes]
        if not span.is_packed:
            codes[:] = part
            continue
        words = _aligned(part, source_span.dtype)
        scales = np.empty(prod(span.scale_shape), np.float32)
        if not pack_span(words, codes, scales, _walk(layout.storage_order, span.shape)):
            _refuse_number(layout, span, part, source_span.dtype)
        mine = all_scales[span.scale_start : span.scale_start + scales.size]
        mine.reshape(span.scale_shape)[:] = _layers_first(layout, span, scales)
    end = plan.spans[-1].offset + plan.spans[-1].nbytes
    payload[end : plan.scales_offset] = 0
    payload[plan.scales_offset :] = all_scales.view(np.uint8)
    return payload


def unpack(layout: Layout, source: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The raw payload of an fp8 one. Raises NonFinite."""
    plan, target_plan = plan_page(layout, Codec.FP8), plan_page(layout, Codec.RAW)
    all_scales = np.frombuffer(source[plan.scales_offset :].tobytes(), np.float32)
    check_scales(plan.spans, all_scales)
    raw = np.empty(target_plan.nbytes, np.uint8)
    for span, target_span in zip(plan.spans, target_plan.spans, strict=True):
        codes = source[span.offset : span.offset + span.nbytes]
        target = raw[target_span.offset : target_span.offset + target_span.nbytes]
        if not span.is_packed:
            target[:] = codes
            continue
        words = _aligned(target, target_span.dtype)
        scales = _as_stored(layout, span, all_scales)
        if not unpack_span(codes, words, scales, _walk(layout.storage_order, span.shape)):
            first = int(((codes & _NAN_BITS) == _NAN_BITS).argmax())
            refuse_at(layout, span, first, "a code that stands for NaN")
        if not np.may_share_memory(words, target):
            target[:] = words.view(np.uint8)
    return raw


@lru_cache(maxsize=1024)
def _walk(order: str, shape: tuple[int, ...]) -> _Walk:
    """(chunks, steps, outer, inner, across), which kvtier/packing/fp8_kernels.py explains."""
    merged: list[list[int]] = []  # [whether the scale changes along it, size]
    for axis, size in zip(order, shape, strict=True):
        has_scales = int(axis in "LH")
        if size == 1:
            continue
        if merged and merged[-1][0] == has_scales:
            merged[-1][1] *= size
        else:
            merged.append([has_scales, size])

    def taken(has_scales: int) -> int:
        return merged.pop()[1] if merged and merged[-1][0] == has_scales else 1

    across = taken(1) if len(merged) > 1 else 1
    inner, outer, steps, chunks = taken(0), taken(1), taken(0), taken(1)
    if steps == 1:  # what is left of the rows is one after the other
        chunks, outer = chunks * outer, 1
    if outer == 1:
        total = steps * inner
        least = 1 if across > 1 else min(total, _ROW_NUMBERS // 4)
        most = max(least, (_BLOCK_NUMBERS if across > 1 else _ROW_NUMBERS) // across)
        parts = (size for size in range(min(most, total), least - 1, -1) if total % size == 0)
        inner = next(parts, total)
        steps = total // inner
    return chunks, steps, outer, inner, across


def _layers_first(layout: Layout, span: Span, scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Scales in the order of the walk as (layers, heads)."""
    layers, heads = span.scale_shape
    if _is_layers_first(layout):
        return scales.reshape(layers, heads)
    return scales.reshape(heads, layers).T


def _as_stored(layout: Layout, span: Span, all_scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """The span's scales in the order of the walk."""
    mine = all_scales[span.scale_start : span.scale_start + prod(span.scale_shape)]
    if _is_layers_first(layout):
        return mine
    return np.ascontiguousarray(mine.reshape(span.scale_shape).T).reshape(-1)


def _is_layers_first(layout: Layout) -> bool:
    return layout.storage_order.index("L") < layout.storage_order.index("H")


def _aligned(part: NDArray[np.uint8], dtype: str) -> NDArray[Any]:
    """The words of a span: a view, or a copy where they lie askew."""
    if part.ctypes.data % DTYPE_BYTES[dtype]:
        part = part.copy()
    return part.view(_WORDS[dtype])


def _refuse_number(layout: Layout, span: Span, part: NDArray[np.uint8], dtype: str) -> NoReturn:
    """Raises NonFinite for the first number that is not finite."""
    if dtype == "bfloat16":
        bits = _aligned(part, dtype).astype(np.uint32) << np.uint32(16)
        values = bits.view(np.float32)
    else:
        values = _aligned(part, dtype).view(dtype)
    first = int((~np.isfinite(values)).argmax())
    refuse_at(layout, span, first, f"the number {float(values[first])!r}")
