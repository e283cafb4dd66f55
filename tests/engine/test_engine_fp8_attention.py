"""Attention over an fp8 pool: what is written is what is read, and scales fold into it exactly."""

from __future__ import annotations

import random

import pytest
import torch

from kvtier import Layout, Role, ScaleRule, Segment
from kvtier.client.device import DevicePool, fp8_layout
from kvtier_engine.attention.base import Batch
from kvtier_engine.attention.choice import attention_for
from kvtier_engine.attention.fp8 import Fp8Pages, power_of_two_scales
from tests.engine.attention_rig import (
    CASES,
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    PAGES,
    SIZE,
    batch_of,
    row_by_row,
)

#: e4m3 has 3 bits of mantissa: the nearest code is at most half of the last one away.
ROUNDING = 2.0**-4
#: And at most half of 2^-9, its least number, where there is no exponent left. Codes that are
#: halved n times are rounded so n times, each half as much as the one after it.
LEAST = 2.0**-9


def fp8_pool(dim: int = DIM, heads: int = KV_HEADS, tokens: int = SIZE) -> DevicePool:
    segments = [
        Segment(
            name=name,
            role=role,
            dtype="bfloat16",
            layers=LAYERS,
            heads=heads,
            dim=dim,
            scale_rule=ScaleRule.LAYER_HEAD,
        )
        for name, role in (("k", Role.KEY), ("v", Role.VALUE))
    ]
    layout = Layout.from_segments(
        segments, model_id="m", revision="1", page_tokens=tokens, kv_compute="bfloat16"
    )
    pool = DevicePool(fp8_layout(layout), PAGES)
    pool.rows.zero_()  # as pages are given out
    return pool


def read(pool: DevicePool) -> torch.Tensor:
    """All that is in the pool, in float64: code times scale, whatever attention makes of it."""
    scales = torch.stack([pool.scales(layer) for layer in range(LAYERS)], dim=2)
    return pool.kv.double() * scales[:, :, :, None, :, None].double()


def numbers(rows: int, heads: int, draw: random.Random, dim: int = DIM) -> torch.Tensor:
    """(rows, heads, dim) of very different sizes from head to head."""
    generator = torch.Generator().manual_seed(draw.getrandbits(32))
    sizes = torch.tensor([10.0 ** draw.randint(-4, 3) for _ in range(heads)])
    return torch.randn((rows, heads, dim), generator=generator) * sizes[:, None]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def products_reach(kv: torch.Tensor, layer: int, batch: Batch, query: torch.Tensor) -> float:
    """What a query's products with the keys of its own sequence can come to, whatever the signs."""
    most = 0.0
    for row in range(len(query)):
        keys = kv[batch.tables[row // batch.rows_each], 0, layer].abs().amax(dim=(0, 1))
        pairs = keys.repeat_interleave(HEADS // KV_HEADS, dim=0) * query[row].double().abs()
        most = max(most, float(pairs.sum(dim=1).amax()) / DIM**0.5)
    return most


def within(got: torch.Tensor, wanted: torch.Tensor, scales: torch.Tensor) -> bool:
    limit = (wanted.abs() * ROUNDING).maximum(scales * LEAST)
    return bool(((got - wanted).abs() <= limit).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("lengths", "rows_each"), CASES)
def test_it_is_softmax_attention_over_code_times_scale(
    lengths: list[int], rows_each: int, dtype: torch.dtype
) -> None:
    draw, pool = random.Random(len(lengths) * 100 + rows_each), fp8_pool()
    batch = batch_of(lengths, rows_each, seed=3, device="cpu")
    # What was there before: earlier rows of these pages, written as one pass each.
    earlier = batch_of([max(1, n - rows_each) for n in lengths], 1, seed=3, device="cpu")
    attention = attention_for(pool, dtype)
    rows = batch.sequences * batch.rows_each
    for layer in range(LAYERS):
        fill = attention.prepare(earlier)
        fill.attend(
            layer,
            numbers(len(lengths), HEADS, draw).to(dtype),
            *(numbers(len(lengths), KV_HEADS, draw).to(dtype) for _ in "kv"),
        )
        query = torch.randn((rows, HEADS, DIM), generator=seeded(rows)).to(dtype)
        key, value = (numbers(rows, KV_HEADS, draw).to(dtype) for _ in "kv")
        out = attention.prepare(batch).attend(layer, query, key, value)
        now = read(pool)
        scales = pool.scales(layer)[batch.pages].double()[..., None]
        for part, given in enumerate((key, value)):
            got = now[batch.pages, part, layer, batch.offsets]
            assert within(got, given.double(), scales[:, part])
        expected = row_by_row(now, layer, batch, query)
        size = float(expected.abs().amax())
        limit = size * (2e-6 if dtype is torch.float32 else 2e-2)
        # Products as large as these are off by as much in float32, and weights by twice that.
        reach = products_reach(now, layer, batch, query)
        limit += size * 2 * (DIM + 4) * 2.0**-24 * reach
        torch.testing.assert_close(out.double(), expected, atol=limit, rtol=0)


def test_scales_are_powers_of_two_and_the_least() -> None:
    greatest = torch.tensor([448.0, 448.0001, 224.0, 1.0, 1e-3, 0.0, 1e-40, 3e38])
    scales = power_of_two_scales(greatest)
    mantissas = torch.frexp(scales).mantissa
    assert torch.equal(mantissas, torch.full_like(mantissas, 0.5))
    assert scales[:4].tolist() == [1.0, 2.0, 0.5, 2.0**-8]
    assert scales[5:7].tolist() == [2.0**-126] * 2
    assert bool((greatest <= scales * 448).all())
    assert bool((greatest > scales * 224)[:5].all())
    odd = power_of_two_scales(torch.tensor([float("inf"), float("nan")]))
    assert bool(odd.isnan().all())


@pytest.mark.parametrize("exponent", [-100, -20, -8, 0, 7, 8, 100])
def test_code_times_scale_is_exact_in_bfloat16(exponent: int) -> None:
    """Every code that is a number is read as exactly itself times the scale that kvtier gives a
    page whose greatest number it is, by both ways out of a page.
    """
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes.view(torch.float8_e4m3fn).float().isfinite()]
    scale = power_of_two_scales(torch.tensor([448.0 * 2.0**exponent]))
    assert scale.item() == 2.0**exponent
    pool = fp8_pool(len(codes), 1, 1)
    pool.kv[7].view(torch.uint8).copy_(codes.expand(pool.kv[7].shape))
    for layer in range(LAYERS):
        pool.scales(layer)[7] = scale
    exact = codes.view(torch.float8_e4m3fn).double() * 2.0**exponent
    pages = Fp8Pages(pool, torch.bfloat16).prepare(decode_batch(7, 0))
    for layer in range(LAYERS):
        for part in (0, 1):
            got = pages.gathered(layer, part).double()
            assert torch.equal(got, exact.view(1, 1, 1, -1))


@pytest.mark.parametrize("sizes", [1.0, 2e5, 1e-30], ids=["usual", "great", "tiny"])
@pytest.mark.parametrize(("dim", "heads", "tokens"), [(DIM, 4, SIZE), (31, 1, 1)])
def test_all_codes_are_read_as_they_are(sizes: float, dim: int, heads: int, tokens: int) -> None:
    """The fast way out of a page against the number a code stands for; odd sizes of runs too."""
    pool, generator = fp8_pool(dim, heads, tokens), seeded(dim)
    count = pool.kv[0].numel()
    raw = torch.arange(count + 4, dtype=torch.int64).to(torch.uint8)
    raw[(raw & 0x7F) == 0x7F] = 3
    for page in range(4):
        codes = raw[page : page + count].view(pool.kv[0].shape)
        pool.kv[page].view(torch.uint8).copy_(codes)
    for layer in range(LAYERS):
        greatest = torch.rand((PAGES, 2, heads), generator=generator) * 448 * sizes
        pool.scales(layer).copy_(power_of_two_scales(greatest))
    batch = Batch(
        sequences=2,
        rows_each=1,
        tokens=torch.zeros(2, dtype=torch.long),
        positions=torch.zeros(2, dtype=torch.long),
        pages=torch.tensor([8, 9]),
        offsets=torch.tensor([0, 0]),
        tables=torch.tensor([[2, 0], [3, 1]]),
        lengths=torch.tensor([20, 20]),
    )
    for dtype in (torch.bfloat16, torch.float32):
        got = Fp8Pages(pool, dtype).prepare(batch)
        for layer in range(LAYERS):
            for part in (0, 1):
                expected = read(pool)[[2, 0, 3, 1], part, layer]
                assert torch.equal(got.gathered(layer, part).double(), expected)


def decode_batch(page: int, offset: int) -> Batch:
    return Batch(
        sequences=1,
        rows_each=1,
        tokens=torch.zeros(1, dtype=torch.long),
        positions=torch.tensor([offset]),
        pages=torch.tensor([page]),
        offsets=torch.tensor([offset]),
        tables=torch.tensor([[page]]),
        lengths=torch.tensor([offset + 1]),
    )


@pytest.mark.parametrize("order", ["rising", "falling", "random"])
def test_rows_that_come_one_by_one_are_kept_as_well_as_at_once(order: str) -> None:
    draw, pool = random.Random(11), fp8_pool()
    steps = {"rising": range(SIZE), "falling": range(SIZE, 0, -1), "random": None}[order]
    powers = list(steps) if steps else [draw.randint(0, SIZE) for _ in range(SIZE)]
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn((SIZE, 2, KV_HEADS, DIM), generator=generator)
    rows *= torch.tensor([2.0**power for power in powers])[:, None, None, None]
    untouched = pool.rows[3].clone()
    for offset, (key, value) in enumerate(rows):
        for layer in range(LAYERS):
            pages = Fp8Pages(pool, torch.float32).prepare(decode_batch(7, offset))
            pages.write(layer, key[None], value[None])
    got = read(pool)[7]
    for layer in range(LAYERS):
        scales = pool.scales(layer)[7].double()
        assert torch.equal(scales, power_of_two_scales(rows.abs().amax(dim=(0, 3))).double())
        for part in (0, 1):
            wanted = rows[:, part].double()
            assert within(got[part, layer], wanted, scales[part][None, :, None])
    assert torch.equal(pool.rows[3], untouched)


@pytest.mark.parametrize("what", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("rows_each", [1, SIZE])
def test_what_is_no_number_is_never_read_as_one(what: float, rows_each: int) -> None:
    pool = fp8_pool()
    batch = batch_of([32], rows_each, seed=1, device="cpu")
    generator = seeded(rows_each)
    key, value = (torch.randn((rows_each, KV_HEADS, DIM), generator=generator) for _ in "kv")
    value[rows_each // 2, 1, 7] = what
    pages = Fp8Pages(pool, torch.bfloat16).prepare(batch)
    page = int(batch.pages[0])
    pages.write(0, key, value)
    assert not bool(torch.stack(pool.extremes(page)).isfinite().all())
    assert bool(pages.gathered(0, 1)[-1][..., 1, :].isnan().all())
    assert bool(pages.gathered(0, 0).isfinite().all())
    # Nor does a later row make it one.
    if rows_each == 1:
        pages.write(0, key, key)
        assert bool(pages.gathered(0, 1)[-1][..., 1, :].isnan().all())


def test_extremes_see_a_code_that_is_no_number() -> None:
    pool = fp8_pool()
    assert bool(torch.stack(pool.extremes(2)).isfinite().all())
    for code in (0x7F, 0xFF):
        pool.kv[2].view(torch.uint8)[1, 0, 3, 1, 5] = code
        assert not bool(torch.stack(pool.extremes(2)).isfinite().all())
    assert bool(torch.stack(pool.extremes(1)).isfinite().all())
