"""Small generated traces, and plain models of caches to compare with."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from pathlib import Path

import numpy as np

from kvtier.bench.trace import NO_BLOCK, Trace, TraceBuilder

BLOCK = 16


def conversations(seed: int, *, requests: int = 150, sessions: int = 9) -> list[tuple[int, list]]:
    """(session, content ids): sessions that go on, some of them from another's beginning."""
    rng = random.Random(seed)
    open_chats: dict[int, list] = {}
    found = []
    fresh = 0
    for _ in range(requests):
        chat = rng.randrange(sessions)
        if chat not in open_chats or rng.random() < 0.05:
            others = list(open_chats.values())
            source = rng.choice(others) if others else []
            open_chats[chat] = source[: rng.randrange(len(source) + 1)]
        new = rng.randrange(1, 7)
        open_chats[chat] = [*open_chats[chat], *range(fresh, fresh + new)][:40]
        fresh += new
        found.append((chat, list(open_chats[chat])))
    return found


def build(
    requests: list[tuple[int, list]], *, with_sessions: bool = True, remainder: int = 0
) -> Trace:
    """`remainder`: tokens that the last block of each request lacks."""
    builder = TraceBuilder("generated", BLOCK)
    for number, (session, ids) in enumerate(requests):
        builder.add(
            builder.blocks.follow(ids),
            arrival_s=float(number),
            session=session if with_sessions else None,
            input_tokens=max(1, len(ids) * BLOCK - remainder),
            output_tokens=3,
        )
    return builder.build()


def upwards(trace: Trace, request: int) -> list[int]:
    """The blocks of a request by its parents alone."""
    found, block = [], int(trace.leaf[request])
    while block != NO_BLOCK:
        found.append(block)
        block = int(trace.parent[block])
    return found[::-1]


def plain_lru(trace: Trace, slots: int) -> list[int]:
    """Leading hits of an LRU that knows no chains, used from the tail to the head."""
    cache: OrderedDict[int, None] = OrderedDict()
    found = []
    for request in range(trace.requests):
        path = upwards(trace, request)
        hits = 0
        while hits < len(path) and path[hits] in cache:
            hits += 1
        found.append(hits)
        for block in reversed(path):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > slots:
            cache.popitem(last=False)
    return found


def plain_min(trace: Trace, slots: int) -> list[int]:
    """Leading hits of Belady's MIN with bypass, block by block."""
    paths = [upwards(trace, request) for request in range(trace.requests)]
    later: dict[int, list[int]] = {}
    for request in reversed(range(len(paths))):
        for block in paths[request]:
            later.setdefault(block, []).append(request)
    cache: set[int] = set()
    found = []
    for path in paths:
        hits = 0
        while hits < len(path) and path[hits] in cache:
            hits += 1
        found.append(hits)
        for block in path:
            later[block].pop()
        cache |= set(path)
        depth = trace.depth
        order = sorted(
            cache, key=lambda b: (later[b][-1] if later[b] else len(paths), int(depth[b]))
        )
        cache = set(order[:slots])
    return found


def mooncake_rows(requests: list[tuple[int, list]], **fields: object) -> list[dict]:
    return [
        {
            "timestamp": 1000 * number,
            "input_length": len(ids) * 512 - 5,
            "output_length": 7,
            "hash_ids": ids,
            **{name: make(session) for name, make in fields.items()},
        }
        for number, (session, ids) in enumerate(requests)
    ]


def write_lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def same_paths(a: Trace, b: Trace) -> bool:
    """The same requests over trees that are equal but for the numbers of their blocks."""
    pairs: dict[int, int] = {}
    for request in range(a.requests):
        left, right = upwards(a, request), upwards(b, request)
        if len(left) != len(right):
            return False
        if any(pairs.setdefault(x, y) != y for x, y in zip(left, right, strict=True)):
            return False
    return len(set(pairs.values())) == len(pairs) and np.array_equal(a.blocks, b.blocks)
