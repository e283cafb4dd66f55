"""Decode throughput of the bundled engine beside transformers' generate: one model, one process.

    python -m benchmarks.engine_decode [--quick] [--rounds 2] [--only bf16] [--json FILE]

SmolLM2-135M on the CPU, greedy, prompts of PROMPT_TOKENS random tokens, all of one length so that
neither side pads. Only decoding is timed, as many steps of all sequences on both sides.
transformers runs one batch with its dynamic cache, from the first token on; the engine runs as many
requests, through its scheduler, with tag checks on. Its prefill passes and decode steps take turns,
so the first requests have decoded some tokens when the last one begins to and the clock starts:
their prompts are shorter by as many, and all contexts as long as transformers'. In each round both
run, by turns first. The threads are torch's (OMP_NUM_THREADS).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from benchmarks.common import in_turn
from benchmarks.plan import Measured, Plan, finish, parser_of, progress
from benchmarks.prompts import PROMPT_TOKENS, random_prompts
from benchmarks.rows import Bound, Row, Target
from kvtier.client.device import DevicePool
from kvtier_engine.engine import Engine
from kvtier_engine.model.load import LoadedModel, load_model
from kvtier_engine.schedule.request import Request, Sampling
from kvtier_engine.schedule.states import State
from kvtier_engine.settings import EngineSettings, Integrity, layout_of
from kvtier_engine.smollm2 import ensure_model

PAGE_TOKENS = 32
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
BATCHES = (1, 8, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What both sides do in one round: prompts and how many tokens each is given, of which all but
    the first are timed.
    """

    prompts: list[list[int]]
    tokens: int

    @property
    def steps(self) -> int:
        return self.tokens - 1

    @property
    def timed_tokens(self) -> int:
        return len(self.prompts) * self.steps

    @property
    def engine_tokens(self) -> int:
        """How many tokens the engine gives each. Between two prefill passes those decode that can:
        the first request does so once for each pass of all, and has to be there until the end.
        """
        passes = sum(-(-len(prompt) // PAGE_TOKENS) for prompt in self.prompts)
        return passes + self.tokens + 1

    @property
    def request_tokens(self) -> int:
        """What a request may come to in the engine's pool, prompt and all."""
        return max(map(len, self.prompts)) + self.engine_tokens

    @property
    def pages(self) -> int:
        """A pool with room for all."""
        return len(self.prompts) * -(-self.request_tokens // PAGE_TOKENS)

    def evened(self) -> Work:
        """The same for the engine: of each prompt the end, without as many tokens as its request
        decodes before the last one begins to. Raises ValueError unless that leaves some of each,
        and each is computed in one pass.
        """
        last = len(self.prompts) - 1
        if not all(last < len(prompt) <= PAGE_TOKENS for prompt in self.prompts):
            raise ValueError(f"prompts of more than {last} and at most {PAGE_TOKENS} tokens")
        return Work(
            prompts=[prompt[last - at :] for at, prompt in enumerate(self.prompts)],
            tokens=self.tokens,
        )


def work_of(
    vocabulary: int, batch: int, tokens: int, seed: int, prompt_tokens: int = PROMPT_TOKENS
) -> Work:
    prompts = random_prompts(vocabulary, batch, seed, prompt_tokens)
    return Work(prompts=prompts, tokens=tokens)


def all_decoding(
    model: LoadedModel, pool: DevicePool, work: Work, integrity: Integrity = Integrity.TAGS
) -> Engine:
    """An engine in which all requests decode, and will for `work.steps`. Raises RuntimeError."""
    engine = Engine(model, pool, settings=EngineSettings(integrity=integrity))
    sampling = Sampling(max_tokens=work.engine_tokens, ignore_end=True)
    for prompt in work.prompts:
        engine.submit(Request(prompt=tuple(prompt), sampling=sampling))
    engine.step()
    while not all(one.state is State.DECODING for one in engine.inside.sequences):
        engine.step()
    check_all_decode(engine, work)
    return engine


def check_all_decode(engine: Engine, work: Work) -> None:
    """Raises RuntimeError when a request has ended, waits or was preempted."""
    decode = sum(one.state is State.DECODING for one in engine.inside.sequences)
    if decode != len(work.prompts):
        raise RuntimeError(f"{decode} of {len(work.prompts)} requests decode")


def tokens_of(engine: Engine) -> int:
    """Of all requests that are there, prompts and answers."""
    return sum(len(one.tokens) for one in engine.inside.sequences)


def engine_rate(model: LoadedModel, work: Work, pool: DevicePool | None = None) -> float:
    """Tokens a second, with an engine of its own; by default over plain pages, as many as it needs.
    Raises RuntimeError unless every request decodes in every step that is timed.
    """
    pool = pool or DevicePool(layout_of(model, page_tokens=PAGE_TOKENS), work.pages)
    engine = all_decoding(model, pool, work)
    before = tokens_of(engine)
    started = perf_counter()
    for _ in range(work.steps):
        engine.step()
    seconds = perf_counter() - started
    tokens = tokens_of(engine) - before
    check_all_decode(engine, work)
    engine.close()
    if tokens != work.timed_tokens:
        raise RuntimeError(f"{tokens} tokens were decoded, not {work.timed_tokens}")
    return tokens / seconds


class _Times:
    """Called by generate after every token."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.at.append(perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool)


def transformers_rate(model: Any, work: Work) -> float:
    """Tokens a second of generate, from the first token on. Raises RuntimeError when it gave
    another number of them.
    """
    times = _Times()
    ids = torch.tensor(work.prompts)
    with torch.inference_mode():
        given = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=work.tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            stopping_criteria=[times],
        )
    steps, new_tokens = len(times.at) - 1, given.shape[1] - ids.shape[1]
    if given.shape[0] != len(work.prompts) or steps != work.steps or new_tokens != work.tokens:
        raise RuntimeError(f"{tuple(given.shape)} tokens in {steps} timed steps, not {work.steps}")
    return work.timed_tokens / (times.at[-1] - times.at[0])


def rows(plan: Plan) -> Iterator[Measured]:
    from transformers import AutoModelForCausalLM

    place = ensure_model().directory
    for name, dtype in DTYPES.items():
        if not plan.wants_some(f"decode/{name}"):
            continue
        ours = load_model(place, dtype=dtype)
        theirs = AutoModelForCausalLM.from_pretrained(place, dtype=dtype).eval()
        for batch in BATCHES:
            row = f"decode/{name}-{batch}"
            if plan.wants(row):
                progress(row)
                yield row_of(row, f"decode, {name}, batch {batch}", (ours, theirs), batch, plan)


def row_of(
    name: str, what: str, models: tuple[LoadedModel, Any], batch: int, plan: Plan
) -> Measured:
    ours, theirs = models
    tokens = plan.sized(33 if batch < 32 else 17, 4)

    def work(number: int) -> Work:
        return work_of(ours.network.config.vocab_size, batch, tokens, plan.seed + number)

    pairs = in_turn(
        lambda number: engine_rate(ours, work(number).evened()),
        lambda number: transformers_rate(theirs, work(number)),
        plan.rounds(3 if batch < 32 else 2),
        warm=1 if batch == 1 else 0,
    )
    return Row.of_pairs(
        name,
        what,
        pairs,
        "tokens/s",
        "transformers generate",
        target=Target(bound=Bound.AT_LEAST, number=1.0),
        note=f"{torch.get_num_threads()} threads",
    )


def main() -> int:
    arguments = parser_of(__doc__).parse_args()
    return finish("Decode", lambda: rows(Plan.of(arguments)), arguments)


if __name__ == "__main__":
    sys.exit(main())
