"""Every implementation of the fp8 codec makes the bytes that the formula says."""

from __future__ import annotations

import json
from pathlib import Path

import fp8_oracle
import ml_dtypes
import numpy as np
import pytest
import torch
from packing_samples import layout, one_head, segment

from kvtier.core.page import Codec
from kvtier.packing.fp8 import check_payload, pack, unpack
from kvtier.packing.layout import Role

GOLDEN = Path(__file__).parent.parent / "golden" / "fp8_v1.json"
NUMPY = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
DTYPES = sorted(NUMPY)


def on(device: str, data) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def packed(page, raw, device="cpu") -> bytes:
    return pack(page, on(device, raw)).cpu().numpy().tobytes()


def unpacked(page, payload, device="cpu") -> bytes:
    return unpack(page, on(device, payload)).cpu().numpy().tobytes()


def page_of(values, dtype="float32"):
    """A layout of one head for `values` and their bytes."""
    array = np.asarray(values, np.float32).astype(NUMPY[dtype])
    return one_head(dtype, dim=array.size, page_tokens=1), array.tobytes()


def codes_and_scale(page, payload: bytes) -> tuple[bytes, float]:
    offset, count = page.scales_span
    assert count == 1
    return payload[: page.segments[0].dim], float(np.frombuffer(payload, "<f4", 1, offset)[0])


def handmade(codes, scale: float, dtype="float32"):
    """A layout of one head and a payload with just these codes and this scale."""
    page = one_head(dtype, dim=len(codes), page_tokens=1)
    body = bytes(codes) + bytes(-len(codes) % 16)
    return page, body + np.float32(scale).tobytes()


def test_every_code_decodes_as_ml_dtypes_says(device):
    codes = [code for code in range(256) if code & 0x7F != 0x7F]
    assert len(codes) == 254
    want = np.array(codes, np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    for scale in (1.0, 0.25, 4.0, 2.0**-126):
        page, payload = handmade(codes, scale)
        got = np.frombuffer(unpacked(page, payload, device), "<f4")
        assert (got.view(np.uint32) == (want * np.float32(scale)).view(np.uint32)).all()


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0.0, 0x00),
        (-0.0, 0x80),
        (2.0**-9, 0x01),
        (-(2.0**-9), 0x81),
        (2.0**-10, 0x00),  # half of the smallest number: the tie goes to the even code 0
        (np.nextafter(np.float32(2.0**-10), np.float32(1)), 0x01),
        (3 * 2.0**-10, 0x02),
        (2.0**-6, 0x08),
        (1.0, 0x38),
        (1.0625, 0x38),
        (1.1875, 0x3A),
        (415.0, 0x7D),
        (432.0, 0x7E),
        (np.nextafter(np.float32(432), np.float32(0)), 0x7D),
        (447.0, 0x7E),
        (448.0, 0x7E),
        (-448.0, 0xFE),
    ],
)
def test_edges_at_scale_one(value, code, device):
    page, raw = page_of([448.0, value])
    codes, scale = codes_and_scale(page, packed(page, raw, device))
    assert (codes[0], codes[1], scale) == (0x7E, code, 1.0)


@pytest.mark.parametrize("largest", [449.0, 464.0, 465.0, 1e4, 65504.0, 3.3e38, 1e-38, 1e-45])
def test_the_largest_number_of_a_head_is_inside_its_scale(largest, device):
    page, raw = page_of([largest, -largest, 0.0, largest / 2])
    payload = packed(page, raw, device)
    codes, scale = codes_and_scale(page, payload)
    assert scale == max(np.float32(np.float32(largest) / np.float32(448)), np.float32(2.0**-126))
    got = np.frombuffer(unpacked(page, payload, device), "<f4")
    if largest > 1e-30:
        assert list(codes) == [0x7E, 0xFE, 0x00, 0x76]
        np.testing.assert_allclose(got, [largest, -largest, 0, largest / 2], rtol=2**-23)
    else:  # below 448 * 2^-126 the scale stops and the codes get smaller
        bound = max(largest * 2**-4, 2.0**-136)
        assert np.abs(got - np.array([largest, -largest, 0, largest / 2])).max() <= bound


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_head_of_zeros(dtype, device):
    page, raw = page_of([0.0, -0.0, 0.0], dtype)
    payload = packed(page, raw, device)
    assert codes_and_scale(page, payload) == (b"\x00\x80\x00", 1.0)
    assert unpacked(page, payload, device) == raw


@pytest.mark.parametrize("scale", [0.25, 1.0, 4.0])
def test_the_scale_multiplies_on_the_way_back(scale, device):
    """A reciprocal or forgotten scale would be off by 4 or 16."""
    values = np.array([448, 17, -3.5, 0.1], np.float32) * np.float32(scale)
    page, raw = page_of(values, "bfloat16")
    payload = packed(page, raw, device)
    assert codes_and_scale(page, payload)[1] == scale
    got = np.frombuffer(unpacked(page, payload, device), ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_allclose(got, values, rtol=2**-4 + 2**-8)


def test_an_outlier_costs_only_its_own_head(device):
    values = np.linspace(-1, 1, 4 * 8 * 2).reshape(1, 4, 2, 8).astype(np.float32)
    values[0, 2, 1, 3] = 1e4
    page = layout(segment(dtype="float32", layers=1))
    payload = packed(page, values.tobytes(), device)
    got = np.frombuffer(unpacked(page, payload, device), "<f4").reshape(values.shape)
    error = np.abs(got - values)
    for head, amax in ((0, np.abs(values[:, :, 0]).max()), (1, 1e4)):
        # Half a step of the format: 2^-4 of the number, or 2^-10 of the scale for the smallest.
        bound = np.maximum(np.abs(values[:, :, head]) * 2**-4, amax / 448 * 2**-10) * 1.0001
        assert (error[:, :, head] <= bound).all()
    assert error[:, :, 0].max() < 0.04
    assert error[0, 2, 1, 3] < 1e4 * 2**-22


ORDERS = ["LTHD", "LHTD", "THLD", "HDLT", "TDLH"]


def sample_page(dtype: str, order: str):
    return layout(
        segment(dtype=dtype, layers=3, heads=2, dim=10),
        segment("v", Role.VALUE, dtype=dtype, layers=3, heads=2, dim=5),
        segment("rope", Role.ROPE, dtype="bfloat16", layers=3, heads=1, dim=3),
        segment("extra", Role.OPAQUE, dtype="uint8", layers=1, heads=1, dim=3),
        segment("latent", Role.LATENT, dtype=dtype, layers=3, heads=1, dim=9),
        page_tokens=3,
        storage_order=order,
    )


def random_raw(page, rng: np.random.Generator, kind: str) -> bytes:
    """Bytes of a page with finite numbers only, where it is to be packed."""
    parts = []
    for span in page.spans(Codec.RAW):
        if not span.segment.is_packable:
            parts.append(rng.bytes(span.nbytes))  # kept, whatever it holds
            continue
        dtype = NUMPY[span.dtype]
        if kind == "normal":
            values = rng.standard_normal(span.shape).astype(np.float32).astype(dtype)
        elif kind == "bits":
            width = f"<u{np.dtype(dtype).itemsize}"
            bits = np.frombuffer(rng.bytes(span.nbytes), width).copy()
            values = bits.view(dtype).reshape(span.shape)
            values = np.where(np.isfinite(values.astype(np.float32)), values, dtype(0))
        else:
            picks = np.array([0.0, -0.0, 2.0**-24, 448, 449, 464, 465, 65504, -65504, 1, 1e-40])
            values = rng.choice(picks, span.shape).astype(np.float32).astype(dtype)
        parts.append(np.ascontiguousarray(values.astype(dtype)).tobytes())
    return b"".join(parts)


@pytest.mark.parametrize("kind", ["normal", "bits", "special"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bit_identical_to_the_oracle(dtype, order, kind, device):
    page = sample_page(dtype, order)
    for seed in range(8):
        raw = random_raw(page, np.random.default_rng(seed), kind)
        payload = packed(page, raw, device)
        assert payload == fp8_oracle.pack(page, raw), f"seed {seed}"
        check_payload(page, payload)
        back = unpacked(page, payload, device)
        assert back == fp8_oracle.unpack(page, payload), f"seed {seed}"
        assert len(back) == page.raw_bytes


def test_the_formula_multiplies_by_the_inverse(device):
    """x / scale gives other codes; enough heads to contain such numbers."""
    rng = np.random.default_rng(5)
    values = rng.standard_normal((1, 1, 1000, 256)).astype(ml_dtypes.bfloat16)
    page = layout(segment(layers=1, heads=1000, dim=256), page_tokens=1)
    payload = packed(page, values.tobytes(), device)
    assert payload == fp8_oracle.pack(page, values.tobytes())
    scales = np.frombuffer(payload, "<f4", 1000, page.scales_span[0]).reshape(1, 1, 1000, 1)
    divided = fp8_oracle.nearest_code(values.astype(np.float32) / scales)
    codes = np.frombuffer(payload, np.uint8, values.size).reshape(values.shape)
    assert 0 < (codes != divided).sum() < values.size / 1000


def test_every_finite_bfloat16_goes_the_oracles_way(device):
    bits = np.arange(65536, dtype=np.uint32).astype(np.uint16).view(ml_dtypes.bfloat16)
    finite = bits[np.isfinite(bits.astype(np.float32))]
    heads = np.sort(np.abs(finite.astype(np.float32))).reshape(-1, 255)
    signs = np.where(np.arange(255) % 2, -1, 1)
    values = (heads * signs).astype(ml_dtypes.bfloat16)
    page = layout(segment(layers=1, heads=len(values), dim=255), page_tokens=1)
    payload = packed(page, values.tobytes(), device)
    assert payload == fp8_oracle.pack(page, values.tobytes())
    assert unpacked(page, payload, device) == fp8_oracle.unpack(page, payload)


def test_golden_bytes(device):
    """These bytes lie on disks: a difference means a new codec, not a new file."""
    for case in json.loads(GOLDEN.read_text()):
        page = sample_page(case["dtype"], case["storage_order"])
        raw, payload = bytes.fromhex(case["raw"]), bytes.fromhex(case["payload"])
        assert packed(page, raw, device) == payload
        assert unpacked(page, payload, device) == bytes.fromhex(case["unpacked"])


def write_golden() -> None:
    """How the golden file was made: by the oracle, not by the code under test."""
    cases = []
    for dtype, order, kind in (("bfloat16", "LTHD", "normal"), ("float16", "LHTD", "special")):
        page = sample_page(dtype, order)
        raw = random_raw(page, np.random.default_rng(1), kind)
        payload = fp8_oracle.pack(page, raw)
        case = {"dtype": dtype, "storage_order": order, "raw": raw.hex(), "payload": payload.hex()}
        cases.append({**case, "unpacked": fp8_oracle.unpack(page, payload).hex()})
    GOLDEN.write_text(json.dumps(cases, indent=1) + "\n")
