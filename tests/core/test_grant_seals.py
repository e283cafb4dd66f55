"""What a seal of granted slots answers, and which of them are free afterwards."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtier.core.events import EventKind
from kvtier.core.handles import Reading
from kvtier.core.page import Codec, PageMeta, PutCode, Tier
from kvtier.core.page_columns import PageColumns
from tests.core.grant_support import (
    EXISTS,
    REFUSED,
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
from tests.core.support import NS, RECORD, begin_move, key, keys, meta, present, put


def test_pages_are_written_ahead_and_named_by_a_seal() -> None:
    store = store_of()
    generations = take(store, A, 3)
    assert counts(store) == (13, 3, 0, 0, 0)
    assert held(store) == (3, 3, 0)
    assert present(store, range(3)) == []
    pages = [meta(0), meta(1, 0), meta(2, 1, codec=Codec.FP8)]
    assert seal(store, A, generations, pages) == [STORED] * 3
    assert counts(store) == (13, 0, 3, 0, 0)
    assert held(store) == (0, 0, 0)
    assert present(store, range(3)) == [0, 1, 2]
    assert totals(store) == (3, 0, 0, 0)
    for n, outcome in enumerate(store.acquire(NS, 0, keys(range(3)))):
        assert isinstance(outcome, Reading)
        assert outcome.ref.generation == generations[n]
        assert (outcome.length, outcome.codec) == (64, Codec.FP8 if n == 2 else Codec.RAW)
        outcome.release()


def test_a_seal_is_watched_and_listed_as_a_put_is() -> None:
    store = store_of(shard_count=2)
    sequence, _ = store.watching.start()
    (generation,) = take(store, A, 1)
    assert store.watching.since(sequence, 10) == []
    page = PageMeta(
        key=key(5), length=64, codec=Codec.RAW, payload_sum=b"s" * 16, origin_sum=b"o" * 16
    )
    assert seal(store, A, [generation], [page], shard=1) == [STORED]
    (event,) = store.watching.since(sequence, 10)
    assert (event.kind, event.tier, event.namespace, event.shard, event.keys) == (
        EventKind.STORED,
        Tier.HOST,
        NS,
        1,
        key(5),
    )
    listed = store._listing.pages[NS, 1, key(5)]
    assert (listed.generation, listed.has_sums) == (generation, True)
    assert (listed.payload_sum, listed.origin_sum) == (b"s" * 16, b"o" * 16)
    store.watching.stop()


def test_a_page_that_is_there_or_comes_twice_exists() -> None:
    store = store_of()
    put(store, 0)
    generations = take(store, A, 4)
    codes = seal(store, A, generations, [meta(0), meta(1), meta(1), meta(2)])
    assert codes == [EXISTS, STORED, EXISTS, STORED]
    assert counts(store) == (13, 0, 3, 0, 0)
    assert totals(store) == (3, 2, 0, 0)


def test_long_batches_answer_as_short_ones_do() -> None:
    """Keys are looked up in another way from a dozen on."""
    store = store_of(64, grants_share=1.0)
    for n in range(0, 40, 2):
        put(store, n)
    codes = seal(store, A, take(store, A, 40), [meta(n) for n in range(40)])
    assert codes == [EXISTS, STORED] * 20
    assert counts(store) == (24, 0, 40, 0, 0)


def test_an_exact_page_takes_the_place_of_a_lossy_one_also_in_one_batch() -> None:
    def lossy(n: int) -> PageMeta:
        return PageMeta(key=key(n), length=64, codec=Codec.FP8, payload_sum=bytes(16), lossy=True)

    store = store_of()
    generations = take(store, A, 5)
    codes = seal(store, A, generations, [lossy(0), meta(0), lossy(0), lossy(1), lossy(1)])
    assert codes == [STORED, STORED, EXISTS, STORED, EXISTS]
    (reading,) = store.acquire(NS, 0, keys([0]))
    assert isinstance(reading, Reading)
    assert (reading.lossy, reading.ref.generation) == (False, generations[1])
    reading.release()
    assert seal(store, A, take(store, A, 1), [meta(1)]) == [STORED]
    assert counts(store) == (14, 0, 2, 0, 0)


def test_a_copy_on_nvme_is_enough_to_exist() -> None:
    store = store_of(4, nvme_slots=4)
    put(store, 0)
    source, target = begin_move(store, 0)
    assert target.seal() is PutCode.STORED
    source.release()
    take(store, A, 2)
    for n in range(1, 5):
        put(store, n)
    assert store.lookup(NS, 0, keys([0]))[1].tolist() == [Tier.NVME]
    (generation,) = take(store, B, 1)
    assert seal(store, B, [generation], [meta(0)]) == [EXISTS]


def test_an_ended_namespace_takes_no_page_and_the_slots_come_back() -> None:
    store = store_of()
    generations = take(store, A, 2)
    store.end_namespace(NS)
    store.open_namespace(NS + 1, 1)
    assert seal(store, A, generations, [meta(0), meta(1)]) == [STALE, STALE]
    assert counts(store) == (16, 0, 0, 0, 0)
    assert totals(store) == (0, 0, 2, 0)
    (generation,) = take(store, A, 1)
    assert seal(store, A, [generation], [meta(0)], namespace=NS + 1) == [STORED]


def test_a_slot_taken_in_one_generation_may_be_sealed_in_the_next() -> None:
    """A grant has no name, so a bump does not touch it, nor does the sweep."""
    store = store_of()
    (generation,) = take(store, A, 1)
    put(store, 5)
    store.end_namespace(NS)
    store.open_namespace(NS + 1, 1)
    while store.sweep(10):
        store.survey.check()
    assert counts(store) == (15, 1, 0, 0, 0)
    assert seal(store, A, [generation], [meta(0)], namespace=NS + 1) == [STORED]


def test_number_zero_is_open_for_nobody_unless_it_was_opened() -> None:
    store = store_of()
    (generation,) = take(store, A, 1)
    assert seal(store, A, [generation], [meta(0)], namespace=0) == [STALE]
    # The daemon's own test of itself uses the number: a grant in between is nothing to it.
    store.open_namespace(0, 1)
    (generation,) = take(store, A, 1)
    assert put(store, 7, namespace=0) is PutCode.STORED
    store.end_namespace(0)
    while store.sweep(10):
        store.survey.check()
    assert counts(store) == (15, 1, 0, 0, 0)
    assert seal(store, A, [generation], [meta(0)]) == [STORED]


def test_a_slab_that_was_taken_away_takes_its_grants_along() -> None:
    store = store_of(4, slab_slots=2, grants_share=1.0)
    refs = store.grants.take(A, RECORD, 4, deadline=10.0)
    slabs = [ref.slot * 4096 // (2 * RECORD) for ref in refs]
    generations = [ref.generation for ref in refs]
    assert store.grants.expire(1.0) == 0
    assert store.room.withdraw(Tier.HOST, 0) == 0
    assert counts(store) == (0, 4, 0, 0, 0)
    assert not store.room.can_grant(Tier.HOST, 0)  # there may be writers
    found = store.grants.refs(A, generations)
    assert found == [ref if slab else None for ref, slab in zip(refs, slabs, strict=True)]
    codes = seal(store, A, generations, [meta(n) for n in range(4)])
    assert codes == [STORED if slab else STALE for slab in slabs]
    assert counts(store) == (2, 0, 2, 0, 0)
    assert store.room.can_grant(Tier.HOST, 0)


def test_quarantine_outlives_the_slab() -> None:
    store = store_of(4, slab_slots=4)
    generations = take(store, A, 2, deadline=1.0)
    store.grants.expire(1.0)
    store.room.withdraw(Tier.HOST, 0)
    assert counts(store) == (2, 0, 0, 0, 2)
    assert not store.room.can_grant(Tier.HOST, 0)
    assert store.grants.give_back(A, generations) == 2
    assert store.room.can_grant(Tier.HOST, 0)


def test_a_page_of_another_size_is_refused_and_the_slot_comes_back() -> None:
    store = store_of()
    generations = take(store, A, 3)
    pages = [
        PageMeta(key=key(n), length=length, codec=Codec.RAW, payload_sum=bytes(16))
        for n, length in enumerate((4097, 4096, 0))
    ]
    assert seal(store, A, generations, pages) == [REFUSED, STORED, REFUSED]
    assert counts(store) == (15, 0, 1, 0, 0)
    assert totals(store) == (1, 0, 0, 0)


def test_a_grant_can_be_sealed_once_and_by_its_holder() -> None:
    store = store_of()
    first, second = take(store, A, 2)
    codes = seal(store, B, [first, 999], [meta(0), meta(1)])
    assert codes == [STALE, STALE]
    assert counts(store) == (14, 2, 0, 0, 0)
    assert seal(store, A, [first, first], [meta(0), meta(1)]) == [STORED, STALE]
    assert seal(store, A, [first], [meta(2)]) == [STALE]
    assert seal(store, A, [second], [meta(3)]) == [STORED]
    assert present(store, range(4)) == [0, 3]
    assert totals(store) == (2, 0, 4, 0)


def test_what_does_not_fit_changes_nothing() -> None:
    store = store_of()
    generations = take(store, A, 2)
    with pytest.raises(ValueError, match="2 grants for 1 pages"):
        store.grants.seal_many(A, NS, 0, generations, PageColumns.of([meta(0)]))
    for namespace, shard in ((NS, 1 << 16), (NS, -1), (1 << 32, 0)):
        with pytest.raises(ValueError, match="does not fit"):
            store.grants.seal_many(
                A, namespace, shard, generations, PageColumns.of([meta(0), meta(1)])
            )
    pages = PageColumns.of([meta(0), meta(1)])
    for field, wrong in (
        ("keys", bytes(31)), ("parents", bytes(33)),
        ("payload_sums", bytes(15)), ("origin_sums", b""),
    ):  # fmt: skip
        column = [getattr(pages, field)[0], wrong]
        with pytest.raises(ValueError, match="does not fit"):
            store.grants.seal_many(A, NS, 0, generations, replace(pages, **{field: column}))
    assert held(store) == (2, 2, 0)
    assert seal(store, A, [], []) == []
    assert counts(store) == (14, 2, 0, 0, 0)
