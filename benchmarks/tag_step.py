"""What the tag check costs a decode step of the bundled engine.

    python -m benchmarks.tag_step [--quick] [--rounds 60] [--json FILE]

SmolLM2-135M in bfloat16 on the CPU, 8 requests of some 100 tokens, pages of 32 tokens. Two engines
have the same requests, one checks tags before each step and one does not. They make steps in turn,
and who begins changes with each pair: `--rounds` is how many steps each makes.

* `tags/share`: the check alone, of the very tables of the step, over the median step without it
* `tags/throughput`: by how much a step with the check takes longer; low and high are the 95 % bound
  of the mean of the pairs (Student's t)
* `tags/p95`: the same of the 95th percentile of the steps; the bound is by resampling pairs
* `tags/noop`: the no-op tracker over the median step
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from benchmarks.engine_decode import PAGE_TOKENS, work_of
from benchmarks.plan import Measured, Plan, finish, parser_of, progress
from benchmarks.rows import Bound, Of, Row, Target
from kvtier.client.device import DevicePool, NoopTracker, PageTable, TagTracker
from kvtier_engine.engine import Engine
from kvtier_engine.model.load import LoadedModel, load_model
from kvtier_engine.schedule.request import Request, Sampling
from kvtier_engine.schedule.states import State
from kvtier_engine.settings import EngineSettings, Integrity, layout_of
from kvtier_engine.smollm2 import ensure_model

BATCH, PROMPT_TOKENS = 8, 96
#: Of Student's t for 95 % on both sides; with more pairs it is hardly less.
_T_95 = {30: 2.04, 60: 2.0, 120: 1.98}
_RESAMPLED = 2000


def decoding(model: LoadedModel, integrity: Integrity, plan: Plan, steps: int) -> Engine:
    """An engine in which all requests decode, and will for so many steps."""
    # The first of them decode while the last are computed, in turn with them.
    tokens = steps + BATCH * (PROMPT_TOKENS // PAGE_TOKENS + 1)
    work = work_of(model.network.config.vocab_size, BATCH, tokens, plan.seed, PROMPT_TOKENS)
    pages = BATCH * -(-(PROMPT_TOKENS + tokens) // PAGE_TOKENS)
    pool = DevicePool(layout_of(model, page_tokens=PAGE_TOKENS), pages)
    engine = Engine(model, pool, settings=EngineSettings(integrity=integrity))
    sampling = Sampling(max_tokens=work.tokens, ignore_end=True)
    for prompt in work.prompts:
        engine.submit(Request(prompt=tuple(prompt), sampling=sampling))
    engine.step()
    while not all(one.state is State.DECODING for one in engine.inside.sequences):
        engine.step()
    return engine


def seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def check_seconds(tables: Sequence[PageTable], tracker: TagTracker | NoopTracker, n: int) -> float:
    """A check of these tables and the reading of its answer."""

    def checks() -> None:
        for _ in range(n):
            tracker.verify(tables).tolist()

    return seconds_of(checks) / n


def in_pairs(checked: Engine, plain: Engine, pairs: int) -> list[tuple[float, float]]:
    """Seconds of a step, with the check and without it."""
    made: list[tuple[float, float]] = []
    for number in range(pairs):
        if number % 2:
            with_check = seconds_of(checked.step)
            made.append((with_check, seconds_of(plain.step)))
        else:
            without = seconds_of(plain.step)
            made.append((seconds_of(checked.step), without))
    return made


def percentile_95(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


def longer(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """By how many per cent the first of each pair is longer: mean, and its 95 % bound."""
    parts = [100 * (ours / theirs - 1) for ours, theirs in pairs]
    t = _T_95[max((n for n in _T_95 if n <= len(parts)), default=30)]
    mean = statistics.fmean(parts)
    half = t * statistics.stdev(parts) / math.sqrt(len(parts))
    return mean, mean - half, mean + half


def later(pairs: Sequence[tuple[float, float]], seed: int) -> tuple[float, float, float]:
    """By how many per cent the 95th percentile of the first is higher, with a 95 % bound."""

    def of(some: Sequence[tuple[float, float]]) -> float:
        ours, theirs = zip(*some, strict=True)
        return 100 * (percentile_95(ours) / percentile_95(theirs) - 1)

    draw = random.Random(seed)
    drawn = sorted(of(draw.choices(pairs, k=len(pairs))) for _ in range(_RESAMPLED))
    return of(pairs), drawn[_RESAMPLED // 40], drawn[-_RESAMPLED // 40]


def bounded(name: str, what: str, found: tuple[float, float, float], most: float, n: int) -> Row:
    mean, low, high = found
    return Row(
        name=name,
        what=what,
        value=mean,
        unit="%",
        target=Target(bound=Bound.AT_MOST, number=most, of=Of.VALUE),
        rounds=n,
        low=low,
        high=high,
        note="low to high is the 95 % bound",
    )


def rows(plan: Plan) -> Iterator[Measured]:
    torch.set_num_threads(1)
    model = load_model(ensure_model().directory, dtype=torch.bfloat16)
    pairs = max(4, plan.rounds(60))
    progress("tags, steps in turn")
    checked, plain = (
        decoding(model, integrity, plan, pairs + 4) for integrity in (Integrity.TAGS, Integrity.OFF)
    )
    in_pairs(checked, plain, 4)  # warms up
    steps = in_pairs(checked, plain, pairs)
    tables = [sequence.table for sequence in checked.inside.sequences]
    step = statistics.median(without for _, without in steps)
    if len(tables) != BATCH:
        raise RuntimeError(f"{len(tables)} of {BATCH} requests are left")
    pages = sum(map(len, tables))
    for name, what, tracker, most in (
        ("tags/share", "the check alone over a step", TagTracker(checked.pool), 0.5),
        ("tags/noop", "the no-op tracker over a step", NoopTracker(), 0.01),
    ):
        alone = [check_seconds(tables, tracker, plan.sized(2000, 20)) for _ in range(9)]
        yield Row.of_values(
            name,
            what,
            [100 * seconds / step for seconds in alone],
            "%",
            target=Target(bound=Bound.AT_MOST, number=most, of=Of.VALUE),
            note=f"{1e6 * statistics.median(alone):.1f} us of {1e3 * step:.1f} ms; {BATCH} "
            f"requests, {pages} pages",
        )
    yield bounded("tags/throughput", "a step with the check is longer", longer(steps), 0.5, pairs)
    yield bounded("tags/p95", "and the 95th percentile", later(steps, plan.seed), 0.8, pairs)
    for engine in (checked, plain):
        engine.close()


def main() -> int:
    arguments = parser_of(__doc__).parse_args()
    return finish("Tag check", lambda: rows(Plan.of(arguments)), arguments)


if __name__ == "__main__":
    sys.exit(main())
