"""vLLM's side of `vllm_beside`: decodes batches with one model, a round at a time.

    python -m benchmarks.peers.vllm_decode --model DIR --dtype bf16 --batches 1 8 32 --steps 32

A round is an answer of tokens/s for each batch (see rounds.py). Only decoding is timed: steps in
which every request of the batch gets its next token, from the one in which the last of them got its
first. Runs in vLLM's environment.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.rounds import answers, ending, serve
from benchmarks.prompts import random_prompts

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
#: Beside the timed ones: the first, and some for steps in which not all had begun.
MORE_TOKENS = 8
MODEL_TOKENS = 256


class Decoding:
    """One engine, in this process: its steps are made here."""

    def __init__(self, model: str, dtype: str, requests_max: int, *, is_eager: bool) -> None:
        from vllm import LLM

        self._engine: Any = LLM(
            model=model,
            dtype=DTYPES[dtype],
            max_model_len=MODEL_TOKENS,
            max_num_seqs=requests_max,
            enable_prefix_caching=False,
            enforce_eager=is_eager,
        ).llm_engine
        self._given: dict[str, int] = {}
        self._numbers = 0

    @property
    def vocabulary(self) -> int:
        return int(self._engine.model_config.get_vocab_size())

    def rate(self, prompts: Sequence[Sequence[int]], steps: int) -> float:
        """Tokens a second."""
        from vllm import SamplingParams, TokensPrompt

        self._given.clear()
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=steps + MORE_TOKENS)
        for prompt in prompts:
            self._numbers += 1
            prompted = TokensPrompt(prompt_token_ids=list(prompt))
            self._engine.add_request(str(self._numbers), prompted, sampling)
        while len(self._given) < len(prompts):
            self._step()
        before, began = self._tokens, time.perf_counter()
        while self._tokens < before + steps * len(prompts):
            self._step()
        tokens, seconds = self._tokens - before, time.perf_counter() - began
        if any(given >= steps + MORE_TOKENS for given in self._given.values()):
            raise RuntimeError(f"a request ended while it was timed: {self._given}")
        while self._engine.has_unfinished_requests():
            self._step()
        return tokens / seconds

    @property
    def _tokens(self) -> int:
        return sum(self._given.values())

    def _step(self) -> None:
        for output in self._engine.step():
            self._given[output.request_id] = len(output.outputs[0].token_ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=DTYPES, required=True)
    parser.add_argument("--batches", type=int, nargs="+", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--eager", action="store_true")
    arguments = parser.parse_args()
    out = answers()
    with ending():
        import vllm

        decoding = Decoding(
            arguments.model, arguments.dtype, max(arguments.batches), is_eager=arguments.eager
        )

        def measure(number: int) -> dict[str, float]:
            return {
                f"decode-{batch}": decoding.rate(
                    random_prompts(decoding.vocabulary, batch, arguments.seed + number),
                    arguments.steps,
                )
                for batch in arguments.batches
            }

        serve(out, vllm.__version__, measure)


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    main()
