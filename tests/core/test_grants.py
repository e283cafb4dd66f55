"""Slots granted ahead of time: who gets how many, what gives way, and when a slot is free again."""

from __future__ import annotations

import pytest

from kvtier.core.generations import Generations
from kvtier.core.handles import Filling, Reading
from kvtier.core.ledger import LedgerError
from kvtier.core.page import PageRef, PutCode, Tier
from kvtier.core.slabs import SlabAllocator
from kvtier.core.store import Store
from kvtier.core.store_config import StoreConfig
from tests.core.grant_support import (
    STALE,
    STORED,
    A,
    B,
    counts,
    held,
    seal,
    store_of,
    take,
    totals,
)
from tests.core.support import NS, RECORD, keys, make_store, meta, present, put


def test_refs_are_for_the_holder_alone_and_while_it_may_write() -> None:
    store = store_of()
    refs = store.grants.take(A, RECORD, 2, deadline=10.0)
    generations = [ref.generation for ref in refs]
    assert store.grants.refs(A, [*generations, 12345]) == [*refs, None]
    assert store.grants.refs(B, generations) == [None, None]
    store.grants.give_back(A, generations[:1])
    assert store.grants.refs(A, generations) == [None, refs[1]]
    assert store.grants.expire(10.0) == 1
    assert store.grants.refs(A, generations) == [None, None]


# -- how many -------------------------------------------------------------------------------------


def test_a_holder_has_its_share_of_the_arena() -> None:
    store = make_store(slots=200)  # the defaults: 2 % are four slots
    first = take(store, A, 3)
    second = take(store, A, 9)
    assert (len(first), len(second)) == (3, 1)
    assert take(store, A, 1) == []
    assert len(take(store, B, 9)) == 4
    assert store.grants.give_back(A, first[:2]) == 2
    assert len(take(store, A, 9)) == 2
    assert seal(store, A, second, [meta(1)]) == [STORED]
    assert len(take(store, A, 9)) == 1
    assert store.counters().busy == 0


def test_what_has_expired_counts_as_the_holders() -> None:
    store = store_of(100, grants_share=0.04)
    take(store, A, 3, deadline=1.0)
    assert store.grants.expire(1.0) == 3
    assert len(take(store, A, 9)) == 1
    assert len(take(store, B, 9)) == 4


def test_a_holder_of_nothing_gets_one_record_however_small_the_arena() -> None:
    store = make_store(slots=8)  # 2 % are less than a page
    (generation,) = take(store, A, 5)
    assert take(store, A, 5) == []
    assert len(take(store, B, 5)) == 1
    assert seal(store, A, [generation], [meta(0)]) == [STORED]
    assert len(take(store, A, 5)) == 1


def test_quarantine_has_a_cap_past_which_nobody_is_granted_anything() -> None:
    store = store_of(40, quarantine_share=0.05)  # two slots
    late = take(store, A, 1, deadline=1.0)
    store.grants.expire(1.0)
    take(store, B, 1)
    orphan = store.reserve(NS, 0, meta(50), RECORD)
    assert isinstance(orphan, Filling)
    orphan.orphan()  # of another way in: its writer may still write, too
    assert take(store, B, 1) == []
    assert take(store, 13, 1) == []
    assert store.settle_orphan(orphan.ref)
    assert len(take(store, 13, 1)) == 1
    take(store, A, 1, deadline=2.0)
    store.grants.expire(2.0)
    assert take(store, B, 1) == []
    assert store.grants.give_back(A, late) == 1
    assert len(take(store, B, 1)) == 1
    assert store.counters().busy == 0


def test_condemned_pages_do_not_count_as_writers_that_did_not_stop() -> None:
    store = store_of(40, quarantine_share=0.05)
    for n in range(2):
        put(store, n)
        (reading,) = store.acquire(NS, 0, keys([n]))
        assert isinstance(reading, Reading)
        reading.release()
        assert store.condemn(reading.ref)
    assert counts(store) == (38, 0, 0, 0, 2)
    assert len(take(store, A, 2)) == 2


def test_nothing_is_granted_for_nothing_and_sizes_must_fit() -> None:
    store = store_of()
    assert take(store, A, 0) == []
    assert take(store, A, -1) == []
    for size in (0, -4096, 5000, RECORD * 17):
        with pytest.raises(ValueError, match=f"no slot has {size} bytes"):
            store.grants.take(A, size, 1, deadline=1.0)
    assert counts(store) == (16, 0, 0, 0, 0)
    assert totals(store) == (0, 0, 0, 0)


def test_a_full_table_grants_nothing_and_leaks_nothing() -> None:
    store = make_store(slots=8, pages_max=2, grants_share=1.0)
    assert len(take(store, A, 5)) == 2
    assert take(store, A, 5) == []
    assert store.counters().busy == 1
    assert counts(store) == (6, 2, 0, 0, 0)


def test_a_take_that_fails_grants_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of()
    take(store, A, 2, deadline=5.0)

    def next_number(count: int) -> int:
        raise OSError("the journal is full")

    monkeypatch.setattr(store._generations, "next", next_number)
    with pytest.raises(OSError, match="the journal is full"):
        take(store, A, 3, deadline=5.0)
    assert counts(store) == (14, 2, 0, 0, 0)
    assert held(store) == (2, 2, 0)
    assert store.grants.expire(5.0) == 2
    assert store.grants.settle(A) == 2
    assert counts(store) == (16, 0, 0, 0, 0)


def test_a_bound_of_pages_holds_for_grants() -> None:
    store = make_store(slots=8, tier_pages_max={Tier.HOST: 3}, grants_share=1.0)
    put(store, 0)
    assert len(take(store, A, 5)) == 3
    assert present(store, [0]) == []
    assert counts(store) == (5, 3, 0, 0, 0)


# -- under pressure -------------------------------------------------------------------------------


def test_grants_evict_the_coldest_and_are_never_evicted() -> None:
    store = store_of(8)
    for n in range(8):
        put(store, n)
    generations = take(store, A, 3)
    assert present(store, range(8)) == [3, 4, 5, 6, 7]
    for n in range(100, 120):
        assert put(store, n) is PutCode.STORED
    assert counts(store) == (0, 3, 5, 0, 0)
    store.grants.expire(99.0)
    for n in range(200, 220):
        assert put(store, n) is PutCode.STORED
    assert counts(store) == (0, 0, 5, 0, 3)
    assert seal(store, A, generations, [meta(n) for n in range(3)]) == [STALE] * 3
    assert counts(store) == (3, 0, 5, 0, 0)


def test_a_slab_with_a_grant_is_not_given_to_another_size() -> None:
    store = store_of(4, slab_slots=2)
    for n in range(4):
        put(store, n)
    (ref,) = store.grants.take(A, RECORD, 1, deadline=1.0)
    assert put(store, 10, record=2 * RECORD) is PutCode.STORED  # the other slab has been emptied
    assert put(store, 11, record=2 * RECORD) is PutCode.STORED
    assert store.grants.refs(A, [ref.generation]) == [ref]
    assert seal(store, A, [ref.generation], [meta(20)]) == [STORED]


def test_a_take_in_a_full_tier_gets_what_can_give_way_and_busy_is_counted() -> None:
    store = store_of(4, grants_share=1.0)
    for n in range(4):
        put(store, n)
    store.pins.pin(1, NS, 0, keys([0, 1]), deadline=9.0)
    assert len(take(store, A, 4)) == 2
    assert store.counters().busy == 0
    assert take(store, A, 1) == []
    assert take(store, B, 1) == []
    assert store.counters().busy == 2
    assert put(store, 9) is PutCode.BUSY
    assert counts(store) == (0, 2, 2, 0, 0)


def test_a_parent_that_is_gone_on_from_counts_as_used() -> None:
    store = store_of(4)
    for n in range(4):
        put(store, n)
    (generation,) = take(store, A, 1)  # page 0 has given way
    assert seal(store, A, [generation], [meta(10, 1)]) == [STORED]
    put(store, 11)
    assert present(store, [1, 2, 3, 10, 11]) == [1, 3, 10, 11]


def test_the_tail_of_a_sealed_chain_goes_before_its_head() -> None:
    store = store_of(8, grants_share=1.0)
    pages = [meta(n, n - 1 if n else None) for n in range(8)]
    assert seal(store, A, take(store, A, 8), pages) == [STORED] * 8
    for n in range(10, 13):
        put(store, n)
    assert present(store, range(8)) == [0, 1, 2, 3, 4]


# -- how grants end -------------------------------------------------------------------------------


def test_a_grant_past_its_deadline_is_quarantined_until_its_holder_names_it() -> None:
    store = store_of()
    first = take(store, A, 2, deadline=5.0)
    second = take(store, A, 1, deadline=4.0)
    assert store.grants.expire(3.9) == 0
    assert store.grants.expire(4.0) == 1
    assert counts(store) == (13, 2, 0, 0, 1)
    assert store.grants.expire(100.0) == 2
    assert store.grants.expire(101.0) == 0
    assert held(store) == (0, 0, 3)
    assert seal(store, B, first[:1], [meta(0)]) == [STALE]
    assert counts(store) == (13, 0, 0, 0, 3)
    assert seal(store, A, [first[0], *second], [meta(0), meta(1)]) == [STALE, STALE]
    assert counts(store) == (15, 0, 0, 0, 1)
    assert store.grants.give_back(A, first) == 1
    assert store.grants.give_back(A, first) == 0
    assert counts(store) == (16, 0, 0, 0, 0)
    assert totals(store) == (0, 0, 3, 0)


def test_a_deadline_is_nothing_to_what_has_ended_before() -> None:
    store = store_of()
    sealed, returned, kept = take(store, A, 3, deadline=5.0)
    seal(store, A, [sealed], [meta(0)])
    store.grants.give_back(A, [returned])
    later = take(store, A, 2, deadline=50.0)
    assert store.grants.expire(6.0) == 1
    assert store.grants.refs(A, [kept]) == [None]
    assert None not in store.grants.refs(A, later)
    assert counts(store) == (12, 2, 1, 0, 1)


def test_a_lost_connection_is_no_proof_that_the_writer_stopped() -> None:
    store = store_of()
    late = take(store, A, 1, deadline=1.0)
    store.grants.expire(1.0)
    generations = take(store, A, 3)
    others = take(store, B, 2)
    assert store.grants.end(A) == 4
    assert store.grants.end(A) == 4
    assert counts(store) == (10, 2, 0, 0, 4)
    assert held(store) == (2, 2, 4)
    assert store.grants.give_back(B, [*generations, *late]) == 0
    assert seal(store, B, generations, [meta(n) for n in range(3)]) == [STALE] * 3
    assert counts(store) == (10, 2, 0, 0, 4)
    assert store.grants.expire(99.0) == 2  # the other's alone
    assert store.grants.settle(A) == 4
    assert store.grants.settle(A) == 0
    assert counts(store) == (14, 0, 0, 0, 2)
    assert store.grants.give_back(B, others) == 2
    assert store.grants.end(13) == store.grants.settle(13) == 0


def test_the_end_of_a_process_frees_what_it_was_writing() -> None:
    store = store_of()
    take(store, A, 2)
    assert store.grants.settle(A) == 2
    assert counts(store) == (16, 0, 0, 0, 0)
    assert held(store) == (0, 0, 0)
    assert store.grants.expire(99.0) == 0


def test_a_slot_in_quarantine_is_not_handed_out_again() -> None:
    store = store_of(4, grants_share=1.0, quarantine_share=1.0)
    refs: list[PageRef] = store.grants.take(A, RECORD, 3, deadline=1.0)
    store.grants.end(A)
    kept = {ref.slot for ref in refs}
    for n in range(20):
        outcome = store.reserve(NS, 0, meta(n), RECORD)
        assert isinstance(outcome, Filling)
        assert outcome.ref.slot not in kept
        outcome.seal()
    assert counts(store) == (0, 0, 1, 0, 3)
    store.grants.settle(A)
    again = {ref.slot for ref in store.grants.take(B, RECORD, 3, deadline=1.0)}
    assert again == kept


def test_nobody_else_settles_or_clears_a_grant() -> None:
    store = store_of()
    refs = store.grants.take(A, RECORD, 2, deadline=1.0)
    store.grants.end(A)
    assert [store.settle_orphan(ref) for ref in refs] == [False, False]
    assert store.survey.clear_quarantine(None) == 0
    assert store.survey.clear_quarantine(refs) == 0
    assert store.survey.quarantined() == []
    assert store.survey.hold_quarantined(refs[0]) is None
    assert not store.condemn(refs[0])
    assert counts(store) == (14, 0, 0, 0, 2)


def test_a_snapshot_does_not_show_what_has_no_name() -> None:
    store = store_of()
    put(store, 0)
    (generation,) = take(store, A, 1)
    take(store, B, 1, deadline=1.0)
    store.grants.expire(1.0)
    image = store.snapshots.take(Tier.HOST)
    assert (len(image.copies()), image.in_flight) == (1, ())
    assert image.last_generation >= generation
    assert store.survey.pages_by_namespace() == {NS: 1}


def test_the_books_of_grants_are_checked() -> None:
    """A check that cannot fail is none."""
    store = store_of()
    (generation,) = take(store, A, 1)
    row = store.grants._held[A].rows[generation]
    store._residents.abandon(row)
    with pytest.raises(LedgerError, match="is FREE"):
        store.survey.check()
    put(store, 0)
    with pytest.raises(LedgerError, match="another page's row"):
        store.survey.check()


def test_a_store_without_host_memory_grants_nothing() -> None:
    store = Store(
        StoreConfig(boot_id=1, pages_max=4, seed=1),
        tiers={Tier.NVME: SlabAllocator(slab_bytes=RECORD, numbers=range(1))},
        generations=Generations(0, lambda bound: None),
    )
    assert store.grants.take(A, RECORD, 1, deadline=1.0) == []
