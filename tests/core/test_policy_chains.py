"""Policies under chains, leases and refusals: who may go, who goes first, what is remembered."""

from __future__ import annotations

from functools import partial
from itertools import chain

import numpy as np
import pytest

from kvtier.core.policy import POLICIES
from kvtier.core.policy.arc import Arc
from kvtier.core.policy.lru import NEVER, Clock, LruTailFirst
from kvtier.core.policy.s3fifo import S3Fifo
from kvtier.core.table import NO_ROW, CopyTable
from tests.core.policy_models import Chains, Pages, PlainArc, PlainLru
from tests.core.support import take_row
from tests.seeds import seeds

REMEMBERING = ["arc", "s3-fifo"]


def remembered(pages: Pages) -> list[int]:
    return list(chain.from_iterable(pages.ghosts()))


def disturb(pages: Chains, rng: np.random.Generator) -> None:
    """One random thing happens to a random page, or to some."""
    names = list(pages.rows)
    x = int(rng.choice(names))
    kind = int(rng.integers(6))
    if kind == 0:
        pages.lease(x)
    elif kind == 1:
        pages.release(x)
    elif kind == 2:
        pages.blocked.add(x)
    elif kind == 3:
        pages.unblock(x)
    else:
        pages.use(rng.choice(names, min(len(names), int(rng.integers(1, 50)))).tolist())


@pytest.mark.parametrize("seed", seeds(1, of=3))
@pytest.mark.parametrize("name", [*POLICIES, "s3-fifo in strides"])
def test_only_what_nothing_keeps_goes_and_all_of_it_can(
    monkeypatch: pytest.MonkeyPatch, name: str, seed: int
) -> None:
    if name not in POLICIES:
        name = "s3-fifo"
        monkeypatch.setattr("kvtier.core.policy.s3fifo._STEPS_MIN", 1)
    rng = np.random.default_rng(seed)
    pages = Chains(POLICIES[name], 40)
    for n in range(1500):
        parent = int(rng.choice(list(pages.rows))) if pages.rows and rng.random() < 0.7 else None
        pages.put(n, parent)
        for _ in range(int(rng.integers(0, 4))):
            disturb(pages, rng)
        if rng.random() < 0.1:
            pages.delete(int(rng.choice(list(pages.rows))))
        if rng.random() < 0.05:  # a call ends, and with it all that it held
            for x in list(pages.rows):
                pages.unblock(x)
                while pages.table.leases[pages.rows[x]]:
                    pages.release(x)
    assert len(pages.evicted) > 500, f"seed {seed}"


@pytest.mark.parametrize("seed", seeds(1, of=3))
@pytest.mark.parametrize(
    ("make", "make_model"), [(LruTailFirst, PlainLru), (partial(Arc, burst_share=0), PlainArc)]
)
def test_of_what_may_go_the_first_goes(make: object, make_model: type, seed: int) -> None:
    """The order is that of the model, which passes over pages that something keeps."""
    rng = np.random.default_rng(seed)
    pages = Chains(make, 50)
    model = make_model(50, pages.may_go)
    for n in range(1200):
        x = n if rng.random() < 0.5 else int(rng.integers(max(0, n - 120), n + 1))
        if x in pages.rows:
            model.get(x)
            pages.use([x])
        else:
            parent = int(rng.choice(list(pages.rows))) if pages.rows else None
            is_full = model.get(x) is None
            assert pages.put(x, parent if rng.random() < 0.5 else None) is not is_full
        y = int(rng.choice(list(pages.rows)))
        action = rng.choice([pages.lease, pages.release, pages.blocked.add, pages.unblock])
        action(y)
        assert pages.evicted == model.evicted, f"page {n}, seed {seed}"
        assert pages.ghosts() == model.ghosts(), f"page {n}, seed {seed}"
        if n % 100 == 99:
            for y in list(pages.rows):
                pages.unblock(y)
                while pages.table.leases[pages.rows[y]]:
                    pages.release(y)
    assert len(pages.evicted) > 300


@pytest.mark.parametrize("name", POLICIES)
def test_a_chain_goes_from_its_tail(name: str) -> None:
    pages = Chains(POLICIES[name], 30)
    for n in range(30):
        pages.put(n, n - 1)
    pages.lease(14)
    for n in range(100, 115):
        assert pages.put(n, None)
    assert pages.evicted == list(range(29, 14, -1))
    for n in range(200, 215):
        pages.put(n, None)
    assert set(range(15)) <= set(pages.rows), "what stands before a page in use stays"
    pages.release(14)
    for n in range(300, 315):
        pages.put(n, None)
    assert pages.evicted[30:] == list(range(14, -1, -1)), "the coldest, once they can go"


@pytest.mark.parametrize("name", POLICIES)
def test_the_page_used_last_stays_while_another_can_go(name: str) -> None:
    """It may be the parent of the page that needs the room."""
    pages = Pages(POLICIES[name], 3)
    for n in range(3):
        pages.get(n)
    for n in range(3, 30):
        last = min(pages.rows)
        pages.policy.touch(np.array([pages.rows[last]]))
        assert pages.evict() != last
        pages.admit(n)
    for n in list(pages.rows)[1:]:
        pages.delete(n)
    (last,) = pages.rows
    pages.policy.touch(np.array([pages.rows[last]]))
    assert pages.evict() == last


@pytest.mark.parametrize("name", POLICIES)
def test_the_coldest_is_the_next_victims_stamp(name: str) -> None:
    rng = np.random.default_rng(7)
    pages = Pages(POLICIES[name], 50)
    assert pages.policy.coldest() == NEVER
    stamps = []
    for n in range(400):
        if len(pages.rows) == pages.capacity:
            coldest = pages.policy.coldest()
            row = pages.policy.evict(lambda row: True)
            assert pages.table.stamp[row] == coldest
            stamps.append(coldest)
            pages.delete(pages.names[row])
        pages.admit(n)
        pages.use(rng.choice(list(pages.rows), 2).tolist())
    assert len(stamps) == 350
    for row in pages.rows.values():
        pages.table.leases[row] = 1
    assert pages.policy.coldest() == NEVER
    assert pages.policy.evict(lambda row: True) == NO_ROW


@pytest.mark.parametrize("name", POLICIES)
def test_stamps_are_those_of_one_clock(name: str) -> None:
    """Of the pages of all queues the ones used later have the higher stamps."""
    pages = Pages(POLICIES[name], 60)
    for n in range(60):
        pages.get(n)
    for used in ([3], [5, 4], list(range(50, 9, -1))):
        before = pages.clock.now
        pages.use(used)
        stamps = [pages.table.stamp[pages.rows[n]] for n in used]
        assert stamps == sorted(stamps, reverse=True), "the head is the younger"
        assert before <= stamps[-1] <= stamps[0] < pages.clock.now


@pytest.mark.parametrize("name", REMEMBERING)
def test_what_is_deleted_is_not_remembered(name: str) -> None:
    pages = Pages(POLICIES[name], 20)
    for n in range(20):
        pages.get(n)
    for n in range(10):
        pages.delete(n)
    assert remembered(pages) == []
    named = pages.policy.victim(lambda row: True)
    pages.use([19])  # the caller has thought better of it
    pages.delete(pages.names[named])
    assert remembered(pages) == []
    assert pages.evict() == 11
    assert remembered(pages) == [11]


@pytest.mark.parametrize("name", REMEMBERING)
def test_all_shards_of_an_evicted_page_are_remembered(name: str) -> None:
    pages = Pages(POLICIES[name], 24)
    rows = {}
    for n in range(6):
        for shard in range(4):
            row = take_row(pages.table, n.to_bytes(32, "little"))
            pages.table.namespace[row], pages.table.shard[row] = 1, shard
            rows[n, shard] = row
            pages.policy.admit(row)
    assert pages.policy.evict(lambda row: True) == rows[0, 0]
    for shard in range(1, 4):
        pages.policy.forget(rows[0, shard])
    for shard in range(4):  # of another page, deleted at the same time
        pages.policy.forget(rows[1, shard])
    assert sum(pages.policy.ghosts.counts) == 4


@pytest.mark.parametrize("name", REMEMBERING)
def test_a_page_that_comes_back_in_another_row_is_known(name: str) -> None:
    """It outlives pages that came after it and were never here before."""
    pages = Pages(POLICIES[name], 20)
    for n in [*range(20), 100, 101, 102]:  # 0, 1 and 2 give way
        pages.get(n)
    old_row = pages.marks  # their marks are known, their rows are taken by others
    assert len(old_row) == 23
    for n in (2, 1, 0):
        pages.get(n)
    for n in range(200, 215):
        pages.get(n)
    assert {0, 1, 2} <= set(pages.rows)


@pytest.mark.parametrize("name", REMEMBERING)
def test_memory_of_the_evicted_shrinks_with_the_queue(name: str) -> None:
    pages = Pages(POLICIES[name], 1000)
    for n in range(1000):
        pages.get(n)
    pages.use(range(1000))
    pages.use(range(1000))
    ghosts = pages.policy.ghosts
    for n in range(1000, 3000):
        pages.get(n)
        assert sum(ghosts.counts) <= 1000 + 1
    assert sum(ghosts.counts) > 800
    large = ghosts.nbytes
    for n in list(pages.rows):
        pages.delete(n)
        assert sum(ghosts.counts) <= 2 * len(pages.rows) + 2
    assert ghosts.nbytes <= large / 4


@pytest.mark.parametrize("name", REMEMBERING)
def test_evictions_that_nothing_follows_do_not_pile_up(name: str) -> None:
    """Their writers died: the room is free, and the queue as small as it is."""
    pages = Pages(POLICIES[name], 200)
    for n in range(200):
        pages.get(n)
    pages.use(range(0, 190, 2))
    pages.use(range(0, 190, 2))
    while pages.rows:
        pages.evict()
        assert len(remembered(pages)) <= 3 * len(pages.rows) + 2


def test_the_share_of_new_pages_that_arc_learns_shrinks_with_the_queue() -> None:
    pages = Pages(POLICIES["arc"], 100)
    for n in [*range(50), *range(50)]:
        pages.get(n)
    for n in range(2000):
        pages.get(1000 + n % 60)  # they come back just after they were given up
    assert pages.policy.target > 30
    while len(pages.rows) > 10:
        pages.delete(next(iter(pages.rows)))
    assert pages.policy.target <= 10


@pytest.mark.parametrize("seed", seeds(1, of=3))
@pytest.mark.parametrize("name", POLICIES)
def test_rows_go_from_one_queue_to_another(name: str, seed: int) -> None:
    """Size classes share the table: each names its own pages alone, each of them once."""
    rng = np.random.default_rng(seed)
    table, clock = CopyTable(150), Clock()
    queues = [POLICIES[name](table, clock) for _ in range(3)]
    rows: list[list[int]] = [[], [], []]
    for n in range(3000):
        at = int(rng.integers(3))
        row = take_row(table, n.to_bytes(32, "little"))
        if row == NO_ROW:
            for row in rng.choice(rows[at], len(rows[at]) // 2, replace=False).tolist():
                table.leases[row] = 1
            for _ in range(len(rows[at]) // 4):
                row = queues[at].evict(lambda row: True)
                assert row in rows[at], f"page {n}, seed {seed}"
                assert not table.leases[row]
                rows[at].remove(row)
                table.give_rows((row,))
            for row in rows[at]:
                table.leases[row] = 0
                if not table.queued[row]:
                    queues[at].ready(row)
            for row in rng.choice(rows[at], len(rows[at]) // 4, replace=False).tolist():
                queues[at].forget(row)
                rows[at].remove(row)
                table.give_rows((row,))
            continue
        queues[at].admit(row)
        rows[at].append(row)
        if n % 3 == 0:
            queues[at].touch(rng.choice(rows[at], min(len(rows[at]), 40)))
    for queue, mine in zip(queues, rows, strict=True):
        while mine:
            row = queue.evict(lambda row: True)
            mine.remove(row)
        assert queue.evict(lambda row: True) == NO_ROW


def test_of_pages_that_come_back_the_one_used_longest_ago_goes_first() -> None:
    pages = Chains(POLICIES["s3-fifo"], 20)
    for n in range(20):
        pages.put(n, None)
    for n in range(3):
        pages.lease(n)
    assert pages.give_way(), "past those that are in use"
    assert pages.evicted == [3]
    for n in range(3):
        pages.release(n)
    pages.use([0])
    for _ in range(3):
        pages.give_way()
    assert pages.evicted == [3, 1, 2, 4]


@pytest.mark.parametrize("make", [Arc, S3Fifo])
def test_the_use_that_comes_with_a_page_is_no_second_one(make: type[Arc | S3Fifo]) -> None:
    """A chain is stored page by page, each used by the next: it is still one use, and passes."""

    def survivors(make: object) -> int:
        pages = Chains(make, 100)
        for n in range(50):
            pages.put(n, None)
        for _ in range(3):
            pages.use(range(40))
        for n in range(1000, 1600):
            pages.put(n, n - 1 if n % 30 else None)
            for _ in range(2):  # once for the next page, once for the one who reads it at once
                pages.use([n])
        return len(set(range(40)) & set(pages.rows))

    assert survivors(make) == 40
    assert survivors(partial(make, burst_share=0)) < 40
