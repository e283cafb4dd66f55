"""Attention over pages with torch's variable-length kernel, which reads them where they lie. CUDA.

Keys are not split across blocks (`num_splits=1`), so a sequence's result does not depend on who
shares its batch. Importing the kernel loads torch's compiler, which takes seconds: only a pool that
needs it pays for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from kvtier_engine.attention.base import Batch

__all__ = ["VarlenAttention"]

_Kernel: TypeAlias = Callable[..., Any]


class VarlenAttention:
    """Over `kv` (pages, 2, layers, page_tokens, kv_heads, dim) in bfloat16 or float16."""

    def __init__(self, kv: torch.Tensor) -> None:
        from torch.nn.attention.varlen import varlen_attn

        self._kv = kv
        self._kernel: _Kernel = varlen_attn

    def prepare(self, batch: Batch) -> _VarlenPass:
        return _VarlenPass(self._kv, batch, self._kernel)


class _VarlenPass:
    def __init__(self, kv: torch.Tensor, batch: Batch, kernel: _Kernel) -> None:
        self._kv = kv
        self._kernel = kernel
        self._batch = batch
        rows = batch.sequences * batch.rows_each
        self._query_starts = torch.arange(
            0, rows + 1, batch.rows_each, dtype=torch.int32, device=kv.device
        )
        self._lengths = batch.lengths.int()
        self._tables = batch.tables.int()
        self._tokens_max = batch.tables.shape[1] * kv.shape[3]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        batch = self._batch
        keys, values = self._kv[:, 0, layer], self._kv[:, 1, layer]
        keys[batch.pages, batch.offsets] = key
        values[batch.pages, batch.offsets] = value
        out = self._kernel(
            query,
            keys,
            values,
            self._query_starts,
            None,
            batch.rows_each,
            self._tokens_max,
            window_size=(-1, 0),
            enable_gqa=True,
            seqused_k=self._lengths,
            block_table=self._tables,
            num_splits=1,
        )
        assert isinstance(out, torch.Tensor)
        return out
