"""Batches over scattered pages, and softmax attention written down: what kernels are held to."""

from __future__ import annotations

import math
import random

import torch

from kvtier.client.device import PageForm
from kvtier_engine.attention.base import Batch

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


def form_of(kv: torch.Tensor) -> PageForm:
    """Of plain pages `kv` (pages, 2, layers, page_tokens, kv_heads, dim)."""
    _, _, layers, tokens, heads, dim = kv.shape
    nbytes = kv[0].nbytes
    return PageForm(
        layers=layers,
        page_tokens=tokens,
        heads=heads,
        dim=dim,
        dtype=kv.dtype,
        nbytes=nbytes,
        scales_offset=nbytes,
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


#: Lengths of sequences, and rows of each.
CASES = [([1], 1), ([16], 16), ([37], 5), ([48], 16), ([1, 16, 17, 40], 1), ([20, 33], 3)]
