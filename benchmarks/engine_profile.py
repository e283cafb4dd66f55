"""Where a decode step of the bundled engine goes, in per cent of its time.

    python -m benchmarks.engine_profile [--quick] [--rounds 5] [--only profile/bf16-8] [--json FILE]

SmolLM2-135M on the CPU, as `engine_decode` has it: prompts of 32 random tokens, batches of 1, 8 and
32, tag checks on. The engine's own functions are wrapped: whoever is called takes the time from its
caller until it returns, so that the parts of a step come to all of it. Wrapping costs a microsecond
a call, some 400 of which are in a step. The threads are torch's (OMP_NUM_THREADS).

* products: rows times weights, with the head's
* attention: dense attention over the gathered pages; and kv: writing rows to pages, gathering them
* network: what else there is of it: norms, rotary turns, activations, additions
* choice: from logits to tokens; check: the tags; batch: tensors of a pass from the plan
* schedule: the plan; commit: texts, and telling who asked; rest: of the step, what is left
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any
from unittest import mock

import torch

from benchmarks.engine_decode import (
    BATCHES,
    DTYPES,
    PAGE_TOKENS,
    Work,
    all_decoding,
    check_all_decode,
    work_of,
)
from benchmarks.plan import Measured, Plan, finish, parser_of, progress
from benchmarks.rows import Row
from kvtier.client.device import DevicePool, TagTracker
from kvtier_engine import stepper
from kvtier_engine.attention import pages, sdpa
from kvtier_engine.model import llama
from kvtier_engine.model.load import LoadedModel, load_model
from kvtier_engine.schedule.runner import ModelRunner
from kvtier_engine.schedule.scheduler import Scheduler
from kvtier_engine.settings import layout_of
from kvtier_engine.smollm2 import ensure_model

__all__ = ["PARTS", "Clock", "rows", "shares"]

PARTS = (
    "products", "attention", "kv", "network", "choice", "check", "batch", "schedule", "commit",
    "rest",
)  # fmt: skip
#: What a step is made of: (where, name, part).
_WRAPPED: tuple[tuple[Any, str, str], ...] = (
    (llama, "product", "products"),
    (sdpa._SdpaPass, "attend", "attention"),
    (pages._PlainPass, "write", "kv"),
    (pages._PlainPass, "gathered", "kv"),
    (llama.Llama, "forward", "network"),
    (llama.Llama, "logits", "network"),
    (stepper, "choose", "choice"),
    (TagTracker, "verify", "check"),
    (ModelRunner, "decode", "batch"),
    (Scheduler, "plan", "schedule"),
    (stepper.Stepper, "_advance", "commit"),
)


class Clock:
    """One thread's time, by part: it runs for one of them at a time, at first for `rest`."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._part = "rest"
        self._since = perf_counter()

    def turn_to(self, part: str) -> str:
        """The part for which it ran until now."""
        now, before = perf_counter(), self._part
        self.seconds[before] += now - self._since
        self._part, self._since = part, now
        return before

    def wrapped(self, work: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            before = self.turn_to(part)
            try:
                return work(*given, **named)
            finally:
                self.turn_to(before)

        return timed

    @contextmanager
    def over_the_engine(self) -> Iterator[None]:
        with ExitStack() as stack:
            for place, name, part in _WRAPPED:
                work = self.wrapped(getattr(place, name), part)
                stack.enter_context(mock.patch.object(place, name, work))
            yield


def shares(model: LoadedModel, work: Work) -> tuple[dict[str, float], float]:
    """Per cent of the time of `work.steps` steps by part, and seconds a step."""
    engine = all_decoding(
        model, DevicePool(layout_of(model, page_tokens=PAGE_TOKENS), work.pages), work
    )
    clock = Clock()
    with clock.over_the_engine():
        clock.turn_to("rest")
        clock.seconds.clear()
        for _ in range(work.steps):
            engine.step()
        clock.turn_to("rest")
    check_all_decode(engine, work)
    engine.close()
    total = clock.seconds.total()
    return {part: 100 * clock.seconds[part] / total for part in PARTS}, total / work.steps


def rows(plan: Plan) -> Iterator[Measured]:
    place = ensure_model().directory
    for name, dtype in DTYPES.items():
        if plan.wants_some(f"profile/{name}"):
            model = load_model(place, dtype=dtype)
            for batch in BATCHES:
                if plan.wants_some(f"profile/{name}-{batch}-"):
                    progress(f"profile/{name}-{batch}")
                    yield from rows_of(model, name, batch, plan)


def rows_of(model: LoadedModel, dtype: str, batch: int, plan: Plan) -> Iterator[Measured]:
    tokens = plan.sized(17, 4)
    works = [
        work_of(model.network.config.vocab_size, batch, tokens, plan.seed + number).evened()
        for number in range(plan.rounds(5) + 1)
    ]
    found = [shares(model, work) for work in works][1:]  # the first warms up
    steps = sorted(seconds for _, seconds in found)
    note = f"{torch.get_num_threads()} threads, {1e3 * steps[len(steps) // 2]:.1f} ms a step"
    for part in PARTS:
        yield Row.of_values(
            f"profile/{dtype}-{batch}-{part}",
            f"of a decode step, {dtype}, batch {batch}: {part}",
            [by_part[part] for by_part, _ in found],
            "%",
            note=note,
        )


def main() -> int:
    arguments = parser_of(__doc__).parse_args()
    return finish("A decode step", lambda: rows(Plan.of(arguments)), arguments)


if __name__ == "__main__":
    sys.exit(main())
