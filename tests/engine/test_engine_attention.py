"""Attention over pages against a loop over single rows; the CUDA kernel against the same."""

from __future__ import annotations

import math
import random

import pytest
import torch

from kvtier_engine.attention.base import Attention, Batch
from kvtier_engine.attention.pages import PlainPages
from kvtier_engine.attention.sdpa import SdpaAttention
from kvtier_engine.attention.varlen import VarlenAttention

PAGES, LAYERS, SIZE, KV_HEADS, HEADS, DIM = 24, 2, 16, 2, 6, 32


def batch_of(lengths: list[int], rows_each: int, *, seed: int, device: str) -> Batch:
    """Sequences of these lengths (with the pass), each page somewhere else in the pool."""
    pages = random.Random(seed).sample(range(PAGES), PAGES)
    counts = [-(-length // SIZE) for length in lengths]
    tables = torch.zeros((len(lengths), max(counts)), dtype=torch.long)
    for row, count in enumerate(counts):
        tables[row, :count] = torch.tensor([pages.pop() for _ in range(count)])
    positions = torch.tensor(
        [length - rows_each + row for length in lengths for row in range(rows_each)]
    )
    owners = torch.arange(len(lengths)).repeat_interleave(rows_each)
    return Batch(
        sequences=len(lengths),
        rows_each=rows_each,
        tokens=torch.zeros(len(positions), dtype=torch.long, device=device),
        positions=positions.to(device),
        pages=tables[owners, positions // SIZE].to(device),
        offsets=(positions % SIZE).to(device),
        tables=tables.to(device),
        lengths=torch.tensor(lengths, device=device),
    )


def row_by_row(kv: torch.Tensor, layer: int, batch: Batch, query: torch.Tensor) -> torch.Tensor:
    """Softmax attention written down for one row and one head at a time, in float64."""
    out = torch.empty(query.shape, dtype=torch.float64)
    for row in range(len(query)):
        sequence, position = row // batch.rows_each, int(batch.positions[row])
        places = [(int(batch.tables[sequence, t // SIZE]), t % SIZE) for t in range(position + 1)]
        for head in range(HEADS):
            kv_head = head // (HEADS // KV_HEADS)
            keys = torch.stack([kv[page, 0, layer, at, kv_head] for page, at in places]).double()
            values = torch.stack([kv[page, 1, layer, at, kv_head] for page, at in places]).double()
            weights = torch.softmax(keys @ query[row, head].double() / math.sqrt(DIM), dim=0)
            out[row, head] = weights @ values
    return out


def check(attention: Attention, kv: torch.Tensor, batch: Batch, *, seed: int, atol: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = batch.sequences * batch.rows_each
    for layer in range(LAYERS):
        query, key, value = (
            torch.randn((rows, heads, DIM), generator=generator).to(kv)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        before = kv.clone()
        out = attention.prepare(batch).attend(layer, query, key, value)
        before[batch.pages, 0, layer, batch.offsets] = key
        before[batch.pages, 1, layer, batch.offsets] = value
        assert torch.equal(kv, before), "wrote somewhere else than to the rows' places"
        expected = row_by_row(kv.cpu(), layer, batch, query.cpu())
        torch.testing.assert_close(out.cpu().double(), expected, atol=atol, rtol=0)


def pool(device: str, dtype: torch.dtype) -> torch.Tensor:
    shape = (PAGES, 2, LAYERS, SIZE, KV_HEADS, DIM)
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(device, dtype)


CASES = [([1], 1), ([16], 16), ([37], 5), ([48], 16), ([1, 16, 17, 40], 1), ([20, 33], 3)]


@pytest.mark.parametrize(("lengths", "rows_each"), CASES)
def test_dense_attention_is_softmax_attention(lengths: list[int], rows_each: int) -> None:
    kv = pool("cpu", torch.float32)
    batch = batch_of(lengths, rows_each, seed=3, device="cpu")
    check(SdpaAttention(PlainPages(kv)), kv, batch, seed=4, atol=2e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("lengths", "rows_each"), CASES)
def test_the_paged_kernel_is_softmax_attention(lengths: list[int], rows_each: int) -> None:
    kv = pool("cuda", torch.bfloat16)
    batch = batch_of(lengths, rows_each, seed=3, device="cuda")
    check(VarlenAttention(kv), kv, batch, seed=4, atol=2e-2)
