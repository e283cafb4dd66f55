"""Puts on one host beside memcpy, into an arena with room and into a full one.

    python -m benchmarks.local_put [--quick] [--rounds 9] [--json FILE]

kvtier: `ns.put(keys, pool, at=ids)` of keys that are new, plane "auto", a checksum of every
page. Reference: memmove of the same pieces in the same order to other memory. All memory is
populated before, the arena too. With room: what a round put is deleted after it, outside the time.
Full: so much was put before that every put takes the place of a page that is evicted for it.

How the pages went is read from `connection.local` and is in the note: a row whose pages went over
gRPC says so.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import kvtier
from benchmarks.common import PAGE_BYTES, attach, daemon, in_turn, layout_of, wait_populated
from benchmarks.local import BATCH, grown
from benchmarks.memory import SIZES, Pieces
from benchmarks.plan import Measured, Plan, finish, parser_of, progress
from benchmarks.rows import Bound, Row, Target, size_text
from kvtier.client import Connection, Namespace

__all__ = ["Puts", "rows", "went_by"]

POOL_BYTES = 256 << 20
ARENA_BYTES, QUICK_ARENA_BYTES = 4 << 30, 768 << 20
SINGLES_MAX = 64
KEY_BYTES = 32
BATCH_TARGET = Target(bound=Bound.AT_LEAST, number=0.7)


class Puts:
    """Pages of one size, put again and again under new keys."""

    def __init__(self, kv: Connection, pieces: Pieces, seed: int) -> None:
        self.pieces = pieces
        self.ns: Namespace = kv.namespace(layout_of(pieces.nbytes), tenant="bench")
        self.asked = self.stored = 0
        self._draw = random.Random(seed)
        self._put: list[bytes] = []

    def put(self, order: list[int], batch: int) -> float:
        """GB/s of what was stored."""
        pool = self.pieces.pages
        calls = []
        for at in range(0, len(order), batch):
            places = order[at : at + batch]
            calls.append(([self._draw.randbytes(KEY_BYTES) for _ in places], places))
        stored = 0
        began = time.perf_counter()
        for keys, places in calls:
            stored += self.ns.put(keys, pool, at=places, chain=False).stored
        took = time.perf_counter() - began
        self._put += [key for keys, _ in calls for key in keys]
        self.asked += len(order)
        self.stored += stored
        return stored * self.pieces.nbytes / took / 1e9

    def forget(self) -> None:
        """Deletes what was put since the last time."""
        for at in range(0, len(self._put), 1024):
            self.ns.delete(self._put[at : at + 1024])
        self._put.clear()

    def fill(self, nbytes: int) -> None:
        """Puts so many bytes, and leaves them."""
        for _ in range(-(-nbytes // (self.pieces.count * self.pieces.nbytes))):
            self.put(list(range(self.pieces.count)), BATCH)
            self._put.clear()


def went_by(counted: dict[str, int], stored: int, not_writing: str) -> str:
    """By which way `stored` pages were put, for the note of a row: what `connection.local.puts`
    counted meanwhile, and why it does not write if it does not.
    """
    by_memory = counted.get("stored", 0)
    said = ", ".join(f"{name} {count}" for name, count in counted.items())
    if by_memory >= stored > 0:
        return f"all by shared memory ({said})"
    why = f": {not_writing}" if not_writing else ""
    if by_memory:
        return f"PARTLY OVER GRPC: {by_memory} of {stored} pages by shared memory ({said}){why}"
    return f"OVER GRPC{why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    batch: int
    is_full: bool
    target: Target | None


def cases(plan: Plan, nbytes: int) -> list[Case]:
    """Those with room come first: a full arena stays full."""
    size = size_text(nbytes).replace(" ", "")
    found = [
        Case(name=f"local/put-{size}-{BATCH}", batch=BATCH, is_full=False, target=BATCH_TARGET)
    ]
    if nbytes == PAGE_BYTES:
        found += [
            Case(name=f"local/put-{size}-1", batch=1, is_full=False, target=None),
            Case(
                name=f"local/put-{size}-{BATCH}-full",
                batch=BATCH, is_full=True, target=BATCH_TARGET,
            ),
            Case(name=f"local/put-{size}-1-full", batch=1, is_full=True, target=None),
        ]  # fmt: skip
    return [case for case in found if plan.wants(case.name)]


def measure(plan: Plan, kv: Connection, puts: Puts, case: Case) -> Row:
    pieces = puts.pieces
    count = pieces.count if case.batch > 1 else min(pieces.count, SINGLES_MAX)
    draw = random.Random(plan.seed)
    rounds = plan.rounds(9)
    orders = [draw.sample(range(pieces.count), count) for _ in range(rounds + 1)]
    before, asked, stored = kv.local.puts, puts.asked, puts.stored

    def ours(number: int) -> float:
        rate = puts.put(orders[number], case.batch)
        if not case.is_full:
            puts.forget()
        return rate

    moved = count * pieces.nbytes / 1e9
    pairs = in_turn(ours, lambda number: moved / pieces.memmove(orders[number]), rounds)
    asked, stored = puts.asked - asked, puts.stored - stored
    state = kv.local
    note = went_by(grown(before, state.puts), stored, state.not_writing)
    if stored < asked:
        note += f"; {asked - stored} of {asked} pages were not stored"
    where = "full arena, every put evicts" if case.is_full else "arena with room"
    return Row.of_pairs(
        case.name,
        f"put, {size_text(pieces.nbytes)} pages, {case.batch} a call, {where}",
        pairs,
        "GB/s",
        "memmove of the same pieces",
        target=case.target,
        note=note,
    )


def rows(plan: Plan) -> Iterator[Measured]:
    arena_bytes = plan.sized(ARENA_BYTES, QUICK_ARENA_BYTES)
    for nbytes in SIZES:
        wanted = cases(plan, nbytes)
        if not wanted:
            continue
        pool_bytes = max(plan.sized(POOL_BYTES, 32 << 20), BATCH * nbytes)
        with (
            daemon(f"host.bytes={arena_bytes}") as (url, _, _),
            kvtier.connect(url, deadline=60) as kv,
        ):
            puts = Puts(kv, Pieces(nbytes, pool_bytes, plan.seed), plan.seed)
            attach(kv)
            wait_populated(kv, arena_bytes)
            is_filled = False
            for case in wanted:
                progress(case.name)
                if case.is_full and not is_filled:
                    puts.fill(arena_bytes + arena_bytes // 8)
                    is_filled = True
                yield measure(plan, kv, puts, case)


def main() -> int:
    arguments = parser_of(__doc__).parse_args()
    return finish("Puts on one host", lambda: rows(Plan.of(arguments)), arguments)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
