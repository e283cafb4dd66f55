"""Attention over pages with torch's dense attention: the reference, and the way of the CPU.

The pages of every sequence are gathered into one dense tensor, then attention runs over it. Two
things make this fast on a CPU: the gather copies whole (layer, k or v) runs of a page, each one
contiguous piece; and query heads that share a key head become rows of that head's query, so that
no key is repeated. What lies in a page past a sequence's length is masked by adding minus
infinity, so every number in the pool must be finite. `pages.py` and `fp8.py` know how pages lie.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from kvtier_engine.attention.base import Batch
from kvtier_engine.attention.pages import KvPages

__all__ = ["SdpaAttention"]


class SdpaAttention:
    """Over the pages of one pool."""

    def __init__(self, pages: KvPages) -> None:
        self._pages = pages

    def prepare(self, batch: Batch) -> _SdpaPass:
        return _SdpaPass(self._pages, batch)


class _SdpaPass:
    def __init__(self, pages: KvPages, batch: Batch) -> None:
        self._kv = pages.prepare(batch)
        self._batch = batch
        self._kv_heads, self._dim = pages.form.heads, pages.form.dim
        self._tokens = batch.tables.shape[1] * pages.form.page_tokens
        self._mask = self._causal_mask(pages.dtype)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        batch = self._batch
        self._kv.write(layer, key, value)
        groups = query.shape[1] // self._kv_heads
        grouped = (
            query.view(batch.sequences, batch.rows_each, self._kv_heads, groups, self._dim)
            .permute(0, 2, 3, 1, 4)
            .reshape(batch.sequences, self._kv_heads, groups * batch.rows_each, self._dim)
        )
        mask = self._mask
        if batch.rows_each > 1:
            mask = mask.repeat(1, 1, groups, 1)
        out = functional.scaled_dot_product_attention(
            grouped, self._gathered(layer, 0), self._gathered(layer, 1), attn_mask=mask
        )
        return (
            out.view(batch.sequences, self._kv_heads, groups, batch.rows_each, self._dim)
            .permute(0, 3, 1, 2, 4)
            .reshape(query.shape)
        )

    def _gathered(self, layer: int, part: int) -> torch.Tensor:
        """(sequences, kv_heads, tokens, dim) of one layer's keys or values."""
        shape = (self._batch.sequences, self._tokens, self._kv_heads, self._dim)
        return self._kv.gathered(layer, part).view(shape).transpose(1, 2)

    def _causal_mask(self, dtype: torch.dtype) -> torch.Tensor:
        """(sequences, 1, rows_each, tokens): 0 where a row may look, minus infinity elsewhere."""
        batch = self._batch
        device = batch.lengths.device
        rows = torch.arange(batch.rows_each, device=device) - batch.rows_each
        last_seen = batch.lengths[:, None] + rows[None]
        tokens = torch.arange(self._tokens, device=device)
        hidden = tokens[None, None] > last_seen[:, :, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device)
        return mask.masked_fill_(hidden, float("-inf"))[:, None]
