"""The process that comes after a crash: answers the prompt from what the NVMe tier kept."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from transformers import DynamicCache

from kvtier_engine.causal_lm import CausalLM
from kvtier_engine.demo.decode import Decoder, compared
from kvtier_engine.demo.job import PAGE_TOKENS, Job, answer
from kvtier_engine.demo.store import Store


def work(job: Job) -> dict[str, Any]:
    lm = CausalLM.load(Path(job.model_dir))
    ids = lm.chat_ids(*job.prompt())
    lm.prefill(
        ids[: PAGE_TOKENS + 1], DynamicCache(), page_tokens=PAGE_TOKENS
    )  # warm the libraries
    with Store.connect(job, lm) as store:
        decoder = Decoder(lm=lm, ids=ids, store=store, tokens=job.tokens)
        reference = decoder.recompute()
        return compared(decoder.resume(packed=False), reference)


if __name__ == "__main__":
    sys.exit(answer(work))
