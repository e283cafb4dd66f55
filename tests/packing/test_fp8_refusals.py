"""What must never be packed or unpacked, what goes in and comes out, and how it is said."""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np
import pytest
import torch
from packing_samples import family, layout, one_head, segment

from kvtier.core.page import Codec
from kvtier.errors import LayoutError, MissingExtra, NonFinite, PageSizeError
from kvtier.packing import fp8_backend
from kvtier.packing.codec import decode, encode
from kvtier.packing.fp8 import Fp8Backend, backend, check_payload, pack, unpack
from kvtier.packing.layout import Role, ScaleRule, Shard

PAGE = layout()
RNG = np.random.default_rng(11)
RAW = RNG.standard_normal(PAGE.raw_bytes // 2).astype(ml_dtypes.bfloat16).tobytes()
PAYLOAD = pack(PAGE, RAW).tobytes()


def with_number(page, raw: bytes, name: str, at: tuple, value: float) -> bytes:
    """The raw page with one number replaced; `at` in storage order."""
    data = bytearray(raw)
    span = next(s for s in page.spans(Codec.RAW) if s.segment.name == name)
    dtype = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
    kind = dtype[span.dtype]
    place = span.offset + int(np.ravel_multi_index(at, span.shape)) * np.dtype(kind).itemsize
    data[place : place + np.dtype(kind).itemsize] = np.array(value).astype(kind).tobytes()
    return bytes(data)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_number_that_is_not_finite_is_never_packed(value):
    for name, at, where in (
        ("k", (0, 0, 0, 0), "segment 'k', layer 0, head 0"),
        ("k", (3, 1, 1, 7), "segment 'k', layer 3, head 1"),
        ("v", (2, 3, 0, 5), "segment 'v', layer 2, head 0"),
    ):
        with pytest.raises(NonFinite, match=where) as caught:
            pack(PAGE, with_number(PAGE, RAW, name, at, value))
        assert caught.value.remedy


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_infinity_in_the_other_dtypes(dtype):
    page = one_head(dtype)
    raw = with_number(page, bytes(page.raw_bytes), "k", (0, 2, 0, 3), -np.inf)
    with pytest.raises(NonFinite, match="segment 'k', layer 0, head 0: the number -inf"):
        pack(page, raw)


def test_layers_and_heads_are_named_in_the_whole_models_numbers():
    page = layout(
        segment(), storage_order="HDLT", shard_count=4,
        shard=Shard(index=3, layers=(2, 4), heads=(1, 2)),
    )  # fmt: skip
    raw = with_number(page, bytes(page.raw_bytes), "k", (0, 4, 1, 3), np.nan)
    with pytest.raises(NonFinite, match="layer 3, head 1: the number nan"):
        pack(page, raw)
    payload = bytearray(pack(page, bytes(page.raw_bytes)))
    payload[page.scales_span[0] + 4 : page.scales_span[0] + 8] = bytes(4)
    with pytest.raises(NonFinite, match=r"layer 3, head 1: the scale 0\.0"):
        unpack(page, payload)


def test_kept_segments_keep_their_bytes_whatever_they_hold():
    page = layout(segment("latent", Role.LATENT, heads=1), segment("rope", Role.ROPE, heads=1))
    latent, rope = page.spans(Codec.RAW)
    raw = bytes(latent.nbytes) + b"\xff" * rope.nbytes
    payload = pack(page, raw)
    assert unpack(page, payload).tobytes() == raw


@pytest.mark.parametrize(
    "scale",
    [0.0, -0.0, np.nan, np.inf, -np.inf, -1.0, 1e-45, np.nextafter(np.float32(2.0**-126), 0), 1e37],
)
@pytest.mark.parametrize("index", [0, 7, 15])
def test_a_scale_that_no_packer_makes_is_refused_by_both_readers(scale, index):
    offset, count = PAGE.scales_span
    assert count == 16
    bad = bytearray(PAYLOAD)
    bad[offset + 4 * index : offset + 4 * index + 4] = np.float32(scale).tobytes()
    layer, head = divmod(index % 8, 2)
    where = f"segment '{'kv'[index // 8]}', layer {layer}, head {head}: the scale"
    with pytest.raises(NonFinite, match=where):
        check_payload(PAGE, bad)
    with pytest.raises(NonFinite, match=where):
        unpack(PAGE, bad)


@pytest.mark.parametrize("scale", [2.0**-126, 1.0, float(np.float32(3.38e38) / np.float32(448))])
def test_scales_at_the_ends_of_the_range_are_fine_and_decode_to_finite_numbers(scale):
    offset, count = PAGE.scales_span
    payload = b"\x7e" * offset + np.full(count, scale, "<f4").tobytes()
    check_payload(PAGE, payload)
    got = unpack(PAGE, payload).view(ml_dtypes.bfloat16).astype(np.float32)
    assert np.isfinite(got).all()
    assert (got > 0).all()


def test_the_largest_page_of_each_dtype_survives():
    for dtype, kind in (("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)):
        page = one_head(dtype)
        top = np.full(32, ml_dtypes.finfo(kind).max)
        payload = pack(page, top.tobytes())
        check_payload(page, payload)
        assert unpack(page, payload).tobytes() == top.tobytes()


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("position", [0, 255, 511])
def test_a_code_for_nan_is_refused_by_both_readers(code, position):
    bad = bytearray(PAYLOAD)
    bad[position] = code
    named = f"segment '{'kv'[position // 256]}', .*a code that stands for NaN"
    with pytest.raises(NonFinite, match=named):
        check_payload(PAGE, bad)
    with pytest.raises(NonFinite, match=named):
        unpack(PAGE, bad)


@pytest.mark.parametrize("missing", [1, 4, 64])
def test_scales_cannot_be_missing(missing):
    for reader in (check_payload, unpack):
        with pytest.raises(PageSizeError, match=f"{len(PAYLOAD) - missing} bytes"):
            reader(PAGE, PAYLOAD[:-missing])
    with pytest.raises(PageSizeError):
        unpack(PAGE, RAW)
    with pytest.raises(PageSizeError):
        pack(PAGE, RAW + b"\0")


def test_a_layout_without_packable_segments_is_refused():
    page = layout(segment(dtype="float8_e4m3fn", scale_rule=ScaleRule.NONE))
    for call in (pack, unpack, check_payload):
        with pytest.raises(LayoutError, match="no segment"):
            call(page, bytes(page.raw_bytes))


def test_every_form_of_host_memory_gives_the_same_ndarray():
    frozen = np.frombuffer(RAW, np.uint8)
    assert not frozen.flags.writeable
    numbers = np.frombuffer(RAW, ml_dtypes.bfloat16).reshape(2, -1)
    odd = memoryview(b"x" + RAW)[1:]
    twice = np.repeat(frozen, 2)[::2]
    for given in (RAW, bytearray(RAW), memoryview(RAW), frozen, numbers, odd, twice):
        got = pack(PAGE, given)
        assert isinstance(got, np.ndarray)
        assert (got.dtype, got.ndim) == (np.uint8, 1)
        assert got.tobytes() == PAYLOAD
    assert isinstance(unpack(PAGE, PAYLOAD), np.ndarray)


def test_tensors_give_tensors():
    numbers = torch.frombuffer(bytearray(RAW), dtype=torch.bfloat16)
    strided = numbers.reshape(2, 4, -1).transpose(1, 2).contiguous().transpose(1, 2)
    assert not strided.is_contiguous()
    for given in (numbers, numbers.view(torch.uint8), numbers.reshape(2, 4, 4, 2, 8), strided):
        got = pack(PAGE, given)
        assert isinstance(got, torch.Tensor)
        assert (got.dtype, got.ndim, got.device) == (torch.uint8, 1, given.device)
        assert got.numpy().tobytes() == PAYLOAD
    back = unpack(PAGE, torch.frombuffer(bytearray(PAYLOAD), dtype=torch.uint8))
    assert isinstance(back, torch.Tensor)
    assert back.numpy().tobytes() == unpack(PAGE, PAYLOAD).tobytes()


def test_the_result_is_new_memory():
    source = bytearray(RAW)
    payload = pack(PAGE, source)
    source[:] = bytes(len(source))
    assert payload.tobytes() == PAYLOAD
    payload[:] = 0
    assert pack(PAGE, RAW).tobytes() == PAYLOAD


def test_numbers_of_another_dtype_are_refused():
    with pytest.raises(LayoutError, match=r"torch\.float16, the layout has bfloat16"):
        pack(PAGE, torch.frombuffer(bytearray(RAW), dtype=torch.float16))


def test_spans_at_odd_offsets():
    page = layout(
        segment("extra", Role.OPAQUE, dtype="uint8", layers=1, heads=1, dim=1),
        segment(dtype="float32", layers=1, heads=1, dim=3),
        page_tokens=1,
    )
    values = np.array([1, -2, 448], np.float32)
    payload = pack(page, b"\x07" + values.tobytes())
    assert payload.tobytes() == b"\x07\x38\xc0\x7e" + bytes(12) + np.float32(1).tobytes()
    assert unpack(page, payload).tobytes() == b"\x07" + values.tobytes()


def test_a_shard_packs_as_its_part_of_the_whole():
    """Scales belong to (layer, head), so cutting before or after packing gives the same codes."""
    whole = layout(segment(), page_tokens=2)
    values = RNG.standard_normal((4, 2, 2, 8)).astype(ml_dtypes.bfloat16)
    codes = pack(whole, values.tobytes())[: values.size].reshape(values.shape)
    part = layout(
        segment(), page_tokens=2, shard_count=4, shard=Shard(index=1, layers=(1, 3), heads=(1, 2))
    )
    piece = np.ascontiguousarray(values[1:3, :, 1:2])
    got = pack(part, piece.tobytes())
    assert (got[: piece.size] == codes[1:3, :, 1:2].reshape(-1)).all()


def test_codec_dispatch():
    assert encode(Codec.RAW, PAGE, RAW).tobytes() == RAW
    assert decode(Codec.RAW, PAGE, RAW).tobytes() == RAW
    assert encode(Codec.FP8, PAGE, RAW).tobytes() == PAYLOAD
    assert decode(Codec.FP8, PAGE, PAYLOAD).tobytes() == unpack(PAGE, PAYLOAD).tobytes()
    numbers = torch.frombuffer(bytearray(RAW), dtype=torch.bfloat16)
    assert encode(Codec.RAW, PAGE, numbers).tobytes() == RAW
    assert encode(Codec.FP8, PAGE, numbers).tobytes() == PAYLOAD
    for call in (encode, decode):
        with pytest.raises(PageSizeError):
            call(Codec.RAW, PAGE, RAW[:-1])


def test_every_role_at_once():
    page = family()
    raw = bytes(page.raw_bytes)
    payload = pack(page, raw)
    assert payload.nbytes == page.fp8_bytes
    assert unpack(page, payload).tobytes() == raw


def test_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    check_payload(PAGE, PAYLOAD)
    assert encode(Codec.RAW, PAGE, RAW).tobytes() == RAW
    assert backend() is Fp8Backend.NUMBA
    assert pack(PAGE, RAW).tobytes() == PAYLOAD
    assert unpack(PAGE, PAYLOAD).nbytes == len(RAW)
    # Nor numba: nothing can pack.
    monkeypatch.setattr(fp8_backend, "compiled", lambda device: None)
    for call, data in ((pack, RAW), (unpack, PAYLOAD)):
        with pytest.raises(MissingExtra) as caught:
            call(PAGE, data)
        assert "torch" in caught.value.remedy
