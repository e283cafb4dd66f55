"""LRU with compiled loops: after any calls the same rows, in the same order, as LruTailFirst."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvtier.core.policy.lru import Clock, LruTailFirst
from kvtier.core.table import NO_ROW, CopyTable
from tests.seeds import seeds

fast_lru = pytest.importorskip("kvtier.bench.fast_lru", reason="numba is in extra [fast]")

ROWS = 400
COLUMNS = ("stamp", "children", "queued", "parent")


class Side:
    """A policy over a table of its own, and the links that a store would keep."""

    def __init__(self, make):
        self.table = CopyTable(ROWS)
        self.policy = make(self.table, Clock())

    def admit(self, rows, parents):
        table = self.table
        for row, parent in zip(rows.tolist(), parents, strict=True):
            table.queued[row] = table.children[row] = 0
            table.parent[row] = parent + 1
        kept = []
        for parent in parents:
            if parent != NO_ROW:
                table.children[parent] += 1
                if table.children[parent] == 1 and parent not in rows:
                    kept.append(parent)
        for row in kept:
            self.policy.keep(row)
        self.policy.admit_many(rows)

    def lease(self, row, change):
        table = self.table
        table.leases[row] += change
        if not (table.leases[row] or table.children[row] or table.queued[row]):
            self.policy.ready(row)

    def evict(self, count):
        if hasattr(self.policy, "evict_many"):
            return self.policy.evict_many(count).tolist()
        table, gone = self.table, []
        while len(gone) < count and (row := self.policy.evict(lambda row: True)) != NO_ROW:
            gone.append(row)
            parent = table.parent[row] - 1
            if parent != NO_ROW:
                table.parent[row] = 0
                table.children[parent] -= 1
                free = not (table.children[parent] or table.leases[parent])
                if free and not table.queued[parent]:
                    self.policy.ready(parent)
        return gone


@pytest.mark.parametrize("seed", seeds(2, of=6))
def test_any_calls_leave_the_same_state(seed):
    rng = random.Random(seed)
    sides = Side(LruTailFirst), Side(fast_lru.FastLru)
    here: list[int] = []
    free = list(range(ROWS))
    leased: list[int] = []
    for _ in range(400):
        kind = rng.choice(["admit", "admit", "touch", "touch", "evict", "lease", "release", "odd"])
        if kind == "admit" and free:
            rows = np.array([free.pop() for _ in range(min(len(free), rng.randrange(1, 40)))])
            first = rng.choice([NO_ROW, *here[-50:]])
            parents = [first, *rows[:-1].tolist()]
            for side in sides:
                side.admit(rows, parents)
            here += rows.tolist()
        elif kind == "touch" and here:
            # Some are named twice, some are not here.
            rows = np.array(rng.choices([*here, *free[:3]], k=rng.randrange(1, 60)))
            for side in sides:
                side.policy.touch(rows)
        elif kind == "evict":
            count = rng.randrange(1, 60)
            one, two = (side.evict(count) for side in sides)
            assert one == two
            here = [row for row in here if row not in one]
            free += one
        elif kind == "lease" and here:
            leased.append(rng.choice(here))
            for side in sides:
                side.lease(leased[-1], 1)
        elif kind == "release" and leased:
            row = leased.pop(rng.randrange(len(leased)))
            for side in sides:
                side.lease(row, -1)
        elif kind == "odd" and here:
            # A page after it that nobody has told the policy of: it is met at the front.
            row = rng.choice(here)
            for side in sides:
                side.table.children[row] += 1
            one, two = (side.evict(3) for side in sides)
            assert one == two
            for side in sides:
                side.table.children[row] -= 1
                side.lease(row, 0)
            here = [other for other in here if other not in one]
            free += one
        plain, fast = sides
        for name in COLUMNS:
            assert np.array_equal(plain.table.column(name), fast.table.column(name)), name
        orders = plain.policy._order, fast.policy._order
        assert np.array_equal(orders[0]._place_np, orders[1]._place_np)
        assert orders[0].members == orders[1].members == len(here)
        assert plain.policy.coldest() == fast.policy.coldest()
