"""What an engine process of the demo does: answers turns of the chat, with and without kvtier.

What is compared with what: the reference is the same engine over an empty pool, without kvtier, in
the same process. Equality is asked for bit by bit, of tokens and of their log probabilities.

One thread: the engine steps where it is asked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import kvtier
from kvtier.client.device import DevicePool
from kvtier_engine.cache.tiers import KvtierTiers
from kvtier_engine.demo.job import PAGE_TOKENS, Job
from kvtier_engine.engine import Engine
from kvtier_engine.errors import DemoFailed
from kvtier_engine.model.load import load_model
from kvtier_engine.schedule.request import Completion, Request, Sampling
from kvtier_engine.settings import layout_of
from kvtier_engine.smollm2 import MODEL_ID

__all__ = ["Speaker", "Talker", "findable"]

TENANT = "demo"
POOL_PAGES = 72
DEADLINE_SECONDS = 10.0
DRAIN_SECONDS_MAX = 30.0
#: Compared beside the chosen tokens' own.
TOP_LOGPROBS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Speaker:
    """One engine with an empty pool. `tiers` None: nothing below it."""

    engine: Engine
    tiers: KvtierTiers | None
    tokens: int

    def answer(self, ids: Sequence[int], tokens: int | None = None) -> Completion:
        """Of one prompt; what it stored is stored when this returns. Raises KvtierError."""
        sampling = Sampling(max_tokens=tokens or self.tokens, logprobs=TOP_LOGPROBS)
        handle = self.engine.submit(Request(prompt=tuple(ids), sampling=sampling))
        self.engine.run_until_idle()
        if self.tiers is not None and not self.tiers.drain(DRAIN_SECONDS_MAX):
            raise DemoFailed(
                f"pages were not stored within {DRAIN_SECONDS_MAX:g} s",
                remedy="run it again on a machine with less to do",
            )
        return handle.result(0)

    def load_counts(self) -> dict[str, int]:
        """Pages that were asked of kvtier, by what came of them."""
        counts = self.tiers.counts if self.tiers is not None else {}
        return {
            name.removeprefix("load_").removesuffix("_pages"): count
            for name, count in counts.items()
            if name.startswith("load_") and name.endswith("_pages") and count
        }


class Talker:
    """One model, one connection. Close it, or use it in a `with`."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.model = load_model(Path(job.model_dir), name=MODEL_ID)
        self.layout = layout_of(self.model, page_tokens=PAGE_TOKENS)
        kvtier.warm_up()
        self.connection = kvtier.connect(job.url, deadline=DEADLINE_SECONDS)
        with self.speaker(below=False) as warm:  # the libraries, and their threads
            warm.answer(self.ids([("user", "one")]), tokens=2)

    def __enter__(self) -> Talker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.connection.close()

    def ids(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """The prompt of a chat whose next turn is the model's."""
        tokenizer = self.model.tokenizer
        text = tokenizer.chat([{"role": role, "content": said} for role, said in messages])
        return tokenizer.encode(text, special=False)

    @contextlib.contextmanager
    def speaker(self, *, below: bool) -> Iterator[Speaker]:
        """An engine with an empty pool; `below`: its prefixes come from kvtier, and go there."""
        pool = DevicePool(self.layout, POOL_PAGES)
        tiers = None
        with contextlib.ExitStack() as stack:
            if below:
                tiers = KvtierTiers(
                    self.connection, pool, tenant=TENANT, deadline_seconds=DEADLINE_SECONDS
                )
                stack.callback(tiers.close)
            engine = Engine(self.model, pool, tiers=tiers)
            stack.callback(engine.close)
            yield Speaker(engine=engine, tiers=tiers, tokens=self.job.tokens)

    def cold(self, ids: Sequence[int]) -> Completion:
        """The reference: computed from nothing."""
        with self.speaker(below=False) as alone:
            return alone.answer(ids)

    def told(self, done: Completion, reference: Completion, expected: int) -> dict[str, Any]:
        """How an answer stands to the one computed from nothing; `expected` tokens of its prompt
        were there to be found.
        """
        same = [a == b for a, b in zip(done.tokens, reference.tokens, strict=False)]
        return {
            "prompt_tokens": done.prompt_tokens,
            "expected_tokens": expected,
            "cached": asdict(done.cached),
            "bytes": done.cached.total // PAGE_TOKENS * self.layout.raw_bytes,
            "text": done.text,
            "tokens": len(reference.tokens),
            "tokens_same": sum(same),
            "numbers_same_bits": done.tokens == reference.tokens
            and done.logprobs == reference.logprobs,
            "first_token_seconds": done.first_token_seconds,
            "cold_first_token_seconds": reference.first_token_seconds,
        }


def findable(stored: Sequence[int], prompt: Sequence[int]) -> int:
    """How many tokens of `prompt` lie in whole pages of a prompt that was computed before. The last
    token is always computed.
    """
    pairs = zip(stored, prompt[:-1], strict=False)
    common = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
    if common is None:
        common = min(len(stored), len(prompt) - 1)
    return common // PAGE_TOKENS * PAGE_TOKENS
