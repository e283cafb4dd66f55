"""Traces made to mislead an eviction policy, each from a seed: what LRU is best at, what it is
worst at, and what changes while it is being learned.

    loop       more conversations in turn than fit
    scan       as many paths that never come back as ones that do
    recency    what was used last is used next
    shift      a working set that moves on every 600 requests
    flip       which of two kinds of request is continued changes every 1,500 requests
    flip-fast  the same every 300
    gap        everything comes back once, after 150 s or after 40 s, changing every 2,000 requests
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from typing import Final

from kvtier.bench.trace import Trace, TraceBuilder

__all__ = ["HARD", "hard_trace"]

BLOCK: Final = 512
_PATH: Final = 20

#: Arrival in seconds, what each block holds, output tokens.
Request = tuple[float, list[int], int]


def _conversation(number: int) -> list[int]:
    return list(range(number * _PATH, (number + 1) * _PATH))


def _loop(rng: random.Random, requests: int) -> Iterator[Request]:
    for n in range(requests):
        yield float(n), _conversation(n % 150), rng.choice((10, 1000))


def _scan(rng: random.Random, requests: int) -> Iterator[Request]:
    for n in range(requests):
        known = int(rng.paretovariate(1.0)) % 100
        yield float(n), _conversation(known if rng.random() < 0.5 else 100 + n), 100


def _recency(rng: random.Random, requests: int) -> Iterator[Request]:
    stack = list(range(400))
    for n in range(requests):
        stack.insert(0, stack.pop(min(len(stack) - 1, int(rng.expovariate(1 / 60)))))
        yield n * 0.5, _conversation(stack[0]), 100


def _shift(rng: random.Random, requests: int) -> Iterator[Request]:
    for n in range(requests):
        yield n * 0.5, _conversation(n // 600 * 40 + rng.randrange(60)), rng.choice((10, 1000))


def _flip(every: int) -> Callable[[random.Random, int], Iterator[Request]]:
    def make(rng: random.Random, requests: int) -> Iterator[Request]:
        fresh, later = 0, list[tuple[float, list[int], int]]()
        for n in range(requests):
            now = float(n)
            while later and later[0][0] <= now and rng.random() < 0.7:
                _, path, output = heapq.heappop(later)
                now += 0.01
                yield now, [*path, *range(fresh, fresh + 4)], output
                fresh += 4
            is_short = rng.random() < 0.5
            length, output = (10, 50) if is_short else (25, 800)
            path = list(range(fresh, fresh + length))
            fresh += length
            yield now, path, output
            if is_short == (n // every % 2 == 0) and rng.random() < 0.8:
                heapq.heappush(later, (now + rng.expovariate(1 / 60), path, output))

    return make


def _gap(rng: random.Random, requests: int) -> Iterator[Request]:
    later: list[tuple[float, int]] = []
    for n in range(requests):
        yield float(n), _conversation(n), 100
        heapq.heappush(later, (n + (40.0 if n // 2000 % 2 else 150.0) + rng.random(), n))
        while later and later[0][0] <= n:
            yield n + 0.5, _conversation(heapq.heappop(later)[1]), 100


HARD: Final[dict[str, Callable[[random.Random, int], Iterator[Request]]]] = {
    "loop": _loop,
    "scan": _scan,
    "recency": _recency,
    "shift": _shift,
    "flip": _flip(1500),
    "flip-fast": _flip(300),
    "gap": _gap,
}


def hard_trace(name: str, *, seed: int = 1, requests: int = 8000) -> Trace:
    """KeyError for a name that is not in HARD. Blocks of 512 tokens."""
    builder = TraceBuilder(f"made: {name}", BLOCK)
    for now, ids, output in HARD[name](random.Random(seed), requests):
        builder.add(
            builder.blocks.follow(ids),
            arrival_s=now,
            session=None,
            input_tokens=len(ids) * BLOCK,
            output_tokens=output,
        )
    return builder.build()
