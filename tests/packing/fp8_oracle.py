"""The fp8 formula a second time, in numpy and from its text alone.

Codes are found by comparing with the midpoints between all numbers of the format, not by any cast,
so that this and kvtier.packing.fp8 share nothing but the definition. Slow.
"""

from __future__ import annotations

import numpy as np

from kvtier.core.page import Codec

F32 = np.float32


def value_of(code: int) -> float:
    """The number of a sign-less e4m3fn code, 0 to 0x7e: 4 bits exponent, 3 bits fraction."""
    exponent, fraction = code >> 3, code & 7
    return fraction * 2.0**-9 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)


VALUES = np.array([value_of(code) for code in range(0x7F)])
MIDPOINTS = (VALUES[:-1] + VALUES[1:]) / 2


def nearest_code(values: np.ndarray) -> np.ndarray:
    """e4m3fn codes of float32 values within +-448: the nearest number, ties to the even code."""
    size = np.abs(values).astype(np.float64)
    low = np.searchsorted(MIDPOINTS, size, side="left")
    high = np.searchsorted(MIDPOINTS, size, side="right")
    code = np.where(low % 2 == 0, low, high)
    return (code | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def widen(data: bytes, dtype: str) -> np.ndarray:
    """Numbers of a segment's dtype as float32, which holds each of them exactly."""
    if dtype == "bfloat16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(F32)
    return np.frombuffer(data, {"float16": "<f2", "float32": "<f4"}[dtype]).astype(F32)


def narrow(values: np.ndarray, dtype: str) -> bytes:
    """float32 rounded to a segment's dtype, ties to even."""
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
    return values.astype({"float16": "<f2", "float32": "<f4"}[dtype]).tobytes()


def axes(layout) -> tuple[list[int], list[int]]:
    """Permutations from storage order to (L, H, T, D) and back."""
    there = [layout.storage_order.index(axis) for axis in "LHTD"]
    return there, list(np.argsort(there))


def pack(layout, raw: bytes) -> bytes:
    there, back = axes(layout)
    body, scales = b"", b""
    for span in layout.spans(Codec.RAW):
        data = raw[span.offset : span.offset + span.nbytes]
        if span.segment.scale_rule.name == "NONE":
            body += data
            continue
        values = widen(data, span.dtype).reshape(span.shape).transpose(there)
        codes = np.empty(values.shape, np.uint8)
        for layer, head in np.ndindex(values.shape[:2]):
            x = values[layer, head]
            amax = np.abs(x).max()
            scale = F32(1) if amax == 0 else max(F32(amax / F32(448)), F32(2.0**-126))
            inverse = F32(F32(1) / scale)
            codes[layer, head] = nearest_code(np.clip(x * inverse, F32(-448), F32(448)))
            scales += F32(scale).tobytes()
        body += np.ascontiguousarray(codes.transpose(back)).tobytes()
    return body + bytes(-len(body) % 16) + scales


def unpack(layout, payload: bytes) -> bytes:
    there, back = axes(layout)
    offset, count = layout.scales_span
    scales = iter(np.frombuffer(payload, "<f4", count, offset))
    table = np.array([*VALUES, np.nan, *-VALUES, np.nan]).astype(F32)
    raw = b""
    for span in layout.spans(Codec.FP8):
        data = payload[span.offset : span.offset + span.nbytes]
        if not span.is_packed:
            raw += data
            continue
        codes = np.frombuffer(data, np.uint8).reshape(span.shape).transpose(there)
        values = table[codes]
        for layer, head in np.ndindex(values.shape[:2]):
            values[layer, head] *= next(scales)
        raw += narrow(np.ascontiguousarray(values.transpose(back)), span.segment.dtype)
    return raw
