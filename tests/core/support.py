"""Small stores for core tests: pages of one unit of payload, keys from numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.core.generations import Generations
from kvtier.core.handles import Filling, Reading
from kvtier.core.page import NO_SUM, Codec, PageMeta, PutCode, Tier
from kvtier.core.slabs import SlabAllocator
from kvtier.core.store import Store
from kvtier.core.store_config import StoreConfig
from kvtier.core.table import NO_ROW, CopyTable
from kvtier.testing.listing_book import ListingBook

RECORD = 8192
NS = 1


def key(n: int) -> bytes:
    return hashlib.sha256(n.to_bytes(8, "little")).digest()


def keys(numbers: Sequence[int]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b"".join(key(n) for n in numbers), np.uint8).reshape(-1, 32)


def take_row(table: CopyTable, key: bytes) -> int:
    """A row with a key; NO_ROW when all are taken."""
    for row in table.take_many(1):
        table.set_key(row, key)
        return row
    return NO_ROW


def make_store(
    slots: int = 8,
    *,
    slab_slots: int | None = None,
    shard_count: int = 1,
    nvme_slots: int = 0,
    granted: bool = True,
    **config: Any,
) -> Store:
    """A store whose host tier holds `slots` pages of RECORD bytes; `config` goes to StoreConfig."""
    slab = RECORD * (slab_slots or slots)
    tiers = {Tier.HOST: SlabAllocator(slab_bytes=slab, numbers=range(RECORD * slots // slab))}
    if nvme_slots:
        size = RECORD * nvme_slots
        tiers[Tier.NVME] = SlabAllocator(slab_bytes=size, numbers=range(1))
    store = Store(
        StoreConfig(
            **{"boot_id": 99, "pages_max": 4 * (slots + nvme_slots), "seed": 1234} | config
        ),
        tiers=tiers,
        generations=Generations(0, lambda bound: None),
        listing=ListingBook(),
    )
    if granted:
        for tier, allocator in tiers.items():
            for slab_no in range(allocator.slabs):
                store.room.grant(tier, slab_no)
    store.open_namespace(NS, shard_count)
    return store


def meta(n: int, parent: int | None = None, *, codec: Codec = Codec.RAW) -> PageMeta:
    return PageMeta(
        key=key(n),
        length=64,
        codec=codec,
        payload_sum=NO_SUM,
        parent=b"" if parent is None else key(parent),
    )


def put(
    store: Store,
    n: int,
    parent: int | None = None,
    *,
    shard: int = 0,
    namespace: int = NS,
    record: int = RECORD,
    source: Reading | None = None,
    tier: Tier = Tier.HOST,
) -> PutCode:
    outcome = store.reserve(namespace, shard, meta(n, parent), record, tier=tier, source=source)
    if isinstance(outcome, Filling):
        return outcome.seal()
    return outcome


def demote(store: Store, n: int, parent: int | None = None, *, shard: int = 0) -> PutCode:
    """Copies a page of the host tier to the tier below, as the mover does."""
    (source,) = store.acquire(NS, shard, keys([n]), is_use=False)
    assert isinstance(source, Reading)
    with source:
        return put(store, n, parent, shard=shard, source=source, tier=Tier.NVME)


def begin_move(store: Store, n: int, tier: Tier = Tier.NVME) -> tuple[Reading, Filling]:
    (source,) = store.acquire(NS, 0, keys([n]))
    assert isinstance(source, Reading)
    target = store.reserve(NS, 0, meta(n), RECORD, tier=tier, source=source)
    assert isinstance(target, Filling)
    return source, target


def present(
    store: Store, numbers: Sequence[int], *, shard: int = 0, namespace: int = NS
) -> list[int]:
    codes, _ = store.lookup(namespace, shard, keys(numbers))
    return [n for n, code in zip(numbers, codes.tolist(), strict=True) if code == 1]
