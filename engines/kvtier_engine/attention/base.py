"""The seam between the network and the KV: what a pass is, and who computes attention in it.

A Batch is passed as an argument to all who need it; there is no context beside it, so two engines
can share a process. An AttentionPass belongs to one pass in one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvtier.client.device import LayeredLoad, PageTable

__all__ = ["Attention", "AttentionPass", "Batch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One pass: `sequences` sequences with `rows_each` rows each, sequence after sequence.

    A prefill pass is one sequence and the rows of its chunk; a decode pass is one row of each of
    many (and would be a few rows of each with draft tokens). Rows are (sequences * rows_each,).

    `tokens`, `positions`: of each row. `pages`, `offsets`: where each row's KV is written.
    `tables`: (sequences, pages) page numbers in order, the sequence's own first page past its last
    one. `lengths`: (sequences,) tokens of KV that a sequence has when this pass has been written.
    `arriving`: a load whose layers may still be on their way to these pages; its `hold` comes
    before a layer is read or written.
    """

    sequences: int
    rows_each: int
    tokens: torch.Tensor
    positions: torch.Tensor
    pages: torch.Tensor
    offsets: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor
    arriving: LayeredLoad | None = None

    @classmethod
    def of_run(
        cls,
        table: PageTable,
        tokens: Sequence[int],
        *,
        start: int,
        arriving: LayeredLoad | None = None,
    ) -> Batch:
        """`tokens` at place `start` and after, of the one sequence that `table` is of."""
        size, device = table.pool.form.page_tokens, table.pool.device
        end = start + len(tokens)
        positions = torch.arange(start, end, device=device)
        pages = table.pages[: -(-end // size)].long()
        return cls(
            sequences=1,
            rows_each=len(tokens),
            tokens=torch.tensor(tokens, device=device),
            positions=positions,
            pages=pages[positions // size],
            offsets=positions % size,
            tables=pages[None],
            lengths=torch.tensor([end], device=device),
            arriving=arriving,
        )


class AttentionPass(Protocol):
    """Attention of one batch; what does not depend on the layer is computed once."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Writes `key` and `value` (rows, kv_heads, dim) to their pages, then attends causally.

        `query` is (rows, heads, dim); so is what is returned.
        """
        ...


class Attention(Protocol):
    """One way to compute attention over a pool of pages."""

    def prepare(self, batch: Batch) -> AttentionPass:
        """The pass over `batch`, whose tables must name pages of this pool."""
        ...
