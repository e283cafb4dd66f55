"""What the store does for many pages at once comes to what it does for them one by one."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvtier.core.generations import BLOCK, Generations
from kvtier.core.index import Index
from kvtier.core.lifecycle import Event, IllegalTransition, State, fire, fire_many
from kvtier.core.page import Codec, PageMeta, Tier
from kvtier.core.page_columns import PageColumns
from kvtier.core.policy import POLICIES
from kvtier.core.policy.lru import Clock
from kvtier.core.slabs import SLOT_UNIT, SlabAllocator
from kvtier.core.store import Store
from kvtier.core.table import NO_ROW, CopyTable
from tests.core.support import NS, RECORD, demote, key, keys, make_store, meta, put

HOLDER = 7
SLOTS = 48


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch):
    def make_with(policy: str, **more: Any) -> Store:
        chosen = POLICIES[policy]
        monkeypatch.setattr("tests.core.support.Store", partial(Store, make_policy=chosen))
        return make_store(SLOTS, grants_share=1.0, quarantine_share=1.0, **more)

    return make_with


def sealed(store: Store) -> dict[tuple[int, int, int, bytes], tuple[int, bytes]]:
    """tier, namespace, shard and key of each copy -> its generation, the key of the page before."""
    table, found = store._table, {}
    for tier in store.status():
        for row in store.survey.sealed_rows(tier).tolist():
            parent = table.parent[row] - 1
            name = table.tier[row], table.namespace[row], table.shard[row], table.key(row)
            before = table.key(parent) if parent != NO_ROW else b""
            found[name] = table.generation[row], before
    return found


def books(store: Store) -> tuple[Any, ...]:
    """All that two stores with one history have in common; which slots they use is not of it."""
    store.survey.check()
    store._listing.check(store)
    listed = {name: page._replace(slot=0) for name, page in store._listing.pages.items()}
    grants = store.grants
    held = grants.granted_pages, grants.granted_bytes, grants.quarantined_bytes
    sequence = store._residents.events.sequence
    return sealed(store), listed, store.counters(), store.status(), held, sequence


def fill(store: Store, rng: random.Random, shards: int, *, nvme: bool) -> list[int]:
    """Chains of pages, some of them used again, pinned or copied down; the leases."""
    leases = []
    for chain in range(8):
        length = rng.randint(1, 9)
        numbers = [100 * chain + i for i in range(length)]
        for i, n in enumerate(numbers):
            record = RECORD * rng.choice([1, 1, 1, 2])
            for shard in range(shards if rng.random() < 0.9 else 1):
                put(store, n, numbers[i - 1] if i else None, shard=shard, record=record)
            is_there = store.survey.in_tier(NS, 0, keys([n]), Tier.HOST)[0]
            if nvme and is_there and rng.random() < 0.3:
                demote(store, n, numbers[i - 1] if i else None)
        if rng.random() < 0.4:
            store.usage.used(NS, 0, keys(numbers), hits=0, misses=0)
        if rng.random() < 0.3:
            some = rng.sample(numbers, rng.randint(1, length))
            lease, _ = store.pins.pin(1, NS, 0, keys(some), deadline=99.0)
            leases += [lease] if lease else []
    return leases


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(12))
def test_many_grants_take_what_as_many_single_ones_take(
    make, monkeypatch: pytest.MonkeyPatch, policy: str, seed: int
) -> None:
    monkeypatch.setattr("kvtier.core.placement._SLAB_LOOK_EVERY", 5)
    rng = random.Random(f"{policy} {seed}")
    shards = rng.choice([1, 1, 2])
    more = {"shard_count": shards, "nvme_slots": rng.choice([0, 64]), "slab_slots": 12}
    if rng.random() < 0.3:
        more["tier_pages_max"] = {Tier.HOST: 40, Tier.NVME: 64}
    stores = [make(policy, **more) for _ in range(2)]
    state = rng.getstate()
    for store in stores:
        rng.setstate(state)
        leases = fill(store, rng, shards, nvme=more["nvme_slots"] > 0)
    together, apart = stores
    assert books(together) == books(apart)
    for turn in range(12):
        count = rng.choice([1, 2, 3, 7, 20, 60])
        taken = together.grants.take(HOLDER, RECORD, count, deadline=9.0)
        singly: list[Any] = []
        while len(singly) < count:
            more_refs = apart.grants.take(HOLDER, RECORD, 1, deadline=9.0)
            if not more_refs:
                break
            singly += more_refs
        generations = [ref.generation for ref in taken]
        assert generations == [ref.generation for ref in singly]
        together._counters.busy = apart._counters.busy = 0
        assert books(together) == books(apart), turn
        names = [1000 * (turn + 1) + i for i in range(len(generations))]
        metas = [meta(n, n - 1 if n % 1000 else None) for n in names]
        some = rng.randint(0, len(generations))
        for store in stores:
            columns = PageColumns.of(metas[:some])
            store.grants.seal_many(HOLDER, NS, 0, generations[:some], columns)
            store.grants.give_back(HOLDER, generations[some:])
        if leases and rng.random() < 0.5:
            ended = leases.pop()
            for store in stores:
                store.pins.unpin(1, [ended], now=1.0)
        assert books(together) == books(apart), turn


@pytest.mark.parametrize("seed", range(40))
def test_a_seal_of_many_comes_to_what_as_many_seals_come_to(make, seed: int) -> None:
    """But for when parents were used, which is before all of a call."""
    rng = random.Random(seed)
    stores = [make("lru", nvme_slots=16) for _ in range(2)]
    for store in stores:
        for n in range(0, 12, 3):
            put(store, n)
            demote(store, n)
    begun = [store.watching.start()[0] for store in stores]
    count = rng.randint(1, 30)
    metas = []
    for _ in range(count):
        n, parent, lossy = rng.randrange(24), rng.randrange(-4, 24), rng.random() < 0.3
        plain = meta(n, parent if parent >= 0 else None)
        metas.append(
            PageMeta(
                key=plain.key,
                length=rng.choice([64, 64, 64, 64, 4097]),
                codec=Codec.FP8 if lossy else Codec.RAW,
                payload_sum=rng.randbytes(16),
                origin_sum=rng.randbytes(16),
                lossy=lossy,
                parent=plain.parent,
            )
        )
    takes = [store.grants.take(HOLDER, RECORD, count, deadline=9.0) for store in stores]
    generations = [ref.generation for ref in takes[0]]
    count = len(generations)
    for _ in range(rng.randint(0, 3)):
        generations[rng.randrange(count)] = rng.choice([*generations, 10**9])
    together, apart = stores
    columns = PageColumns.of(metas[:count])
    codes = together.grants.seal_many(HOLDER, NS, 0, generations, columns).tolist()
    singly = [
        int(apart.grants.seal_many(HOLDER, NS, 0, [generation], PageColumns.of([page]))[0])
        for generation, page in zip(generations, metas[:count], strict=True)
    ]
    assert codes == singly
    assert books(together) == books(apart)
    by_page: list[dict[bytes, list[Any]]] = [{}, {}]
    for store, first, found in zip(stores, begun, by_page, strict=True):
        for event in store.watching.since(first, 1000):
            found.setdefault(event.keys, []).append((event.kind, event.tier))
    assert by_page[0] == by_page[1]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(6))
def test_to_evict_is_to_name_and_to_forget(policy: str, seed: int) -> None:
    rng = random.Random(f"{policy} {seed}")
    found: list[list[int]] = []
    state = rng.getstate()
    for turn in range(2):
        rng.setstate(state)
        table = CopyTable(64)
        queue = POLICIES[policy](table, Clock())
        rows = [table.take_row(key(n)) for n in range(50)]
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


@pytest.mark.parametrize("seed", range(20))
def test_an_index_of_many_at_once_equals_a_dict(seed: int) -> None:
    rng = random.Random(seed)
    table = CopyTable(600)
    index = Index(table, seed=rng.getrandbits(64))
    rows: dict[tuple[int, int, int], int] = {}
    numbers = [(n % 3, n % 2, n) for n in range(500)]
    for _ in range(30):
        absent = [name for name in numbers if name not in rows]
        new = rng.sample(absent, min(len(absent), rng.choice([1, 5, 70, 200])))
        for name, row in zip(new, table.take_many(len(new)), strict=True):
            table.set_key(row, key(name[2]))
            table.namespace[row], table.shard[row], table.tier[row] = *name[:2], Tier.HOST
            rows[name] = row
        index.insert_many(np.array([rows[name] for name in new]))
        gone = rng.sample(sorted(rows), rng.randint(0, len(rows)))
        assert index.remove_many([rows[name] for name in gone]) == [True] * len(gone)
        table.give_rows([rows.pop(name) for name in gone])
        for count in (3, 40, 500):
            asked = rng.sample(range(500), count)
            for namespace, shard in ((0, 0), (1, 1), (2, 0)):
                expected = [rows.get((namespace, shard, n), NO_ROW) for n in asked]
                assert index.find_many(namespace, shard, keys(asked)).tolist() == expected
        assert index.pages == len(rows)


def test_a_lower_copy_leaves_an_index_among_others() -> None:
    table = CopyTable(16)
    index = Index(table, seed=5)
    rows = table.take_many(6)
    for at, row in enumerate(rows):
        table.set_key(row, key(at // 3))
        table.tier[row] = (Tier.HOST, Tier.NVME, Tier.SHARED)[at % 3]
        assert index.insert(row) == (at % 3 == 0)
    assert index.remove_many([rows[1], rows[5], rows[3]]) == [False, False, True]
    assert index.copies(index.find(0, 0, key(0))) == [rows[0], rows[2]]
    assert index.copies(index.find(0, 0, key(1))) == [rows[4]]


@pytest.mark.parametrize("seed", range(10))
def test_slots_are_handed_out_and_back_as_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    together, apart = (SlabAllocator(slab_bytes=13 * SLOT_UNIT, numbers=range(5)) for _ in range(2))
    for slab in range(5):
        together.grant(slab)
        apart.grant(slab)
    used: list[int] = []
    for _ in range(40):
        size, count = SLOT_UNIT * rng.choice([2, 2, 3]), rng.randint(0, 9)
        found = together.reserve_many(size, count)
        singly = [apart.reserve(size) for _ in range(count)]
        assert found == [slot for slot in singly if slot is not None]
        used += found
        back = [used.pop(rng.randrange(len(used))) for _ in range(rng.randint(0, len(used)))]
        together.free_many(back)
        for slot in back:
            apart.free(slot)
        assert together.counts() == apart.counts()


def test_generations_in_a_row_are_journalled_before_they_are_used() -> None:
    bounds: list[int] = []
    numbers = Generations(10, bounds.append)
    assert [numbers.next(3), numbers.next(), numbers.next(2)] == [11, 14, 15]
    assert bounds == [10 + 2 + BLOCK]
    assert numbers.next(BLOCK) == 17
    assert numbers.last == 16 + BLOCK <= bounds[-1]
    full = Generations(0, lambda bound: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        full.next(5)
    assert full.last == 0


def test_rows_are_taken_as_one_by_one() -> None:
    together, apart = CopyTable(8), CopyTable(8)
    for table in (together, apart):
        rows = table.take_many(5)
        for row in rows:
            table.set_key(row, key(row))
            table.uses[row] = table.length[row] = 9
        table.give_rows([3, 1])
    assert together.take_many(9) == [apart.take_row(bytes(32)) for _ in range(5)] == [1, 3, 5, 6, 7]
    assert apart.take_row(bytes(32)) == NO_ROW
    assert together.key(3) == bytes(32)
    assert (together.uses[3], together.length[1], together.rows_live) == (0, 0, 8)


def test_an_illegal_event_of_one_row_changes_none() -> None:
    table = CopyTable(4)
    rows = table.take_many(3)
    assert fire_many(table, rows, Event.RESERVE, generations=[5, 6, 7]) == (
        State.FREE,
        State.FILLING,
    )
    fire(table, rows[2], Event.SEAL)
    with pytest.raises(IllegalTransition, match="not all FILLING"):
        fire_many(table, rows, Event.SEAL)
    table.leases[rows[1]] = 1
    with pytest.raises(IllegalTransition, match="with 1 leases"):
        fire_many(table, rows[:2], Event.ABANDON)
    table.leases[rows[1]] = 0
    assert [table.state[row] for row in rows] == [State.FILLING, State.FILLING, State.SEALED]
    fire_many(table, rows[:2], Event.ABANDON)
    with pytest.raises(IllegalTransition, match="not fresh"):
        fire_many(table, rows[:2], Event.RESERVE, generations=[8, 6])
    assert [table.generation[row] for row in rows] == [5, 6, 7]
    assert [table.state[row] for row in rows[:2]] == [State.FREE, State.FREE]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(6))
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
            new = [table.take_row(key(rng.randrange(200))) for _ in range(rng.randint(1, 8))]
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
                table.give_row(row)
    assert found[0] == found[1]
    assert len(found[0]) > 100
