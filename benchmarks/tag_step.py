"""What the tag check costs a decode step of the bundled engine.

    python -m benchmarks.tag_step [--quick] [--rounds 60] [--json FILE]

SmolLM2-135M in bfloat16 on the CPU, 8 requests of some 100 tokens, pages of 32 tokens. One engine
makes its steps with the check and without it in turn, and what begins changes with each pair: two
engines would differ in where their memory lies, by more than the check takes. `--rounds` is how
many pairs; after every STRETCH an engine of its own begins, so that contexts stay short. The
threads are torch's (OMP_NUM_THREADS): with fewer of them a step is longer, and the check a smaller
share of it.

* `tags/share`: the check alone, of the very tables of the step, over the median step without it
* `tags/throughput`: by how much a step with the check takes longer: the median of the pairs, for
  the mean of quotients is above one by the noise alone. Low and high are its 95 % bound (the ranks
  of the sign test), and the value is its upper end: what it costs at most
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

from benchmarks.engine_decode import PAGE_TOKENS, all_decoding, work_of
from benchmarks.plan import Measured, Plan, finish, parser_of, progress
from benchmarks.rows import Bound, Of, Row, Target
from kvtier.client.device import DevicePool, NoopTracker, PageTable, TagTracker
from kvtier_engine.engine import Engine
from kvtier_engine.model.load import LoadedModel, load_model
from kvtier_engine.settings import Integrity, layout_of
from kvtier_engine.smollm2 import ensure_model

BATCH, PROMPT_TOKENS = 8, 96
#: Pairs of steps that one engine makes, and before them those that are not counted.
STRETCH, WARM = 150, 4
_RESAMPLED = 2000


def decoding(model: LoadedModel, plan: Plan, steps: int) -> Engine:
    """An engine in which all requests decode, and will for so many steps."""
    work = work_of(model.network.config.vocab_size, BATCH, steps + 1, plan.seed, PROMPT_TOKENS)
    pool = DevicePool(layout_of(model, page_tokens=PAGE_TOKENS), work.pages)
    return all_decoding(model, pool, work)


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


def step_seconds(engine: Engine, integrity: Integrity) -> float:
    engine.inside.set_integrity(integrity)
    return seconds_of(engine.step)


def in_pairs(engine: Engine, pairs: int) -> list[tuple[float, float]]:
    """Seconds of a step, with the check and without it."""
    made: list[tuple[float, float]] = []
    for number in range(pairs):
        if number % 2:
            with_check = step_seconds(engine, Integrity.TAGS)
            made.append((with_check, step_seconds(engine, Integrity.OFF)))
        else:
            without = step_seconds(engine, Integrity.OFF)
            made.append((step_seconds(engine, Integrity.TAGS), without))
    return made


def percentile_95(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


def longer(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """By how many per cent the first of each pair is longer: the median, and its 95 % bound. Of
    fewer than six pairs there is none, and all of them are what it is within."""
    parts = sorted(100 * (ours / theirs - 1) for ours, theirs in pairs)
    outside = outside_the_bound(len(parts))
    return statistics.median(parts), parts[outside], parts[-1 - outside]


def outside_the_bound(count: int) -> int:
    """How many of so many values may lie on each side of a bound that holds the median at 95 %."""
    below, outside = 1, 0
    while (below := below + math.comb(count, outside + 1)) <= 2**count // 40:
        outside += 1
    return outside


def later(pairs: Sequence[tuple[float, float]], seed: int) -> tuple[float, float, float]:
    """By how many per cent the 95th percentile of the first is higher, with a 95 % bound."""

    def of(some: Sequence[tuple[float, float]]) -> float:
        ours, theirs = zip(*some, strict=True)
        return 100 * (percentile_95(ours) / percentile_95(theirs) - 1)

    draw = random.Random(seed)
    drawn = sorted(of(draw.choices(pairs, k=len(pairs))) for _ in range(_RESAMPLED))
    return of(pairs), drawn[_RESAMPLED // 40], drawn[-_RESAMPLED // 40]


def bounded(name: str, what: str, found: tuple[float, float, float], most: float, n: int) -> Row:
    """The value that is judged is the upper end of the bound: what the cost is at most."""
    mean, low, high = found
    return Row(
        name=name,
        what=what,
        value=high,
        unit="%",
        target=Target(bound=Bound.AT_MOST, number=most, of=Of.VALUE),
        rounds=n,
        low=low,
        high=high,
        note=f"seen {mean:.3g} %; low to high is its 95 % bound (of several passes all of them), "
        "and the upper end is judged",
    )


def rows(plan: Plan) -> Iterator[Measured]:
    model = load_model(ensure_model().directory, dtype=torch.bfloat16)
    # As many in each of several passes: a bound of fewer pairs is a wider one.
    pairs = max(4, plan.rounds_given or plan.sized(60, 4))
    progress("tags, steps in turn")
    steps: list[tuple[float, float]] = []
    while len(steps) < pairs:
        stretch = min(STRETCH, pairs - len(steps))
        engine = decoding(model, plan, 2 * (stretch + WARM))
        in_pairs(engine, WARM)
        steps += in_pairs(engine, stretch)
        if len(steps) < pairs:
            engine.close()
    tables = [sequence.table for sequence in engine.inside.sequences]
    step = statistics.median(without for _, without in steps)
    if len(tables) != BATCH:
        raise RuntimeError(f"{len(tables)} of {BATCH} requests are left")
    pages = sum(map(len, tables))
    for name, what, tracker, most in (
        ("tags/share", "the check alone over a step", TagTracker(engine.pool), 0.5),
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
            f"requests, {pages} pages, {torch.get_num_threads()} threads",
        )
    yield bounded("tags/throughput", "a step with the check is longer", longer(steps), 0.5, pairs)
    yield bounded("tags/p95", "and the 95th percentile", later(steps, plan.seed), 0.8, pairs)
    engine.close()


def main() -> int:
    arguments = parser_of(__doc__).parse_args()
    return finish("Tag check", lambda: rows(Plan.of(arguments)), arguments)


if __name__ == "__main__":
    sys.exit(main())
