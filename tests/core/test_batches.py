"""What the store does for many pages at once comes to what it does for them one by one.

Of grants that holds while all calls ask for one record size: as many are granted, and the same
pages give way. Which slots the pages lie in is another matter, and when calls ask for several
record sizes that tells later: other slabs can change their size, other pages give way with them,
and a call that finds no room for all can get more or fewer. What holds then too: a call from the
same pages in the same slots comes to what single ones come to, no book is wrong, and what is pinned
or granted stays.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvtier.core.generations import BLOCK, Generations
from kvtier.core.index import Index
from kvtier.core.lifecycle import Event, IllegalTransition, State, fire_many
from kvtier.core.page import Codec, PageMeta, PutCode, Tier
from kvtier.core.page_columns import PageColumns
from kvtier.core.policy import POLICIES
from kvtier.core.slabs import SLOT_UNIT, SlabAllocator
from kvtier.core.store import Store
from kvtier.core.table import NO_ROW, CopyTable
from tests.core.support import NS, RECORD, demote, key, keys, make_store, meta, put
from tests.seeds import seeds

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
@pytest.mark.parametrize("seed", seeds(3, of=12))
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


def in_use(store: Store) -> set[tuple[int, int, int]]:
    """generation, slot and state of each copy that a lease names or that is being filled."""
    table = store._table
    kept = (table.live("leases") != 0) | (table.live("state") == State.FILLING)
    rows = np.flatnonzero(kept).tolist()
    return {(table.generation[row], table.slot[row], table.state[row]) for row in rows}


def places(store: Store) -> tuple[Any, ...]:
    """The slot of each copy by its generation, and what size each slab is cut into."""
    table = store._table
    rows = np.flatnonzero(table.live("state") != State.FREE).tolist()
    slots = {table.generation[row]: (table.tier[row], table.slot[row]) for row in rows}
    return slots, [each.bindings() for each in store._residents.allocators.values()]


def take(store: Store, record: int, count: int, *, at_once: bool) -> list[int]:
    """The generations of up to `count` grants, asked for in one call or in as many."""
    before = in_use(store)
    generations: list[int] = []
    while len(generations) < count:
        asked = count if at_once else 1
        refs = store.grants.take(HOLDER, record, asked, deadline=9.0)
        generations += [ref.generation for ref in refs]
        if len(refs) < asked:
            break
    after = in_use(store)
    assert before <= after
    assert {generation for generation, _, _ in after - before} == set(generations)
    store.survey.check()
    store._listing.check(store)
    return generations


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", seeds(3, of=12))
def test_many_grants_of_several_sizes_leave_what_is_in_use(
    make, monkeypatch: pytest.MonkeyPatch, policy: str, seed: int
) -> None:
    """Some grants stay out from one turn to the next."""
    monkeypatch.setattr("kvtier.core.placement._SLAB_LOOK_EVERY", 5)
    rng = random.Random(f"{policy} {seed}")
    nvme_slots = rng.choice([0, 64])
    stores = [make(policy, nvme_slots=nvme_slots, slab_slots=12) for _ in range(2)]
    state = rng.getstate()
    for store in stores:
        rng.setstate(state)
        leases = fill(store, rng, 1, nvme=nvme_slots > 0)
    held: list[list[int]] = [[], []]
    for turn in range(12):
        record, count = RECORD * rng.choice([1, 1, 2]), rng.choice([1, 2, 3, 7, 20, 60])
        are_alike = places(stores[0]) == places(stores[1])
        assert are_alike or turn
        taken = [take(store, record, count, at_once=store is stores[0]) for store in stores]
        granted = min(map(len, taken))
        if are_alike:
            assert taken[0] == taken[1], turn
            assert sealed(stores[0]) == sealed(stores[1]), turn
        goes_in, stays, ends = rng.randint(0, granted), rng.randint(0, 3), rng.randint(0, 3)
        names, length = range(1000 * (turn + 1), 1000 * (turn + 1) + goes_in), record - SLOT_UNIT
        metas = [replace(meta(n, n - 1 if n % 1000 else None), length=length) for n in names]
        for store, generations, mine in zip(stores, taken, held, strict=True):
            columns = PageColumns.of(metas)
            codes = store.grants.seal_many(HOLDER, NS, 0, generations[:goes_in], columns)
            assert (codes == PutCode.STORED).all()
            mine += generations[goes_in:][:stays]
            store.grants.give_back(HOLDER, generations[goes_in:][stays:] + mine[:ends])
            del mine[:ends]
            store.survey.check()
        if leases and rng.random() < 0.3:
            ended = leases.pop()
            for store in stores:
                store.pins.unpin(1, [ended], now=1.0)


@pytest.mark.parametrize("seed", seeds(8, of=40))
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


@pytest.mark.parametrize("seed", seeds(4, of=20))
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


@pytest.mark.parametrize("seed", seeds(3, of=10))
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
        singly = [slot for _ in range(count) for slot in apart.reserve_many(size, 1)]
        assert found == singly
        used += found
        back = [used.pop(rng.randrange(len(used))) for _ in range(rng.randint(0, len(used)))]
        together.free_many(back)
        for slot in back:
            apart.free_many((slot,))
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
    singly = [apart.take_many(1) for _ in range(6)]
    assert singly == [[1], [3], [5], [6], [7], []]
    assert together.take_many(9) == [1, 3, 5, 6, 7]
    assert together.key(3) == bytes(32)
    assert (together.uses[3], together.length[1], together.rows_live) == (0, 0, 8)


def test_an_illegal_event_of_one_row_changes_none() -> None:
    table = CopyTable(4)
    rows = table.take_many(3)
    assert fire_many(table, rows, Event.RESERVE, generations=[5, 6, 7]) == (
        State.FREE,
        State.FILLING,
    )
    fire_many(table, rows[2:], Event.SEAL)
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
