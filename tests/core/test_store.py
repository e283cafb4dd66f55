"""The store through its public methods: put races, eviction order, leases, deletion, bumps,
shards."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvtier.core.handles import Filling, Reading
from kvtier.core.ledger import LedgerError
from kvtier.core.movement import Movement
from kvtier.core.page import DeleteCode, GetCode, LeaseCode, PageRef, PutCode, Tier
from tests.core.support import NS, RECORD, demote, key, keys, make_store, meta, present, put


def fill(store, n, parent=None, **more):
    outcome = store.reserve(NS, 0, meta(n, parent), more.get("record", RECORD))
    assert isinstance(outcome, Filling)
    return outcome


def test_a_page_is_found_only_once_it_is_sealed() -> None:
    store = make_store()
    filling = fill(store, 1)
    assert present(store, [1]) == []
    assert filling.seal() is PutCode.STORED
    assert present(store, [1]) == [1]
    store.survey.check()


def test_the_first_seal_of_a_key_wins_and_the_others_learn_it() -> None:
    store = make_store()
    fillings = [fill(store, 1) for _ in range(5)]
    codes = [filling.seal() for filling in reversed(fillings)]
    assert codes == [PutCode.STORED] + [PutCode.EXISTS] * 4
    assert put(store, 1) is PutCode.EXISTS
    assert store.status()[Tier.HOST].sealed == 1
    store.survey.check()


def test_leaving_the_block_without_seal_gives_the_slot_back() -> None:
    store = make_store(slots=1)
    with pytest.raises(RuntimeError, match="writer died"), fill(store, 1):
        raise RuntimeError("writer died")
    assert store.status()[Tier.HOST].used_bytes == 0
    assert put(store, 2) is PutCode.STORED
    store.survey.check()


def test_generations_rise_and_old_refs_are_dead() -> None:
    store = make_store(slots=1)
    refs = []
    for n in range(4):
        filling = fill(store, n)
        refs.append(filling.ref)
        assert filling.seal() is PutCode.STORED
    assert [r.slot for r in refs] == [0] * 4
    assert sorted({r.generation for r in refs}) == [r.generation for r in refs]
    assert store.condemn(refs[0]) is False
    other_boot = PageRef(98, Tier.HOST, refs[3].slot, refs[3].generation)
    assert store.condemn(other_boot) is False
    assert store.condemn(refs[3]) is True
    assert present(store, [3]) == []


def test_a_late_commit_of_a_slot_that_was_taken_away_is_stale() -> None:
    store = make_store()
    late = fill(store, 1)
    filling = Filling(store, row=late.row, ref=late.ref, namespace=NS, meta=late.meta)
    late.orphan()
    assert filling.seal() is PutCode.STALE_GENERATION
    assert store.status()[Tier.HOST].quarantined == 1
    assert present(store, [1]) == []
    store.survey.check()


def test_leases_end_by_deadline_by_hand_and_with_their_session() -> None:
    store = make_store()
    put(store, 1)
    pin = store.pins.pin
    lease, _ = pin(7, NS, 0, keys([1]), deadline=10.0)
    assert store.pins.renew(7, [lease], deadline=20.0, now=9.0) == [LeaseCode.HELD]
    assert store.pins.renew(8, [lease], deadline=20.0, now=9.0) == [LeaseCode.UNKNOWN]
    assert store.pins.expire(19.9) == 0
    assert store.pins.expire(20.0) == 1
    assert store.pins.renew(7, [lease], deadline=30.0, now=21.0) == [LeaseCode.EXPIRED]
    assert store.pins.unpin(7, [lease], now=21.0) == [LeaseCode.EXPIRED]

    second, _ = pin(7, NS, 0, keys([1]), deadline=40.0)
    assert store.pins.unpin(7, [second, second], now=22.0) == [
        LeaseCode.RELEASED,
        LeaseCode.UNKNOWN,
    ]
    pin(7, NS, 0, keys([1]), deadline=40.0)
    pin(8, NS, 0, keys([1]), deadline=40.0)
    assert store.pins.end_session(7) == 1
    assert store.status()[Tier.HOST].pinned == 1
    assert store.pins.end_session(8) == 1
    assert store.status()[Tier.HOST].pinned == 0
    assert store.pins.count() == 0
    assert pin(7, NS, 0, keys([404]), deadline=50.0)[0] == 0


def test_ten_thousand_pins_of_every_outcome_leave_nothing_pinned() -> None:
    store = make_store(slots=4)
    for n in range(4):
        put(store, n)
    for i in range(10_000):
        lease, _ = store.pins.pin(i % 3, NS, 0, keys([i % 6]), deadline=i + 5.0)
        if i % 4 == 0:
            store.pins.unpin(i % 3, [lease, lease], now=float(i))
        elif i % 4 == 1:
            store.pins.end_session(i % 3)
        else:
            store.pins.expire(float(i))
    store.pins.expire(1e9)
    assert store.status()[Tier.HOST].pinned == 0
    for n in range(10, 14):
        assert put(store, n) is PutCode.STORED
    assert present(store, range(10, 14)) == [10, 11, 12, 13]
    store.survey.check()


def test_a_deleted_page_is_a_miss_at_once_and_its_slot_waits_for_the_reader() -> None:
    store = make_store(slots=1)
    put(store, 1)
    (reading,) = store.acquire(NS, 0, keys([1]))
    assert isinstance(reading, Reading)
    assert store.delete(NS, 0, keys([1, 2])).tolist() == [DeleteCode.DELETED, DeleteCode.ABSENT]
    assert present(store, [1]) == []
    assert put(store, 2) is PutCode.BUSY
    assert store.status()[Tier.HOST].retiring == 1
    reading.release()
    assert put(store, 2) is PutCode.STORED
    store.survey.check()


def test_a_bump_makes_everything_stale_at_once_and_sweep_frees_it() -> None:
    store = make_store(slots=8)
    for n in range(6):
        put(store, n, n - 1 if n else None)
    filling = fill(store, 50)
    store.end_namespace(NS)
    codes, _ = store.lookup(NS, 0, keys(range(6)))
    assert codes.tolist() == [GetCode.STALE] * 6
    assert store.acquire(NS, 0, keys([0])) == [GetCode.STALE]
    assert store.delete(NS, 0, keys([0])).tolist() == [DeleteCode.STALE]
    assert put(store, 60) is PutCode.STALE_GENERATION
    assert filling.seal() is PutCode.STALE_GENERATION
    assert store.sweep(4) == 4
    assert store.sweep(4) == 2
    assert store.sweep(4) == 0
    assert store.status()[Tier.HOST].used_bytes == 0
    store.survey.check()


def test_a_copy_in_two_tiers_survives_the_loss_of_either() -> None:
    store = make_store(slots=2, nvme_slots=4)
    put(store, 1)
    (source,) = store.acquire(NS, 0, keys([1]))
    target = store.reserve(NS, 0, meta(1), RECORD, tier=Tier.NVME, source=source)
    assert isinstance(source, Reading)
    assert isinstance(target, Filling)
    assert put(store, 1) is PutCode.EXISTS
    moving = Movement(source, target)
    moving.copied()
    moving.verified()
    assert moving.publish() is PutCode.STORED
    _, tiers = store.lookup(NS, 0, keys([1]))
    assert tiers.tolist() == [Tier.HOST]
    assert store.condemn(source.ref) is True
    _, tiers = store.lookup(NS, 0, keys([1]))
    assert tiers.tolist() == [Tier.NVME]
    assert put(store, 1) is PutCode.EXISTS
    assert put(store, 1, tier=Tier.NVME) is PutCode.EXISTS
    store.survey.check()


def test_a_bad_copy_leads_to_the_next_tier() -> None:
    store = make_store(slots=2, nvme_slots=2)
    put(store, 1)
    assert demote(store, 1) is PutCode.STORED
    (reading,) = store.acquire(NS, 0, keys([1]))
    assert isinstance(reading, Reading)
    following = store.acquire_next(reading.ref, NS, 0, key(1))
    assert isinstance(following, Reading)
    assert (reading.ref.tier, following.ref.tier) == (Tier.HOST, Tier.NVME)
    store.condemn(following.ref)
    assert store.acquire_next(reading.ref, NS, 0, key(1)) is GetCode.MISS


def test_a_failing_generation_journal_leaks_nothing() -> None:
    store = make_store(slots=1)

    def broken(bound: int) -> None:
        raise OSError("disk gone")

    generations = store._residents._generations
    generations._journal = broken
    generations._bound = generations._last
    with pytest.raises(OSError, match="disk gone"):
        put(store, 1)
    store.survey.check()
    generations._journal = lambda bound: None
    assert put(store, 1) is PutCode.STORED


def test_nothing_fits_before_a_slab_is_granted() -> None:
    store = make_store(slots=4, granted=False)
    assert put(store, 1) is PutCode.BUSY
    store.room.grant(Tier.HOST, 0)
    assert put(store, 1) is PutCode.STORED
    store.survey.check()


def test_watchers_see_a_snapshot_and_then_every_change_in_order() -> None:
    store = make_store(slots=2)
    put(store, 1)
    sequence, snapshot = store.watching.start()
    assert [(e.kind.name, e.tier, e.keys) for e in snapshot] == [("SNAPSHOT", Tier.HOST, key(1))]
    put(store, 2)
    put(store, 3)
    events = store.watching.since(sequence, 100)
    assert [(e.kind.name, e.keys) for e in events] == [
        ("STORED", key(2)),
        ("REMOVED", key(1)),
        ("STORED", key(3)),
    ]
    assert [e.sequence for e in events] == [sequence + 1, sequence + 2, sequence + 3]
    store.watching.stop()


def test_check_finds_a_leaked_slot() -> None:
    store = make_store(slots=4)
    put(store, 1)
    store._residents.allocators[Tier.HOST].reserve_many(RECORD, 1)  # nobody's
    with pytest.raises(LedgerError, match="slots of 16384 bytes are taken, pages hold 8192"):
        store.survey.check()


def test_threads_putting_getting_and_deleting_the_same_keys() -> None:
    store = make_store(slots=8)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(300):
                n = int(rng.integers(0, 12))
                match int(rng.integers(0, 4)):
                    case 0:
                        put(store, n)
                    case 1:
                        for outcome in store.acquire(NS, 0, keys([n, n])):
                            if isinstance(outcome, Reading):
                                outcome.release()
                    case 2:
                        store.delete(NS, 0, keys([n]))
                    case _:
                        lease, _ = store.pins.pin(seed, NS, 0, keys([n]), deadline=1.0)
                        store.pins.unpin(seed, [lease], now=0.0)
        except (AssertionError, KeyError, IndexError) as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    store.survey.check()
    assert store.status()[Tier.HOST].pinned == 0
