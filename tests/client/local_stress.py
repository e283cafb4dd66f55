"""Writers, readers and a saboteur on a few pages of one daemon, each a process; prints one JSON
object of what they saw.

    python -m tests.client.local_stress URL DAEMON_PID SECONDS SEED

There are more pages than room, so they are evicted all the time; some are deleted and put again
with other bytes; now and then a bit in the arena is flipped. Every page that is got is compared
with what some version of that very page consists of.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict

import numpy as np

import kvtier
from kvtier.core.page import GetCode
from tests.client.local_rig import arena_fd, attached, opaque

PAGES = 64
#: Of these, an arena of 64 MiB holds 50.
NBYTES = 1_310_720
WRITERS, READERS = 4, 8
#: Longest pause of a reader between finding a page and copying it.
PAUSE_S = 0.03
KEYS = [bytes([number]) * 32 for number in range(PAGES)]
#: A page is cells of 32 bytes: key, version, place, and a mix of the three.
PLACES = np.arange(NBYTES // 32, dtype=np.uint64)
ODD = 0x9E3779B97F4A7C15


def page_of(key: bytes, version: int) -> np.ndarray:
    cells = np.empty((len(PLACES), 4), np.uint64)
    cells[:, 0], cells[:, 1], cells[:, 2] = key[0], version, PLACES
    cells[:, 3] = PLACES ^ np.uint64((version * ODD ^ key[0]) % 2**64)
    return cells.view(np.uint8).reshape(-1)


def wrong_in(page: np.ndarray, key: bytes) -> str:
    """What is wrong with a page that was a hit; empty if it is some version of it, whole."""
    cells = page.view(np.uint64).reshape(-1, 4)
    version = int(cells[0, 1])
    is_wrong = (cells != page_of(key, version).view(np.uint64).reshape(-1, 4)).any(axis=1)
    if not is_wrong.any():
        return ""
    first = int(np.flatnonzero(is_wrong)[0])
    return f"{is_wrong.sum()} cells of page {key[0]} {version:x}, the first: {cells[first]}"


class PausingSummer:
    """Copies late, as one that was not scheduled in between."""

    def __init__(self, summer, rng: random.Random) -> None:
        self._summer = summer
        self._rng = rng

    def copy(self, sources, targets, nbytes, blocks):
        if self._rng.random() < 0.4:
            time.sleep(self._rng.random() * PAUSE_S)
        return self._summer.copy(sources, targets, nbytes, blocks)


def read(ns: kvtier.Namespace, kv: kvtier.Connection, rng: random.Random, until: float) -> Counter:
    link = kv._async.link.local._standing.attached.reads.link
    link.summer = PausingSummer(link.summer, rng)
    seen: Counter = Counter()
    out = np.empty((3, NBYTES), np.uint8)
    while time.monotonic() < until:
        for _ in range(10):
            ns.lookup(KEYS)
        keys = rng.sample(KEYS, 3)
        got = ns.get(keys, out=out)
        for key, row, item in zip(keys, out, got, strict=True):
            seen[item.reason.name] += 1
            if item.reason is GetCode.HIT and (wrong := wrong_in(row, key)):
                seen[f"wrong: {wrong[:200]}"] += 1
    seen.update({name: count for name, count in asdict(kv.local.counts).items() if name != "hits"})
    seen.update(torn_reads=link.view.torn_reads, doubts=link.view.doubts)
    return seen


def write(ns: kvtier.Namespace, kv: kvtier.Connection, rng: random.Random, until: float) -> Counter:
    seen: Counter = Counter()
    version = os.getpid() << 32
    while time.monotonic() < until:
        keys = rng.sample(KEYS, rng.randint(1, 3))
        if rng.random() < 0.3:
            ns.delete(keys)
        version += 1
        pages = [page_of(key, version) for key in keys]
        for item in ns.put(keys, pages, chain=False):
            seen[f"put {item.reason.name}"] += 1
        time.sleep(rng.random() * 0.002)
    seen.update({f"put {name}": count for name, count in asdict(kv.local.puts).items()})
    return seen


def damage(daemon_pid: int, rng: random.Random, goes_on: Callable[[], bool]) -> int:
    """Flips bits in the arena, one every some milliseconds; how many."""
    fd = arena_fd(daemon_pid)
    size = os.fstat(fd).st_size
    flips = 0
    while goes_on():
        at = rng.randrange(size)
        os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 1 << rng.randrange(8)]), at)
        flips += 1
        time.sleep(0.02)
    os.close(fd)
    return flips


def client(
    url: str,
    role: Callable[[kvtier.Namespace, kvtier.Connection, random.Random, float], Counter],
    rng: random.Random,
    seconds: float,
) -> Counter:
    with kvtier.connect(url, deadline=10) as kv:
        ns = kv.namespace(opaque(NBYTES))
        attached(kv)
        return role(ns, kv, rng, time.monotonic() + seconds)


def forked(work: Callable[[], Counter]) -> tuple[int, int]:
    """(pid, descriptor of what it saw)"""
    mine, its = os.pipe()
    pid = os.fork()
    if pid:
        os.close(its)
        return pid, mine
    os.close(mine)
    with open(its, "w") as pipe:
        json.dump(work(), pipe)
    os._exit(0)


def main(url: str, daemon_pid: int, seconds: float, seed: int) -> None:
    kvtier.warm_up()  # once, not in each of them
    children = []
    for number in range(WRITERS + READERS):
        role, rng = (write if number < WRITERS else read), random.Random(seed * 100 + number)
        children.append(forked(lambda role=role, rng=rng: client(url, role, rng, seconds)))
    running = {pid for pid, _ in children}

    def goes_on() -> bool:
        for pid in list(running):
            if os.waitpid(pid, os.WNOHANG)[0]:
                running.discard(pid)
        return bool(running)

    total = Counter(flips=damage(daemon_pid, random.Random(seed), goes_on))
    for _, pipe in children:
        with open(pipe) as told:
            total.update(json.loads(told.read() or '{"died": 1}'))
    sys.stdout.write(json.dumps(dict(sorted(total.items()))))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
