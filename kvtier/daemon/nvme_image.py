"""What a checkpoint says of a moment of the store: names in place of numbers. Pure, any thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from kvtier.core.snapshots import TierImage
from kvtier.tiers.nvme_snapshot import Pages, Snapshot

__all__ = ["NameOf", "snapshot_of"]

#: (fingerprint, generation) of a namespace number, or None once it was bumped or deleted.
NameOf = Callable[[int], "tuple[bytes, int] | None"]


def snapshot_of(taken: TierImage, waits: Mapping[int, int], name_of: NameOf) -> Snapshot:
    """`taken` without the copies of namespaces that have ended, which only wait to be swept."""
    copies = taken.copies()
    numbers, family = np.unique(copies.namespace, return_inverse=True)
    names = [name_of(number) for number in numbers.tolist()]
    is_named = np.array([name is not None for name in names], bool)
    place = np.cumsum(is_named) - 1
    pages = Pages(
        family=place[family].astype(np.uint32),
        shard=copies.shard,
        key=copies.key,
        generation=copies.generation,
        slot=copies.slot,
        length=copies.length,
        codec=copies.codec,
        lossy=copies.lossy,
        parent=copies.parent,
    ).take(np.flatnonzero(is_named[family]))
    return Snapshot(
        last_generation=taken.last_generation,
        classes=taken.bindings,
        families=tuple(name for name in names if name is not None),
        pages=pages,
        in_flight=tuple(generation for generation, _ in taken.in_flight),
        waits=dict(waits),
    )
