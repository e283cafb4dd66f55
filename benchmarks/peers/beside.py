"""kvtier beside Mooncake Store and LMCache: 2 MiB pages on one host, round by round in turn.

    python -m benchmarks.peers.beside [--quick] [--rounds 7] [--json FILE]

The peers run in environments of their own (`make bench-peers` makes them); one that is not there
is named and left out. A peer's round and kvtier's follow each other, and who begins changes. Peers
that move bytes through memory meet kvtier's shared memory; those that use a socket, even on one
host, meet kvtier over gRPC; files of LMCache are shown alone. What is not equal is said in each
note and in benchmarks/README.md: kvtier verifies every page in all of them.
"""

from __future__ import annotations

import enum
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

import kvtier
from benchmarks.common import PAGE_BYTES, attach, daemon, wait_populated
from benchmarks.local import BATCH, Gets, came_by, grown
from benchmarks.local_put import Puts, went_by
from benchmarks.memory import Pieces
from benchmarks.peers.environments import Environment
from benchmarks.peers.process import PeerFailed, Running, running
from benchmarks.plan import Measured, Plan, finish, parser_of, progress
from benchmarks.rows import Bound, Missing, Row, Target
from kvtier.client import Connection

__all__ = ["NOT_MADE", "PEERS", "Peer", "PeerFailed", "rows"]

NOT_MADE = "run make bench-peers"
ARENA_BYTES = 2 << 30
LOOKUP_KEYS, LOOKUP_CALLS = 1000, 10


class By(enum.Enum):
    """What kvtier uses beside a peer."""

    MEMORY = "auto"
    SOCKET = "grpc"
    NOTHING = ""


def at_least(number: float) -> Target:
    return Target(bound=Bound.AT_LEAST, number=number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """`unequal` is what its numbers do not have in common with kvtier's."""

    name: str
    environment: str
    module: str
    words: tuple[str, ...]
    by: By
    targets: dict[str, Target]
    unequal: str


def _mooncake(name: str, *words: str, by: By, unequal: str, **targets: float) -> Peer:
    return Peer(
        name=f"mooncake-{name}",
        environment="mooncake",
        module="benchmarks.peers.mooncake_store",
        words=words,
        by=by,
        targets={what.replace("_", "-"): at_least(ratio) for what, ratio in targets.items()},
        unequal=unequal,
    )


def _lmcache(mode: str, by: By, unequal: str) -> Peer:
    return Peer(
        name=f"lmcache-{mode}",
        environment="lmcache",
        module="benchmarks.peers.lmcache_store",
        words=(mode,),
        by=by,
        targets={},
        unequal=unequal,
    )


PEERS = (
    _mooncake(
        "shm", "shm", by=By.MEMORY, unequal="Mooncake verifies nothing",
        get_32=1.0, get_1=1.8, put_1=1.5,
    ),
    _mooncake("shm-sum", "shm", "--checksum", by=By.MEMORY, unequal="Mooncake's checksum is on"),
    _mooncake(
        "tcp", "tcp", by=By.SOCKET,
        unequal="Mooncake verifies nothing; its bytes go through C++ alone",
    ),
    _mooncake(
        "tcp-sum", "tcp", "--checksum", by=By.SOCKET,
        unequal="Mooncake's checksum is on; its bytes go through C++ alone",
    ),
    _lmcache("cpu", By.MEMORY, "LMCache verifies nothing and is one process"),
    _lmcache("disk", By.NOTHING, "page cache, nothing verified, nothing durable"),
    _lmcache("remote", By.SOCKET, "LMCache verifies nothing; its server's memory is fresh"),
)  # fmt: skip


def started(
    peer: Peer, environment: Environment, plan: Plan, pages: int
) -> AbstractContextManager[Running]:
    words = [*peer.words, "--pages", str(pages), "--batch", str(BATCH), "--seed", str(plan.seed)]
    if peer.environment == "lmcache":
        words += ["--dir", str(plan.directory)]
    return running(environment, peer.name, peer.module, words, {"LMCACHE_LOG_LEVEL": "WARNING"})


class Ours:
    """kvtier's side: the same pages, calls and names of numbers as a peer's round."""

    def __init__(self, kv: Connection, pages: int, seed: int, *, by: By) -> None:
        self.kv = kv
        self.by = by
        pieces = Pieces(PAGE_BYTES, pages * PAGE_BYTES, seed)
        self._draw = random.Random(seed)
        self._gets = Gets(kv, pieces)
        self._puts = Puts(kv, pieces, seed)
        if by is By.MEMORY:
            attach(kv)
        wait_populated(kv, ARENA_BYTES)
        self._before = kv.local

    def round(self) -> dict[str, float]:
        gets, pieces = self._gets, self._gets.pieces
        total = pieces.count * pieces.nbytes / 1e9
        order = self._draw.sample(range(pieces.count), pieces.count)
        found = {}
        for batch in (1, BATCH):
            found[f"put-{batch}"] = self._puts.put(order, batch)
            self._puts.forget()
            found[f"get-{batch}"] = total / gets.get(order, batch)
            gets.check(order)
            pieces.target.fill(1)
        found["lookup-1-us"] = self._lookup([[gets.keys[i]] for i in order])
        asked = [gets.keys[i % len(order)] for i in range(LOOKUP_KEYS)]
        found[f"lookup-{LOOKUP_KEYS}-us"] = self._lookup([asked] * LOOKUP_CALLS)
        return found

    def _lookup(self, calls: list[list[bytes]]) -> float:
        began = time.perf_counter()
        for keys in calls:
            found = self._gets.ns.lookup(keys)
            assert found.hits == len(keys), found
        return (time.perf_counter() - began) / len(calls) * 1e6

    def note(self, what: str) -> str:
        """By which way the pages of all rounds so far went; `what` is a name of a round."""
        if self.by is By.SOCKET:
            return "kvtier over gRPC"
        before, now = self._before, self.kv.local
        if what.startswith("put"):
            return went_by(grown(before.puts, now.puts), self._puts.stored, now.not_writing)
        if what.startswith("get"):
            return came_by(grown(before.counts, now.counts), now.kernels)
        return ""


def rows_of(peer: Peer, plan: Plan, running: Running, ours: Ours | None) -> Iterator[Row]:
    mine: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    for number in range(plan.rounds(7) + 1):
        if ours is not None and number % 2:
            mine.append(ours.round())
        theirs.append(running.round())
        if ours is not None and not number % 2:
            mine.append(ours.round())
    # The first round warms both up.
    mine, theirs = mine[1:], theirs[1:]
    label = f"{peer.name.replace('-', ', ', 1)} {running.version}"
    for what in theirs[0]:
        unit = "us" if what.endswith("-us") else "GB/s"
        call, count, *_ = what.split("-")
        said = f"{call}, {'2 MiB pages' if unit == 'GB/s' else 'keys'}, {count} a call"
        name = f"peers/{peer.name}-{what.removesuffix('-us')}"
        if ours is None:
            numbers = [row[what] for row in theirs]
            yield Row.of_values(name, f"{label}: {said}", numbers, unit, note=peer.unequal)
            continue
        pairs = [(a[what], b[what]) for a, b in zip(mine, theirs, strict=True)]
        note = "; ".join(part for part in (ours.note(what), peer.unequal) if part)
        target = peer.targets.get(what)
        yield Row.of_pairs(name, said, pairs, unit, label, target=target, note=note)


def rows(plan: Plan, root: Path | None = None) -> Iterator[Measured]:
    """Raises PeerFailed at the end if a peer that is installed could not be measured."""
    wanted = [peer for peer in PEERS if plan.wants_some(f"peers/{peer.name}")]
    places = {
        peer.environment: Environment(name=peer.environment, **({"root": root} if root else {}))
        for peer in wanted
    }
    absent = {name for name, place in places.items() if not place.is_installed()}
    if len(absent) == len(places):
        yield Missing(name="peers", reason=NOT_MADE)
        return
    for name in sorted(absent):
        yield Missing(name=f"peers/{name}", reason=NOT_MADE)
    failed: list[str] = []
    pages = plan.sized(64, BATCH)
    with ExitStack() as until_end:
        url, _, _ = until_end.enter_context(daemon(f"host.bytes={ARENA_BYTES}"))
        sides: dict[By, Ours | None] = {By.NOTHING: None}
        for peer in wanted:
            if peer.environment in absent:
                continue
            progress(f"peers/{peer.name}")
            if peer.by not in sides:
                kv = until_end.enter_context(kvtier.connect(url, deadline=60, plane=peer.by.value))
                sides[peer.by] = Ours(kv, pages, plan.seed, by=peer.by)
            try:
                with started(peer, places[peer.environment], plan, pages) as running:
                    yield from rows_of(peer, plan, running, sides[peer.by])
            except PeerFailed as error:
                failed.append(f"{peer.name}: {error}")
                yield Missing(name=f"peers/{peer.name}", reason=str(error))
    if failed:
        raise PeerFailed("; ".join(failed))


def main() -> int:
    arguments = parser_of(__doc__).parse_args()
    return finish("Beside other stores", lambda: rows(Plan.of(arguments)), arguments)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
