"""What policies cost: the memory of evicted pages against a plain model, and bytes a page."""

from __future__ import annotations

import gc
import hashlib
import tracemalloc
from collections import OrderedDict

import numpy as np
import pytest

from kvtier.core.policy import POLICIES
from kvtier.core.policy.ghosts import NO_LIST, Ghosts, mark_of
from kvtier.core.policy.lru import Clock
from kvtier.core.table import BYTES_PER_ROW, CopyTable
from tests.core.support import take_row
from tests.seeds import seeds

#: Of the 250 that a page may cost in all; the index takes 16 at most.
POLICY_BYTES_MAX = 60


@pytest.mark.parametrize("seed", seeds(1, of=3))
def test_ghosts_equal_ordered_dicts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ghosts = Ghosts(2)
    model: list[OrderedDict[int, None]] = [OrderedDict(), OrderedDict()]
    # Few different low bits: long chains in the hash table.
    marks = [(int(rng.integers(0, 2**59)) << 4) | int(rng.integers(0, 4)) for _ in range(600)]
    for step in range(6000):
        mark, of = marks[int(rng.integers(len(marks)))], int(rng.integers(2))
        # It grows, and shrinks, and grows.
        kind = rng.choice(3, p=[0.7, 0.2, 0.1] if step // 1500 % 2 == 0 else [0.2, 0.4, 0.4])
        if kind == 0:
            ghosts.add(mark, of)
            for pages in model:
                pages.pop(mark, None)
            model[of][mark] = None
        elif kind == 1:
            expected = next((at for at, pages in enumerate(model) if mark in pages), NO_LIST)
            assert ghosts.remove(mark) == expected
            for pages in model:
                pages.pop(mark, None)
        elif model[of]:
            ghosts.drop_oldest(of)
            model[of].popitem(last=False)
        if step % 50 == 0:
            ghosts.fit(len(ghosts))
            assert [ghosts.marks(0), ghosts.marks(1)] == [list(model[0]), list(model[1])]
        assert ghosts.counts == [len(model[0]), len(model[1])], f"step {step}, seed {seed}"


def test_ghosts_take_their_room_at_once_and_give_it_back() -> None:
    ghosts = Ghosts(1)
    ghosts.fit(10_000)
    sizes = set()
    for mark in range(10_000):
        ghosts.add(mark, 0)
        sizes.add(ghosts.nbytes)
    assert len(sizes) == 2
    assert ghosts.nbytes <= 50 * 10_000
    for _ in range(9_900):
        ghosts.drop_oldest(0)
    ghosts.fit(100)
    assert ghosts.nbytes <= 50 * 256
    assert ghosts.marks(0) == list(range(9_900, 10_000))


def test_a_mark_tells_namespaces_shards_and_keys_apart() -> None:
    table = CopyTable(300)
    marks = set()
    for bit in range(256):
        row = take_row(table, (1 << bit).to_bytes(32, "little"))
        table.namespace[row], table.shard[row] = 1, 1
        marks.add(mark_of(table, row))
    for namespace, shard in ((2, 1), (1, 2), (1 << 16, 1), (0, 1), (1, 0)):
        row = take_row(table, (1).to_bytes(32, "little"))
        table.namespace[row], table.shard[row] = namespace, shard
        marks.add(mark_of(table, row))
    assert len(marks) == 261
    row = take_row(table, (1).to_bytes(32, "little"))
    table.namespace[row], table.shard[row] = 1, 1
    assert mark_of(table, row) in marks, "another row, the same page"
    assert all(0 <= mark < 1 << 64 for mark in marks)


@pytest.mark.parametrize("name", POLICIES)
def test_a_page_costs_few_bytes_and_no_objects(name: str) -> None:
    """Full of pages, most of them used, and as many evicted ones remembered."""
    pages, rng = 1_000, np.random.default_rng(1)
    table, clock = CopyTable(pages), Clock()
    keys = [hashlib.sha256(n.to_bytes(4, "little")).digest() for n in range(3 * pages)]
    rows = [take_row(table, key) for key in keys[:pages]]
    # What was there before is not looked through again and again, now and later.
    gc.collect()
    gc.freeze()
    objects = len(gc.get_objects())
    tracemalloc.start()
    try:
        policy = POLICIES[name](table, clock)
        for row in rows:
            policy.admit(row)
        for key in keys[pages:]:
            row = policy.evict(lambda row: True)
            table.give_rows((row,))
            policy.admit(take_row(table, key))
            if row % 20 == 0:
                policy.touch(rng.integers(0, pages, 100))
        del key, row
        cost = tracemalloc.get_traced_memory()[0] / pages
        gc.collect()
        objects = len(gc.get_objects()) - objects
    finally:
        tracemalloc.stop()
    assert cost < POLICY_BYTES_MAX
    assert BYTES_PER_ROW + POLICY_BYTES_MAX + 16 <= 250
    assert objects < 100
