"""A prompt through a network page by page, without engine and pool: what engines are held to."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvtier_engine.attention.base import Batch
from kvtier_engine.attention.pages import PlainPages
from kvtier_engine.attention.sdpa import SdpaAttention
from kvtier_engine.model.llama import Llama
from tests.engine.attention_rig import form_of


class Dense:
    """KV for one sequence, in pages that lie in reverse order."""

    def __init__(self, network: Llama, *, pages: int, page_tokens: int) -> None:
        config = network.config
        shape = (pages, 2, config.layers, page_tokens, config.kv_heads, config.head_dim)
        self._network = network
        self._page_tokens = page_tokens
        self._order = torch.arange(pages - 1, -1, -1)
        kv = torch.zeros(shape, dtype=network.dtype)
        self._attention = SdpaAttention(PlainPages(kv, form_of(kv)))
        self.length = 0

    def feed(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits (tokens, vocab)."""
        size, end = self._page_tokens, self.length + len(tokens)
        positions = torch.arange(self.length, end)
        batch = Batch(
            sequences=1,
            rows_each=len(tokens),
            tokens=torch.tensor(list(tokens)),
            positions=positions,
            pages=self._order[positions // size],
            offsets=positions % size,
            tables=self._order[None, : -(-end // size)],
            lengths=torch.tensor([end]),
        )
        self.length = end
        with torch.inference_mode():
            return self._network.logits(self._network.forward(batch, self._attention))

    def prefill(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits of every token, one page a pass."""
        size = self._page_tokens
        parts = [self.feed(tokens[at : at + size]) for at in range(0, len(tokens), size)]
        return torch.cat(parts)

    def continued(self, tokens: Sequence[int], count: int) -> list[tuple[int, float]]:
        """The greedy answer: (token, gap between the two likeliest logits) for each."""
        row, said = self.prefill(tokens)[-1], []
        while True:
            best = row.topk(2)
            said.append((int(best.indices[0]), float(best.values[0] - best.values[1])))
            if len(said) == count:
                return said
            row = self.feed([said[-1][0]])[-1]
