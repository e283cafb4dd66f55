"""A transformers causal model, its cache in the caller's hands: prefill by pages, greedy choice.

Why page by page: the last bits of a matrix product depend on how many rows it has. When every page
is computed in a forward pass of its own, the KV of a page does not depend on where a cache hit
ended, so a continuation from cached pages is the same, bit for bit, as one computed from nothing.
Not thread-safe; one process, one model.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging as transformers_logging

from kvtier_engine.errors import ModelUnusable

__all__ = ["CausalLM", "Continuation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """Chosen tokens and the logits they were chosen from, (tokens, vocab)."""

    ids: list[int]
    logits: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalLM:
    """A model in bfloat16 on the CPU. `cache_word` is what its forward calls the cache argument."""

    model: Any
    tokenizer: Any
    cache_word: str

    @classmethod
    def load(cls, directory: Path) -> CausalLM:
        """Loads a local Hugging Face directory; never asks a network. Raises ModelUnusable."""
        if not (directory / "config.json").is_file():
            raise ModelUnusable(
                f"{directory} holds no model", remedy="name a directory with a config.json"
            )
        os.environ["HF_HUB_OFFLINE"] = "1"
        transformers_logging.disable_progress_bar()
        transformers_logging.set_verbosity_error()
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.bfloat16, attn_implementation="sdpa", local_files_only=True
        )
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        return cls.of(model.eval(), tokenizer)

    @classmethod
    def of(cls, model: Any, tokenizer: Any = None) -> CausalLM:
        """Wraps a model that is loaded already."""
        # Renamed within transformers 5: a signature check is right for both.
        words = inspect.signature(model.forward).parameters
        word = "cache" if "cache" in words else "past_key_values"
        return cls(model=model, tokenizer=tokenizer, cache_word=word)

    def chat_ids(self, text: str, question: str) -> list[int]:
        """The token ids of one user message, ready for the answer."""
        messages = [{"role": "user", "content": f"{text.strip()}\n\n{question}"}]
        chat = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return list(self.tokenizer(chat, add_special_tokens=False).input_ids)

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def prefill(self, ids: list[int], cache: DynamicCache, *, page_tokens: int) -> torch.Tensor:
        """Computes what `cache` lacks, one page a pass. Returns the last token's logits (vocab,).

        The cache must hold whole pages of these very ids, and fewer tokens than there are ids.
        """
        start = cache.get_seq_length()
        assert start % page_tokens == 0, f"the cache ends inside a page, at token {start}"
        assert start < len(ids), "no token left to compute: logits need at least one"
        logits = torch.empty(0)
        for at in range(start, len(ids), page_tokens):
            logits = self.forward(ids[at : at + page_tokens], cache)[-1]
        return logits

    def forward(self, ids: list[int], cache: DynamicCache, *, last: int = 1) -> torch.Tensor:
        """Appends `ids` to the cache; the logits of the last `last` of them: (last, vocab)."""
        with torch.inference_mode():
            words = {self.cache_word: cache, "use_cache": True, "logits_to_keep": last}
            output = self.model(input_ids=torch.tensor([ids]), **words)
        return output.logits[0]  # type: ignore[no-any-return]

    def decode(
        self, logits: torch.Tensor, cache: DynamicCache, *, tokens: int, forced: Sequence[int] = ()
    ) -> Continuation:
        """The `tokens` most likely next tokens one by one, from the logits `prefill` returned.

        With `forced`, these tokens are fed instead, and the answer says what the model would have
        chosen at each place. Goes on past an end-of-text token, so that two runs can be compared
        over a fixed length.
        """
        rows = [logits]
        while len(rows) < tokens:
            token = forced[len(rows) - 1] if forced else int(rows[-1].argmax())
            rows.append(self.forward([token], cache)[-1])
        every = torch.stack(rows)
        return Continuation(ids=every.argmax(dim=-1).tolist(), logits=every)
