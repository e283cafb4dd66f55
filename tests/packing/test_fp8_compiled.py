"""The compiled fp8 codec beside the reference in torch, bit for bit, where the two could part."""

from __future__ import annotations

import itertools
import sys
import threading
import time

import ml_dtypes
import numpy as np
import pytest
import torch
from packing_samples import layout, one_head, segment

from kvtier.core.page import Codec
from kvtier.errors import NonFinite
from kvtier.packing import fp8_torch
from kvtier.packing.dtypes import FLOAT_MAX
from kvtier.packing.fp8 import Fp8Backend, backend, pack, unpack, warm_up
from kvtier.packing.layout import Role

NUMPY = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
ORDERS = ["".join(axes) for axes in itertools.permutations("LTHD")]
F32 = np.float32


def tensor(data) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def compare(page, raw: bytes, note: str = "") -> bytes:
    """Packs and unpacks by both; returns the payload."""
    assert backend() is Fp8Backend.NUMBA
    want = fp8_torch.pack(page, tensor(raw)).numpy().tobytes()
    got = pack(page, raw)
    assert got.tobytes() == want, note
    back = fp8_torch.unpack(page, tensor(want)).numpy().tobytes()
    assert unpack(page, want).tobytes() == back, note
    return want


def heads_of(rows: np.ndarray, dtype: str):
    """A page with one head for each row."""
    page = layout(segment(dtype=dtype, layers=1, heads=len(rows), dim=rows.shape[1]), page_tokens=1)
    return page, np.ascontiguousarray(rows).tobytes()


def finite_patterns(dtype: str) -> np.ndarray:
    values = np.arange(65536, dtype=np.uint16).view(NUMPY[dtype])
    return values[np.isfinite(values.astype(F32))]


@pytest.mark.parametrize("width", [5, 32, 113])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_number_of_16_bits_at_many_scales(dtype, width):
    """Sorted, so that amax goes through every size; shuffled, so that all meet all scales."""
    values = finite_patterns(dtype)
    values = values[np.argsort(np.abs(values.astype(F32)), kind="stable")]
    values = values[values.size % width :].reshape(-1, width)
    compare(*heads_of(values, dtype))
    for seed in range(3):
        shuffled = np.random.default_rng(seed).permutation(values.reshape(-1))
        compare(*heads_of(shuffled.reshape(values.shape), dtype), f"seed {seed}")


def test_float32_of_every_exponent():
    """All 255 finite exponents with the fractions where rounding changes its mind."""
    fractions = {0, 1, 2, 0x7FFFFF, 0x7FFFFE, 0x400000, 0x3FFFFF, 0x400001}
    for place in range(23):
        fractions |= {1 << place, (1 << place) - 1, 0x7FFFFF ^ (1 << place)}
    exponents = np.arange(255, dtype=np.uint32)[:, None] << np.uint32(23)
    rows = (exponents | np.array(sorted(fractions), np.uint32)).view(F32)
    rows = np.concatenate([rows, -rows[:, ::-1]], axis=1)
    compare(*heads_of(rows, "float32"))
    compare(*heads_of(np.ascontiguousarray(rows.T), "float32"))


@pytest.mark.parametrize("seed", range(4))
def test_float32_of_random_bits(seed):
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 1 << 32, (2000, 33), np.uint32)
    # Near each other in size, or all but one number of a row would become zero.
    sizes = rng.integers(0, 250, (2000, 1), np.uint32) + rng.integers(0, 5, bits.shape, np.uint32)
    bits = bits & np.uint32(0x807FFFFF) | sizes << np.uint32(23)
    compare(*heads_of(bits.view(F32), "float32"), f"seed {seed}")


@pytest.mark.parametrize(
    "amax",
    [
        0.0, 2.0**-149, 2.0**-148, 2.0**-127, 448 * 2.0**-127, 448 * 2.0**-126, 449 * 2.0**-126,
        447 * 2.0**-126, 2.0**-126, 1.0, 448.0, 448.0001, 464.0, FLOAT_MAX["bfloat16"],
        FLOAT_MAX["float32"],
    ],
)  # fmt: skip
def test_scales_at_their_limits(amax):
    """Rows with this largest number, and all halfway points between codes at its scale."""
    codes = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(F32)
    halfway = (codes[:-1] + codes[1:]) / 2
    scale = F32(1) if amax == 0 else max(F32(F32(amax) / F32(448)), F32(2.0**-126))
    near = np.concatenate(
        [codes, halfway, np.nextafter(halfway, F32(0)), np.nextafter(halfway, F32(512))]
    )
    numbers = np.minimum(near * scale, F32(amax))
    row = np.concatenate([numbers, -numbers, [F32(amax), F32(0), F32(-0.0)]]).astype(F32)
    payload = compare(*heads_of(row[None], "float32"))
    assert payload[-4:] == scale.tobytes()
    short = row.astype(ml_dtypes.bfloat16)
    compare(*heads_of(short[np.isfinite(short.astype(F32))][None], "bfloat16"))


@pytest.mark.parametrize("dtype", sorted(NUMPY))
def test_every_code_at_many_scales(dtype):
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)
    largest = F32(FLOAT_MAX[dtype]) / F32(448)
    scales = [2.0**-126, 2.0**-125, 2.0**-120, 2.0**-24, 2.0**-14, 3e-8, 0.1, 1, 1.0001, 7, largest]
    scales += list(np.random.default_rng(8).uniform(0, largest, 40))
    for scale in scales:
        page = one_head(dtype, dim=codes.size, page_tokens=1)
        payload = codes.tobytes() + bytes(2) + F32(scale).tobytes()
        want = fp8_torch.unpack(page, tensor(payload)).numpy().tobytes()
        assert unpack(page, payload).tobytes() == want, scale


def mixed(order: str, dtype: str, *, dim: int, tokens: int, heads: int):
    """Kept and packed segments with odd offsets: one of 3 bytes lies before them all."""
    return layout(
        segment("extra", Role.OPAQUE, dtype="uint8", layers=1, heads=1, dim=3),
        segment(dtype=dtype, layers=3, heads=heads, dim=dim),
        segment("rope", Role.ROPE, dtype="bfloat16", layers=3, heads=1, dim=3),
        segment("latent", Role.LATENT, dtype=dtype, layers=3, heads=1, dim=dim + 1),
        page_tokens=tokens,
        storage_order=order,
    )


def random_page(page, seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    parts = []
    for span in page.spans(Codec.RAW):
        if span.segment.is_packable:
            # Heads of different size, so that a scale in the wrong place shows.
            sizes = 2.0 ** rng.integers(-8, 8, span.scale_shape)
            values = rng.standard_normal((*span.scale_shape, 1, 1)) * sizes[..., None, None]
            axes = ["LHTD".index(axis) for axis in page.storage_order]
            values = values.transpose(axes) * rng.standard_normal(span.shape)
            parts.append(values.astype(F32).astype(NUMPY[span.dtype]).tobytes())
        else:
            parts.append(rng.bytes(span.nbytes))
    return b"".join(parts)


@pytest.mark.parametrize("order", ORDERS)
def test_every_storage_order_and_odd_sizes(order):
    sizes = [(1, 1, 1), (5, 3, 2), (33, 2, 3), (64, 7, 2), (40, 1, 4), (7, 40, 1), (3, 5, 67)]
    for seed, (dim, tokens, heads) in enumerate(sizes):
        for dtype in NUMPY:
            page = mixed(order, dtype, dim=dim, tokens=tokens, heads=heads)
            compare(page, random_page(page, seed), f"{dtype}, seed {seed}")


@pytest.mark.parametrize("order", ["LTHD", "TDLH", "LTDH"])
def test_pages_that_are_walked_in_several_blocks(order):
    page = mixed(order, "bfloat16", dim=128, tokens=33, heads=5)
    compare(page, random_page(page, 1), "seed 1")


@pytest.mark.parametrize("dtype", sorted(NUMPY))
def test_input_at_any_address_that_cannot_be_written(dtype):
    page = one_head(dtype, dim=37)
    raw = random_page(page, 2)
    payload = compare(page, raw)
    for shift in range(1, 8):
        moved, packed = bytes(shift) + raw, bytes(shift) + payload
        assert pack(page, memoryview(moved)[shift:]).tobytes() == payload
        assert unpack(page, memoryview(packed)[shift:]).tobytes() == unpack(page, payload).tobytes()
    strided = tensor(raw).reshape(-1, 1).repeat(1, 2)[:, 0]
    assert not strided.is_contiguous()
    got = pack(page, strided)
    assert isinstance(got, torch.Tensor)
    assert got.numpy().tobytes() == payload
    numbers = tensor(raw).view(getattr(torch, dtype)).requires_grad_()
    assert pack(page, numbers).numpy().tobytes() == payload


@pytest.mark.parametrize("order", ORDERS)
def test_both_refuse_the_same_number_first(order):
    page = mixed(order, "float16", dim=33, tokens=3, heads=2)
    raw = bytearray(random_page(page, 3))
    payload = bytearray(compare(page, bytes(raw)))
    rng = np.random.default_rng(4)
    spans = {span.segment.name: span for span in page.spans(Codec.RAW)}
    for name in ("latent", "k"):  # the earlier segment last: it is the one to be named
        for _ in range(2):
            place = spans[name].offset + 2 * int(rng.integers(spans[name].nbytes // 2))
            raw[place : place + 2] = np.float16(rng.choice([np.inf, -np.inf, np.nan])).tobytes()
            assert said(pack, page, bytes(raw)) == said(fp8_torch.pack, page, tensor(raw))
    packed = {span.segment.name: span for span in page.spans(Codec.FP8)}
    for name in ("latent", "k"):
        for _ in range(2):
            place = packed[name].offset + int(rng.integers(packed[name].nbytes))
            payload[place] = int(rng.choice([0x7F, 0xFF]))
            want = said(fp8_torch.unpack, page, tensor(payload))
            assert said(unpack, page, bytes(payload)) == want
    payload[-4:] = bytes(4)  # a scale comes before any code
    assert "the scale 0.0" in said(unpack, page, bytes(payload))
    assert said(unpack, page, bytes(payload)) == said(fp8_torch.unpack, page, tensor(payload))


def said(call, page, data) -> str:
    with pytest.raises(NonFinite) as caught:
        call(page, data)
    return str(caught.value)


def test_other_threads_run_while_pages_are_packed():
    """No thread is made to give way here: the one that counts runs only while a kernel does. On a
    busy machine it may not come to a core in that time: then once more.
    """
    warm_up()
    page = layout(segment(layers=8, heads=8, dim=128), page_tokens=1024)
    raw = bytes(page.raw_bytes)
    counted, done = [0], threading.Event()

    def count() -> None:
        while not done.is_set():
            counted[0] += 1
            time.sleep(0)

    def work(seen: list[int]) -> None:
        before = counted[0]
        payload = pack(page, raw)
        between = counted[0]
        unpack(page, payload)
        seen += [between - before, counted[0] - between]

    def all_seen() -> list[int]:
        results: list[list[int]] = [[], []]
        workers = [threading.Thread(target=work, args=(seen,)) for seen in results]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return [progress for seen in results for progress in seen]

    counter = threading.Thread(target=count)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        counter.start()
        tries = [all_seen()]
        while not all(tries[-1]) and len(tries) < 5:
            tries.append(all_seen())
    finally:
        done.set()
        counter.join()
        sys.setswitchinterval(interval)
    assert all(tries[-1]), tries
