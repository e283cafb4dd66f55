"""Stores that grant much, and what tests of grants ask them; the books are looked at every time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtier.core.page import PageMeta, PutCode, Tier
from kvtier.core.page_columns import PageColumns
from kvtier.core.store import Store
from tests.core.support import NS, RECORD, make_store

A, B = 11, 12  # holders
STORED, EXISTS, STALE, REFUSED = (
    int(code)
    for code in (PutCode.STORED, PutCode.EXISTS, PutCode.STALE_GENERATION, PutCode.REFUSED)
)


def store_of(
    slots: int = 16, *, grants_share: float = 0.5, quarantine_share: float = 0.5, **more: Any
) -> Store:
    return make_store(slots, grants_share=grants_share, quarantine_share=quarantine_share, **more)


def take(store: Store, holder: int, count: int, *, deadline: float = 10.0) -> list[int]:
    """Generations of the grants; the books are looked at."""
    refs = store.grants.take(holder, RECORD, count, deadline=deadline)
    store.survey.check()
    assert all((ref.boot_id, ref.tier) == (99, Tier.HOST) for ref in refs)
    return [ref.generation for ref in refs]


def seal(
    store: Store,
    holder: int,
    generations: Sequence[int],
    metas: Sequence[PageMeta],
    *,
    namespace: int = NS,
    shard: int = 0,
) -> list[int]:
    codes = store.grants.seal_many(
        holder, namespace, shard, generations, PageColumns.of(metas)
    ).tolist()
    store.survey.check()
    store._listing.check(store)
    return codes


def counts(store: Store) -> tuple[int, int, int, int, int]:
    """Free, filling, sealed, retiring, quarantined slots; together all there are."""
    store.survey.check()
    found = store.status()[Tier.HOST]
    slots = (
        found.free_bytes // RECORD,
        found.filling,
        found.sealed,
        found.retiring,
        found.quarantined,
    )
    assert sum(slots) * RECORD == found.capacity_bytes
    return slots


def held(store: Store) -> tuple[int, int, int]:
    """Granted pages, granted slots, slots in quarantine for their holders."""
    grants = store.grants
    return (
        grants.granted_pages,
        grants.granted_bytes // RECORD,
        grants.quarantined_bytes // RECORD,
    )


def totals(store: Store) -> tuple[int, int, int, int]:
    found = store.counters()
    return found.stored, found.exists, found.stale_commits, found.busy
