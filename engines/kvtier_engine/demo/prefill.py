"""The prefill process: computes the prompt's KV, puts the full pages, and ends."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from transformers import DynamicCache

from kvtier_engine.causal_lm import CausalLM
from kvtier_engine.demo.job import PAGE_TOKENS, Job, answer
from kvtier_engine.demo.store import Store
from kvtier_engine.hf_pages import pages_from_cache


def work(job: Job) -> dict[str, Any]:
    """Puts every full page twice: as it is, and packed to fp8 for a tenant that asks for that."""
    lm = CausalLM.load(Path(job.model_dir))
    ids = lm.chat_ids(*job.prompt())
    cache = DynamicCache()
    started = time.monotonic()
    lm.prefill(ids, cache, page_tokens=PAGE_TOKENS)
    computed = time.monotonic()
    pages = pages_from_cache(cache, page_tokens=PAGE_TOKENS)
    with Store.connect(job, lm) as store:
        raw = store.put(ids, pages, packed=False)
        put = time.monotonic()
        fp8 = store.put(ids, pages, packed=True)
    return {
        "prompt_tokens": len(ids),
        "pages": len(pages),
        "page_bytes": store.raw_bytes,
        "raw_stored": raw,
        "fp8_stored": fp8,
        "prefill_seconds": computed - started,
        "put_seconds": put - computed,
    }


if __name__ == "__main__":
    sys.exit(answer(work))
