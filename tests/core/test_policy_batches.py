"""What a policy does for many pages at once, or in one call, comes to what it does step by step."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvtier.core.policy import POLICIES
from kvtier.core.policy.lru import Clock
from kvtier.core.table import NO_ROW, CopyTable
from tests.core.support import key, take_row
from tests.seeds import seeds


@pytest.mark.parametrize("policy", ["arc", "s3-fifo"])
@pytest.mark.parametrize("seed", seeds(2, of=6))
def test_to_evict_is_to_name_and_to_forget(policy: str, seed: int) -> None:
    rng = random.Random(f"{policy} {seed}")
    found: list[list[int]] = []
    state = rng.getstate()
    for turn in range(2):
        rng.setstate(state)
        table = CopyTable(64)
        queue = POLICIES[policy](table, Clock())
        rows = [take_row(table, key(n)) for n in range(50)]
        for row in rows[1:]:
            if rng.random() < 0.5:
                table.parent[row] = row
                table.children[row - 1] += 1
        queue.admit_many(np.array(rows))
        order: list[int] = []
        found.append(order)
        while len(order) < 40:
            kept = rng.sample(range(50), 3)
            if turn:
                row = queue.evict(lambda row, kept=kept: row not in kept)
            else:
                row = queue.victim(lambda row, kept=kept: row not in kept)
                if row != NO_ROW:
                    queue.forget(row)
            order.append(row)
            if row != NO_ROW and (parent := table.parent[row]):
                table.children[parent - 1] -= 1
                queue.ready(parent - 1)
            for back in kept:
                if back not in order and not table.children[back]:
                    queue.ready(back)
    assert found[0] == found[1]
    assert len(set(found[0])) > 30


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", seeds(2, of=6))
def test_pages_that_come_together_are_as_pages_that_come_one_by_one(policy: str, seed: int) -> None:
    rng = random.Random(f"{policy} {seed}")
    state = rng.getstate()
    found: list[list[int]] = []
    for turn in range(2):
        rng.setstate(state)
        table = CopyTable(256)
        queue = POLICIES[policy](table, Clock())
        order: list[int] = []
        found.append(order)
        live: list[int] = []
        for _ in range(60):
            new = [take_row(table, key(rng.randrange(200))) for _ in range(rng.randint(1, 8))]
            if turn:
                queue.admit_many(np.array(new))
            else:
                for row in new:
                    queue.admit(row)
            live += new
            if rng.random() < 0.5:
                queue.touch(np.array(rng.sample(live, min(len(live), 5))))
            while len(live) > 40:
                row = queue.evict(lambda row: True)
                order.append(row)
                live.remove(row)
                table.give_rows((row,))
    assert found[0] == found[1]
    assert len(found[0]) > 100
