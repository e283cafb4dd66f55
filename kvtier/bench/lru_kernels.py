"""The compiled loop of lru_curve.py. Importing this needs numba; any thread."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvtier.packing.jit_numba import compiled, part

__all__ = ["lru_hits"]


@part
def _add(tree: Any, at: int, change: int) -> None:
    while at < len(tree):
        tree[at] += change
        at += at & -at


@part
def _sum(tree: Any, at: int) -> int:
    total = 0
    while at > 0:
        total += tree[at]
        at -= at & -at
    return total


@part
def _renumber(tree: Any, block_at: Any, last: Any, now: int) -> int:
    """Blocks get new times, 1 and up, in the order of the old ones; the last of them."""
    count = 0
    for time in range(1, now + 1):
        block = block_at[time]
        if block >= 0:
            count += 1
            block_at[count] = block
            last[block] = count
    block_at[count + 1 :] = -1
    tree[:] = 0
    for time in range(1, count + 1):
        tree[time] += 1
        up = time + (time & -time)
        if up < len(tree):
            tree[up] += tree[time]
    for time in range(count + 1, len(tree)):
        up = time + (time & -time)
        if up < len(tree):
            tree[up] += tree[time]
    return count


@compiled("void(i4[::1], i4[::1], i4[::1], i8[::1], i4[:, ::1])")
def lru_hits(leaf: Any, blocks: Any, parent: Any, slots: Any, hits: Any) -> None:
    """`slots` rise; hits[i, j]: leading blocks that request i finds with slots[j]."""
    longest = 1
    for count in blocks:
        longest = max(longest, count)
    size = 2 * len(parent) + longest + 2
    tree = np.zeros(size, np.int32)  # Fenwick: how many blocks were used last at a time
    block_at = np.full(size, -1, np.int32)  # of each time
    last = np.zeros(len(parent), np.int32)  # of each block
    path = np.empty(longest, np.int32)
    now = alive = 0
    for request in range(len(leaf)):
        n = blocks[request]
        block = leaf[request]
        for at in range(n - 1, -1, -1):
            path[at] = block
            block = parent[block]
        if now + n >= size:
            now = _renumber(tree, block_at, last, now)
        fits = depth = 0
        while depth < n and last[path[depth]]:
            # Blocks used at its last use or since: it is there if so many fit.
            distance = alive - _sum(tree, last[path[depth]] - 1)
            while fits < len(slots) and slots[fits] < distance:
                hits[request, fits] = depth
                fits += 1
            if fits == len(slots):
                break
            depth += 1
        while fits < len(slots):
            hits[request, fits] = depth
            fits += 1
        for at in range(n - 1, -1, -1):
            block = path[at]
            if last[block]:
                _add(tree, last[block], -1)
                block_at[last[block]] = -1
            else:
                alive += 1
            now += 1
            last[block] = now
            block_at[now] = block
            _add(tree, now, 1)
