"""Logits of a text whose beginning came back from a cache, and of one that is computed in one go.

The beginning ("context") is computed page by page into a pool, as an engine's prefill does; then
each of its pages is packed by the codec and unpacked in place, which is what a page goes through on
its way to a tier and back; then the rest is computed upon it. With Codec.RAW pages are left as they
are, so that two codecs differ in nothing else.

One thread; a Scorer holds one pool and one text at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kvtier import Codec
from kvtier.client.device import DevicePool, PageTable
from kvtier.packing import fp8
from kvtier_engine.attention.base import Batch
from kvtier_engine.attention.choice import attention_for
from kvtier_engine.errors import InvalidRequest
from kvtier_engine.model.load import LoadedModel
from kvtier_engine.settings import KvCacheDtype, layout_of

__all__ = ["Scorer"]


class Scorer:
    """Of `model`, with pages of `page_tokens` tokens and room for `tokens_max` tokens. Over a pool
    in fp8 (`kv_cache`) pages are what attention left there: Codec.RAW alone is for those.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        page_tokens: int,
        tokens_max: int,
        kv_cache: KvCacheDtype = KvCacheDtype.AS_COMPUTED,
    ) -> None:
        context = model.network.config.context_tokens
        if not page_tokens < tokens_max <= context:
            raise InvalidRequest(
                f"{tokens_max} tokens in pages of {page_tokens}, and a context of {context}",
                remedy="ask for more than one page, and for no more than the model's context",
            )
        self.model = model
        self.page_tokens = page_tokens
        self.tokens_max = tokens_max
        self.layout = layout_of(model, page_tokens=page_tokens, kv_cache=kv_cache)
        self._pool = DevicePool(self.layout, -(-tokens_max // page_tokens))
        self._attention = attention_for(self._pool, model.network.dtype)

    def whole_pages(self, tokens: int) -> int:
        """The tokens of the full pages among the first `tokens`."""
        return tokens - tokens % self.page_tokens

    @torch.inference_mode()
    def logits(
        self, context: Sequence[int], rests: Sequence[Sequence[int]], codecs: Sequence[Codec]
    ) -> dict[Codec, list[torch.Tensor]]:
        """For each codec and each rest: (len(rest) + 1, vocab) in float32, of what follows the
        context and each token of the rest.

        Raises InvalidRequest for a context that is empty or ends inside a page, and for more tokens
        than there is room for.
        """
        made: dict[Codec, list[torch.Tensor]] = {codec: [] for codec in codecs}
        longest = max(map(len, rests), default=0)
        for codec, table, last in self._contexts(context, longest, codecs):
            for rest in rests:
                # Each one writes over the KV of the one before it.
                parts = [last]
                if rest:
                    hidden = self._forward(table, rest, start=len(context))
                    parts.append(self.model.network.logits(hidden))
                made[codec].append(torch.cat(parts))
        return made

    @torch.inference_mode()
    def greedy(
        self, context: Sequence[int], rest: Sequence[int], codecs: Sequence[Codec], *, tokens: int
    ) -> dict[Codec, list[int]]:
        """For each codec the likeliest `tokens` tokens after context and rest, fewer when the model
        ends its text. Raises as `logits`.
        """
        made: dict[Codec, list[int]] = {}
        for codec, table, last in self._contexts(context, len(rest) + tokens, codecs):
            made[codec] = self._continued(table, context, rest, last, tokens)
        return made

    def _continued(
        self,
        table: PageTable,
        context: Sequence[int],
        rest: Sequence[int],
        last: torch.Tensor,
        tokens: int,
    ) -> list[int]:
        network, chosen = self.model.network, list[int]()
        at = len(context) + len(rest)
        if rest:
            last = network.logits(self._forward(table, rest, start=len(context))[-1:])
        while len(chosen) < tokens:
            token = int(last.argmax())
            if token in network.config.end_ids:
                break
            chosen.append(token)
            last = network.logits(self._forward(table, [token], start=at + len(chosen) - 1))
        return chosen

    def _contexts(
        self, context: Sequence[int], room: int, codecs: Sequence[Codec]
    ) -> Iterator[tuple[Codec, PageTable, torch.Tensor]]:
        """For each codec a table with the context's pages as it leaves them and room for so many
        tokens more, and the logits (1, vocab) after the context.
        """
        total = len(context) + room
        if not context or len(context) % self.page_tokens or total > self.tokens_max:
            raise InvalidRequest(
                f"a context of {len(context)} tokens and {room} more",
                remedy=f"whole pages of {self.page_tokens} tokens first, {self.tokens_max} in all",
            )
        table = PageTable(self._pool)
        table.append(self._pool.allocate(-(-total // self.page_tokens)))
        stored = list(table.ids[: len(context) // self.page_tokens])
        try:
            self._pool.rows[list(table.ids)] = 0  # what is masked has to be finite
            for at in range(0, len(context), self.page_tokens):
                hidden = self._forward(table, context[at : at + self.page_tokens], start=at)
            last = self.model.network.logits(hidden[-1:])
            raw = self._pool.rows[stored]
            for codec in codecs:
                self._pool.rows[stored] = raw
                self._store(stored, codec)
                yield codec, table, last
        finally:
            table.release()

    def _store(self, ids: Sequence[int], codec: Codec) -> None:
        """Each of these pages to its stored form and back, in place."""
        if codec is Codec.RAW:
            return
        for page in ids:
            row = self._pool.rows[page, : self.layout.raw_bytes]
            row.copy_(fp8.unpack(self.layout, fp8.pack(self.layout, row)))

    def _forward(self, table: PageTable, tokens: Sequence[int], *, start: int) -> torch.Tensor:
        """Hidden states (len(tokens), hidden) of tokens at `start` and after."""
        batch = Batch.of_run(table, list(tokens), start=start)
        return self.model.network.forward(batch, self._attention)
