"""Gets by shared memory beside memcpy: two processes, every page verified, in turn.

    python -m benchmarks.local [--quick] [--rounds 9] [--json FILE]

Each side copies pages of one size, in batches, from 512 MiB of populated memory to other 512 MiB,
in the same random order: kvtier from the daemon's arena by `ns.get(keys, out=pool, at=ids)`, the
reference from private memory by memmove. Ratios are of one round; the table has their median, the
lowest and the highest. The note says by which way the pages came.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

import kvtier
from benchmarks.common import PAGE_BYTES, attach, daemon, in_turn, layout_of
from benchmarks.memory import SIZES, Pieces
from benchmarks.plan import Measured, Plan, finish, parser_of, progress
from benchmarks.rows import Bound, Row, Target, size_text
from kvtier.client import Connection, Namespace

__all__ = ["BATCH", "Gets", "came_by", "grown", "rows"]

POOL_BYTES = 512 << 20
BATCH = 32
PUT_BYTES = 64 << 20
#: Most pages of a round, a batch a call and one a call.
PAGES_MAX, SINGLES_MAX = 4096, 256
BATCH_TARGET = Target(bound=Bound.AT_LEAST, number=0.8)


class Gets:
    """Pages of one size stored in a daemon, and memory to get them into."""

    def __init__(self, kv: Connection, pieces: Pieces) -> None:
        self.pieces = pieces
        self.keys = [
            hashlib.sha256(b"%d/%d" % (pieces.nbytes, i)).digest() for i in range(pieces.count)
        ]
        self.ns: Namespace = kv.namespace(layout_of(pieces.nbytes), tenant="bench")
        step = max(1, PUT_BYTES // pieces.nbytes)
        for at in range(0, pieces.count, step):
            self.ns.put(self.keys[at : at + step], pieces.pages[at : at + step]).raise_for_refused()

    def get(self, order: list[int], batch: int) -> float:
        """Seconds."""
        pool, keys = self.pieces.pool, self.keys
        calls = [order[at : at + batch] for at in range(0, len(order), batch)]
        asked = [([keys[i] for i in some], some) for some in calls]
        began = time.perf_counter()
        for names, places in asked:
            got = self.ns.get(names, out=pool, at=places)
            assert got.prefix == len(names), got.reasons
        return time.perf_counter() - began

    def check(self, order: list[int]) -> None:
        """The bytes that came are the bytes that were put."""
        for i in order:
            assert np.array_equal(self.pieces.pool[i], self.pieces.pages[i]), f"page {i} differs"


def grown(before: object, after: object) -> dict[str, int]:
    """What two states of the same counts have between them, without the zeros."""
    counted = {
        item.name: getattr(after, item.name) - getattr(before, item.name)
        for item in fields(after)
    }  # fmt: skip
    return {name: count for name, count in counted.items() if count}


def came_by(counted: dict[str, int], kernels: str) -> str:
    """By which way pages were got, for the note of a row."""
    hits, left = counted.get("hits", 0), counted.get("left", 0)
    if hits and not left:
        return f"all by shared memory, loops by {kernels}"
    said = ", ".join(f"{name} {count}" for name, count in counted.items()) or "nothing"
    return f"OVER GRPC: {left} pages of {hits + left} at least (counted: {said})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row of gets."""

    name: str
    batch: int
    target: Target | None
    pages_max: int


def cases(plan: Plan, nbytes: int) -> list[Case]:
    size = size_text(nbytes).replace(" ", "")
    found = [
        Case(
            name=f"local/get-{size}-{BATCH}", batch=BATCH, target=BATCH_TARGET, pages_max=PAGES_MAX
        )
    ]
    if nbytes == PAGE_BYTES:
        found.append(
            Case(name=f"local/get-{size}-1", batch=1, target=None, pages_max=SINGLES_MAX)
        )  # fmt: skip
    return [case for case in found if plan.wants(case.name)]


def measure(plan: Plan, kv: Connection, gets: Gets, case: Case, kernels: str) -> Row:
    pieces = gets.pieces
    count = min(pieces.count, case.pages_max)
    moved = count * pieces.nbytes / 1e9
    draw = random.Random(plan.seed)
    rounds = plan.rounds(9)
    orders = [draw.sample(range(pieces.count), count) for _ in range(rounds + 1)]
    before = kv.local.counts
    seen: set[int] = set()

    def ours(number: int) -> float:
        took = gets.get(orders[number], case.batch)
        seen.update(orders[number])
        return moved / took

    pairs = in_turn(ours, lambda number: moved / pieces.memmove(orders[number]), rounds)
    gets.check(sorted(seen))
    return Row.of_pairs(
        case.name,
        f"get, host tier, {size_text(pieces.nbytes)} pages, {case.batch} a call",
        pairs,
        "GB/s",
        "memmove of the same pieces",
        target=case.target,
        note=came_by(grown(before, kv.local.counts), kernels),
    )


def rows(plan: Plan) -> Iterator[Measured]:
    for nbytes in SIZES:
        wanted = cases(plan, nbytes)
        if not wanted:
            continue
        pool_bytes = max(plan.sized(POOL_BYTES, 32 << 20), BATCH * nbytes)
        # One size at a time: pages of another one would take memory from these.
        with (
            daemon(f"host.bytes={pool_bytes + (256 << 20)}") as (url, _, _),
            kvtier.connect(url, deadline=60) as kv,
        ):
            gets = Gets(kv, Pieces(nbytes, pool_bytes, plan.seed))
            kernels = attach(kv)
            for case in wanted:
                progress(case.name)
                yield measure(plan, kv, gets, case, kernels)


def main() -> int:
    arguments = parser_of(__doc__).parse_args()
    return finish("Gets by shared memory", lambda: rows(Plan.of(arguments)), arguments)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
