"""From a plan to numbers: puts a batch together, runs the network over it, gives logits back.

A prefill pass is a chunk of one sequence, a decode pass one row of each of several. One thread.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
from torch.nn.utils.rnn import pad_sequence

from kvtier.client.device import DevicePool, PageTable
from kvtier_engine.attention.base import Attention, Batch
from kvtier_engine.model.llama import Llama
from kvtier_engine.schedule.scheduler import Prefill
from kvtier_engine.schedule.sequence import Sequence

__all__ = ["ModelRunner"]


class ModelRunner:
    """One network over one pool."""

    def __init__(self, network: Llama, pool: DevicePool, attention: Attention) -> None:
        self._network = network
        self._attention = attention
        self._page_tokens = pool.form.page_tokens
        self._device = pool.device

    def prefill(self, plan: Prefill) -> torch.Tensor | None:
        """Writes the chunk's KV. Logits (1, vocab) of the last token of all, None before it."""
        sequence, size = plan.sequence, self._page_tokens
        start, end = plan.first * size, min(plan.end * size, sequence.prefill_tokens)
        tokens = sequence.tokens[start:end]
        batch = Batch.of_run(sequence.table, tokens, start=start, arriving=sequence.arriving)
        with torch.inference_mode():
            hidden = self._network.forward(batch, self._attention)
            is_last = end == sequence.prefill_tokens  # that token is in no cache
            return self._network.logits(hidden[-1:]) if is_last else None

    def decode(self, sequences: SequenceOf[Sequence]) -> torch.Tensor:
        """Writes the KV of each sequence's last token; logits (sequences, vocab)."""
        lengths = torch.tensor([len(s.tokens) for s in sequences], device=self._device)
        positions = lengths - 1
        tables = _padded([sequence.table for sequence in sequences])
        places = (positions // self._page_tokens)[:, None]
        batch = Batch(
            sequences=len(sequences),
            rows_each=1,
            tokens=torch.tensor([s.tokens[-1] for s in sequences], device=self._device),
            positions=positions,
            pages=tables.gather(1, places)[:, 0],
            offsets=positions % self._page_tokens,
            tables=tables,
            lengths=lengths,
        )
        with torch.inference_mode():
            return self._network.logits(self._network.forward(batch, self._attention))


def _padded(tables: SequenceOf[PageTable]) -> torch.Tensor:
    """(sequences, pages): each table, filled up with its own first page.

    Its own, because what is masked still has to be finite, and another's page may be in the middle
    of a load.
    """
    padded = pad_sequence([table.pages for table in tables], batch_first=True, padding_value=-1)
    return torch.where(padded < 0, padded[:, :1], padded).long()
