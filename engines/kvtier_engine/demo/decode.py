"""The decode process: answers the same prompt from nothing, from pages, and from damaged pages.

What is compared with what: the reference is the same model in the same process without the cache.
Both compute page by page (see causal_lm), so equality is asked for bit by bit, logits included. A
prompt computed in one pass could differ from either in the last bits, with or without a cache.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from kvtier_engine.causal_lm import CausalLM, Continuation
from kvtier_engine.demo.damage import flip_payload_byte
from kvtier_engine.demo.job import PAGE_TOKENS, Job, answer
from kvtier_engine.demo.store import Fetched, Store
from kvtier_engine.hf_pages import cache_from_pages, pages_from_cache

__all__ = ["Decoder", "compared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One run over the prompt: what was chosen, and the seconds until the first token was."""

    said: Continuation
    first_token_seconds: float
    fetched: Fetched | None
    cache: DynamicCache


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """One model, one prompt, one store."""

    lm: CausalLM
    ids: list[int]
    store: Store
    tokens: int

    def recompute(self) -> Answer:
        """From nothing."""
        return self._answer(time.monotonic(), DynamicCache(), None)

    def resume(self, *, packed: bool, forced: list[int] | None = None) -> Answer:
        """From the pages that hit; what is missing, and the tail, is computed."""
        started = time.monotonic()
        fetched = self.store.get(self.ids, packed=packed)
        cache = cache_from_pages(fetched.pages)
        return self._answer(started, cache, fetched, forced or [])

    def _answer(
        self,
        started: float,
        cache: DynamicCache,
        fetched: Fetched | None,
        forced: list[int] | None = None,
    ) -> Answer:
        logits = self.lm.prefill(self.ids, cache, page_tokens=PAGE_TOKENS)
        first = time.monotonic() - started
        said = self.lm.decode(logits, cache, tokens=self.tokens, forced=forced or [])
        return Answer(said=said, first_token_seconds=first, fetched=fetched, cache=cache)


def work(job: Job) -> dict[str, Any]:
    lm = CausalLM.load(Path(job.model_dir))
    ids = lm.chat_ids(*job.prompt())
    lm.prefill(
        ids[: PAGE_TOKENS + 1], DynamicCache(), page_tokens=PAGE_TOKENS
    )  # warm the libraries
    with Store.connect(job, lm) as store:
        decoder = Decoder(lm=lm, ids=ids, store=store, tokens=job.tokens)
        reference = decoder.recompute()
        return {
            "pages": store.full_pages(ids),
            "keys": [key.hex() for key in store.keys(ids)],
            "uncached": {
                "first_token_seconds": reference.first_token_seconds,
                "text": lm.text(reference.said.ids),
            },
            "raw": compared(decoder.resume(packed=False), reference),
            "fp8": _fp8(decoder, reference),
            "damaged": _damaged(decoder, reference, job.daemon_pid),
        }


def compared(ours: Answer, reference: Answer) -> dict[str, Any]:
    """What was fetched, and how the answer stands to the one computed from nothing."""
    fetched = ours.fetched
    assert fetched is not None
    same = [a == b for a, b in zip(ours.said.ids, reference.said.ids, strict=True)]
    return {
        "hits": len(fetched.pages),
        "bytes": fetched.bytes_at_rest,
        "reasons": dict(Counter(fetched.reasons)),
        "tiers": dict(Counter(fetched.tiers)),
        "get_seconds": fetched.seconds,
        "first_token_seconds": ours.first_token_seconds,
        "tokens": len(same),
        "tokens_same": sum(same),
        "logits_same_bits": torch.equal(ours.said.logits, reference.said.logits),
    }


def _fp8(decoder: Decoder, reference: Answer) -> dict[str, Any]:
    """fp8 changes numbers, so it is measured: along the reference's tokens, place by place."""
    ours = decoder.resume(packed=True, forced=reference.said.ids)
    exact = torch.log_softmax(reference.said.logits.double(), dim=-1)
    lossy = torch.log_softmax(ours.said.logits.double(), dim=-1)
    divergence = (exact.exp() * (exact - lossy)).sum(dim=-1)
    refused = decoder.store.get(decoder.ids, packed=True, lossy_ok=False)
    return {
        **compared(ours, reference),
        "kl_mean": float(divergence.mean()),
        "kl_max": float(divergence.max()),
        "hits_without_lossy_ok": len(refused.pages),
    }


def _damaged(decoder: Decoder, reference: Answer, daemon_pid: int) -> dict[str, Any]:
    """One byte of one stored page is flipped: that page must not come back, the text must."""
    store, ids = decoder.store, decoder.ids
    victim = store.full_pages(ids) - 3
    slot = store.get(ids, packed=False).slots[victim]
    flip_payload_byte(daemon_pid, slot, at=store.raw_bytes // 2)
    ours = decoder.resume(packed=False)
    assert ours.fetched is not None
    result = {
        **compared(ours, reference),
        "page": victim,
        "page_reason": ours.fetched.reasons[victim],
    }
    pages = pages_from_cache(ours.cache, page_tokens=PAGE_TOKENS)
    result["durable"] = store.put(ids, pages, packed=False, durable=True)
    result["hits_after_putting_it_again"] = len(store.get(ids, packed=False).pages)
    return result


if __name__ == "__main__":
    sys.exit(answer(work))
