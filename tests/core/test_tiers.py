"""Two tiers in one store: moves, what a snapshot holds, slabs that go, chains that meet late."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtier.core.handles import Filling, Reading
from kvtier.core.page import DeleteCode, GetCode, PageRef, PutCode, Tier
from kvtier.core.store import Store
from tests.core.support import (
    NS,
    RECORD,
    begin_move,
    demote,
    key,
    keys,
    make_store,
    meta,
    present,
    put,
)


def tiers_of(store: Store, n: int) -> list[Tier]:
    array = keys([n])
    return [t for t in (Tier.HOST, Tier.NVME) if store.survey.in_tier(NS, 0, array, t)[0]]


# -- moves ----------------------------------------------------------------------------------------


def test_a_move_of_a_page_deleted_meanwhile_is_not_published() -> None:
    store = make_store(slots=2, nvme_slots=2)
    put(store, 1)
    source, target = begin_move(store, 1)
    assert store.delete(NS, 0, keys([1])).tolist() == [DeleteCode.DELETED]
    assert target.seal() is PutCode.STALE_GENERATION
    source.release()
    assert present(store, [1]) == []
    assert store.status()[Tier.NVME].used_bytes == store.status()[Tier.HOST].used_bytes == 0
    store.survey.check()


def test_a_move_of_a_page_deleted_and_put_again_is_not_published() -> None:
    """The key is there again, but it is not the page that was copied."""
    store = make_store(slots=2, nvme_slots=2)
    put(store, 1)
    source, target = begin_move(store, 1)
    store.delete(NS, 0, keys([1]))
    assert put(store, 1) is PutCode.STORED
    assert target.seal() is PutCode.STALE_GENERATION
    source.release()
    assert tiers_of(store, 1) == [Tier.HOST]
    store.survey.check()


def test_a_move_of_a_condemned_or_bumped_page_is_not_published() -> None:
    store = make_store(slots=2, nvme_slots=2)
    put(store, 1)
    source, target = begin_move(store, 1)
    assert store.condemn(source.ref)
    assert target.seal() is PutCode.STALE_GENERATION
    source.release()
    put(store, 2)
    source, target = begin_move(store, 2)
    store.end_namespace(NS)
    assert target.seal() is PutCode.STALE_GENERATION
    source.release()
    store.survey.check()


def test_of_two_moves_of_a_page_one_wins() -> None:
    store = make_store(slots=2, nvme_slots=2)
    put(store, 1)
    first, one = begin_move(store, 1)
    second, other = begin_move(store, 1)
    assert (other.seal(), one.seal()) == (PutCode.STORED, PutCode.EXISTS)
    first.release()
    second.release()
    assert tiers_of(store, 1) == [Tier.HOST, Tier.NVME]
    store.survey.check()


def test_a_promoted_page_keeps_its_lower_copy_and_both_are_used() -> None:
    store = make_store(slots=1, nvme_slots=2)
    put(store, 1)
    assert demote(store, 1) is PutCode.STORED
    put(store, 2)  # takes the place of 1 in host memory
    assert demote(store, 2) is PutCode.STORED
    assert tiers_of(store, 1) == [Tier.NVME]
    assert put(store, 1) is PutCode.EXISTS, "a put is no move: the page is there"
    source, target = begin_move(store, 1, Tier.HOST)
    assert target.seal() is PutCode.STORED
    source.release()
    assert tiers_of(store, 1) == [Tier.HOST, Tier.NVME]
    # Used last in both tiers, so the other one gives way below too.
    (reading,) = store.acquire(NS, 0, keys([1]))
    assert isinstance(reading, Reading)
    reading.release()
    put(store, 3)
    assert demote(store, 3) is PutCode.STORED
    assert tiers_of(store, 2) == []
    assert tiers_of(store, 1) == [Tier.NVME]
    counters = store.counters()
    assert (counters.evicted, counters.evicted_last) == (4, 1)
    store.survey.check()


def test_an_abandoned_and_an_orphaned_move_leave_the_source_alone() -> None:
    store = make_store(slots=2, nvme_slots=2)
    put(store, 1)
    source, target = begin_move(store, 1)
    target.abandon()
    again, second = begin_move(store, 1)
    second.orphan()
    source.release()
    again.release()
    assert store.status()[Tier.NVME].quarantined == 1
    assert store.settle_orphan(second.ref)
    assert store.status()[Tier.NVME].used_bytes == 0
    assert demote(store, 1) is PutCode.STORED
    store.survey.check()


# -- chains ---------------------------------------------------------------------------------------


def test_a_page_stored_before_its_parent_is_linked_when_that_comes() -> None:
    store = make_store(slots=3)
    put(store, 2, parent=1)
    put(store, 3, parent=2)
    put(store, 1)
    put(store, 4)
    assert present(store, [1, 2, 3, 4]) == [1, 2, 4], "the tail has to go first"
    put(store, 5)
    assert present(store, [1, 2, 4, 5]) == [1, 4, 5]
    store.survey.check()


def test_a_tail_copied_down_before_its_head_is_linked_there_too() -> None:
    store = make_store(slots=4, nvme_slots=3)
    put(store, 1)
    put(store, 2, parent=1)
    put(store, 3, parent=2)
    for n, parent in ((3, 2), (2, 1), (1, None)):
        assert demote(store, n, parent) is PutCode.STORED
    put(store, 4)
    assert demote(store, 4) is PutCode.STORED
    array = keys([1, 2, 3, 4])
    assert store.survey.in_tier(NS, 0, array, Tier.NVME).tolist() == [True, True, False, True]
    store.survey.check()


def test_pages_that_name_each_other_as_parents_make_no_ring() -> None:
    """Any client can say so; nobody may be kept waiting, and every page can still give way."""
    store = make_store(slots=6, slab_slots=3)
    put(store, 1, parent=2)
    put(store, 2, parent=3)
    put(store, 3, parent=1)
    put(store, 4, parent=4)
    put(store, 5, parent=6)
    put(store, 6, parent=5)
    store.survey.check()
    put(store, 7, parent=7)
    put(store, 7, parent=7)
    for n in range(10, 16):
        assert put(store, n) is PutCode.STORED
    assert present(store, range(1, 8)) == [], "each of them could give way"
    assert put(store, 20, record=2 * RECORD) is PutCode.STORED, "a look at all chains ends"
    store.survey.check()


def test_a_page_in_place_of_a_lossy_one_makes_no_ring_with_what_came_after_it() -> None:
    store = make_store(slots=4)
    lossy = replace(meta(1), lossy=True)
    first = store.reserve(NS, 0, lossy, RECORD)
    assert isinstance(first, Filling)
    assert first.seal() is PutCode.STORED
    put(store, 2, parent=1)
    put(store, 3, parent=2)
    assert put(store, 1, parent=3) is PutCode.STORED
    store.survey.check()
    for n in range(10, 14):
        assert put(store, n) is PutCode.STORED


def test_what_waits_for_a_parent_and_goes_is_not_linked() -> None:
    store = make_store(slots=3)
    put(store, 2, parent=1)
    store.delete(NS, 0, keys([2]))
    put(store, 7)  # takes the row of 2
    put(store, 1)
    store.survey.check()
    put(store, 2, parent=1)
    put(store, 8)
    assert present(store, [1, 2, 7, 8]) == [1, 2, 8]
    store.survey.check()


# -- slabs ----------------------------------------------------------------------------------------


def test_a_withdrawn_slab_takes_its_pages_and_comes_back_empty() -> None:
    store = make_store(slots=4, nvme_slots=4)
    for n in (1, 2, 3):
        put(store, n)
        demote(store, n)
    (reading,) = store.acquire(NS, 0, keys([1]))
    assert isinstance(reading, Reading)
    lower = store.acquire_next(reading.ref, NS, 0, key(1))
    assert isinstance(lower, Reading)
    _, filling = begin_move_of_new(store, 4)
    assert store.room.withdraw(Tier.NVME, 0) == 3
    assert store.room.withdraw(Tier.NVME, 0) == 0
    assert not store.survey.in_tier(NS, 0, keys([1, 2, 3]), Tier.NVME).any()
    assert present(store, [1, 2, 3]) == [1, 2, 3], "host memory is another tier"
    store.survey.check()
    assert not store.room.can_grant(Tier.NVME, 0), "a lease and a filling still name it"
    assert demote(store, 2) is PutCode.BUSY
    lower.release()
    filling.abandon()
    assert store.room.can_grant(Tier.NVME, 0)
    store.room.grant(Tier.NVME, 0)
    assert demote(store, 2) is PutCode.STORED
    reading.release()
    store.survey.check()


@pytest.mark.parametrize("granted_pages", [0, 2])
def test_a_frozen_slab_keeps_its_pages_and_takes_none(granted_pages: int) -> None:
    store = make_store(slots=6, nvme_slots=3)
    for n in range(granted_pages):
        put(store, n)
        demote(store, n)
    store.room.freeze(Tier.NVME, [0])
    store.room.freeze(Tier.NVME, [0])
    store.survey.check()
    assert not store.room.has_free(Tier.NVME, RECORD)
    put(store, 5)
    for _ in range(3):
        assert demote(store, 5) is PutCode.BUSY
    wanted = list(range(granted_pages))
    assert store.survey.in_tier(NS, 0, keys(range(2)), Tier.NVME).sum() == granted_pages
    # What is deleted there makes no room either, until it is thawed.
    if granted_pages:
        store.delete(NS, 0, keys([0]))
        assert demote(store, 5) is PutCode.BUSY
        wanted.remove(0)
    store.survey.check()
    store.room.thaw(Tier.NVME, [0])
    store.survey.check()
    for n in range(5, 9):  # the last of them takes the place of the coldest
        put(store, n)
        assert demote(store, n) is PutCode.STORED
    assert store.status()[Tier.NVME].sealed == 3
    assert not store.survey.in_tier(NS, 0, keys(wanted), Tier.NVME).any()
    store.survey.check()


def test_a_frozen_slab_can_be_withdrawn() -> None:
    store = make_store(slots=4, nvme_slots=3)
    put(store, 1)
    demote(store, 1)
    store.room.freeze(Tier.NVME, [0])
    assert store.room.withdraw(Tier.NVME, 0) == 1
    store.survey.check()
    store.room.grant(Tier.NVME, 0)
    assert demote(store, 1) is PutCode.STORED
    store.survey.check()


def begin_move_of_new(store: Store, n: int) -> tuple[Reading, Filling]:
    put(store, n)
    source, target = begin_move(store, n)
    source.release()
    return source, target


def test_room_is_known_before_it_is_asked_for() -> None:
    store = make_store(slots=2, nvme_slots=1, granted=False)
    assert not store.room.has_free(Tier.NVME, RECORD)
    store.room.grant(Tier.HOST, 0)
    store.room.grant(Tier.NVME, 0)
    assert store.room.has_free(Tier.NVME, RECORD)
    put(store, 1)
    demote(store, 1)
    assert not store.room.has_free(Tier.NVME, RECORD)


# -- what the cleaner sees ------------------------------------------------------------------------


def test_the_coldest_uncopied_pages_are_named_coldest_first() -> None:
    store = make_store(slots=8, nvme_slots=8)
    for n in range(1, 7):
        put(store, n)
    demote(store, 2)
    (reading,) = store.acquire(NS, 0, keys([1]))
    assert isinstance(reading, Reading)
    reading.release()

    def named(**how: int) -> list[bytes]:
        options = {"coldest_bytes": 1 << 40, "uses_min": 0, "rows_max": 100} | how
        rows = store.survey.uncopied_rows(Tier.HOST, **options).tolist()
        found = [store.survey.acquire_row(row) for row in rows]
        for one in found:
            assert one is not None
            one[0].release()
        return [one[3] for one in found if one is not None]

    assert named() == [key(n) for n in (3, 4, 5, 6, 1)]
    assert named(coldest_bytes=3 * RECORD) == [key(3), key(4)], "2 is cold too, and copied"
    assert named(rows_max=2) == [key(3), key(4)]
    assert named(uses_min=1) == [key(1)]
    assert named(coldest_bytes=0) == []


# -- quarantine -----------------------------------------------------------------------------------


def test_condemned_copies_can_be_looked_at_and_cleared() -> None:
    store = make_store(slots=40, nvme_slots=40)
    for n in (1, 2, 3):
        put(store, n)
    refs = []
    for n in (1, 2):
        (reading,) = store.acquire(NS, 0, keys([n]))
        assert isinstance(reading, Reading)
        refs.append(reading.ref)
        reading.release()
        assert store.condemn(reading.ref)
    listed = store.survey.quarantined()
    assert [(ref, name, length) for ref, _, _, name, length, *_ in listed] == [
        (refs[0], key(1), 64),
        (refs[1], key(2), 64),
    ]
    held = store.survey.hold_quarantined(refs[0])
    assert held is not None
    assert store.survey.clear_quarantine(None) == 1, "the other one is being read"
    assert store.survey.hold_quarantined(refs[1]) is None
    held.release()
    assert store.survey.clear_quarantine([refs[0], refs[0], PageRef(99, Tier.HOST, 0, 5)]) == 1
    assert store.survey.quarantined() == []
    assert store.status()[Tier.HOST].quarantined == 0
    codes, _ = store.lookup(NS, 0, keys([1, 2, 3]))
    assert codes.tolist() == [GetCode.MISS, GetCode.MISS, GetCode.HIT]
    store.survey.check()
