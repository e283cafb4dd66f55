"""Attention over pages against a loop over single rows; the CUDA kernel against the same."""

from __future__ import annotations

import pytest
import torch

from kvtier_engine.attention.base import Attention, Batch
from kvtier_engine.attention.pages import PlainPages
from kvtier_engine.attention.sdpa import SdpaAttention
from kvtier_engine.attention.varlen import VarlenAttention
from tests.engine.attention_rig import (
    CASES,
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    PAGES,
    SIZE,
    batch_of,
    form_of,
    row_by_row,
)


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


@pytest.mark.parametrize(("lengths", "rows_each"), CASES)
def test_dense_attention_is_softmax_attention(lengths: list[int], rows_each: int) -> None:
    kv = pool("cpu", torch.float32)
    batch = batch_of(lengths, rows_each, seed=3, device="cpu")
    check(SdpaAttention(PlainPages(kv, form_of(kv))), kv, batch, seed=4, atol=2e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("lengths", "rows_each"), CASES)
def test_the_paged_kernel_is_softmax_attention(lengths: list[int], rows_each: int) -> None:
    kv = pool("cuda", torch.bfloat16)
    batch = batch_of(lengths, rows_each, seed=3, device="cuda")
    check(VarlenAttention(kv), kv, batch, seed=4, atol=2e-2)
