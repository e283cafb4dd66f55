"""All copies of one tier as columns: taken for a checkpoint, put back by a restart.

A part of the store, under the store's lock. What is copied under the lock are whole columns; the
work on them is done outside of it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.core.generations import Generations
from kvtier.core.lifecycle import State
from kvtier.core.links import Waiting
from kvtier.core.moves import Moves
from kvtier.core.page import KEY_BYTES, Tier
from kvtier.core.residents import Residents

__all__ = ["Copies", "Snapshots", "TierImage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Columns of one length n, the coldest copy first.

    `key` is longer: after those of the copies come those of pages that are not there and that some
    of the copies wait for. `parent` is a place in `key`, or -1.
    """

    namespace: npt.NDArray[np.uint32]
    shard: npt.NDArray[np.uint16]
    key: npt.NDArray[np.uint8]  # (n or more, 32)
    generation: npt.NDArray[np.uint64]
    slot: npt.NDArray[np.uint64]
    length: npt.NDArray[np.uint64]
    codec: npt.NDArray[np.uint8]
    lossy: npt.NDArray[np.uint8]
    parent: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.slot)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierImage:
    """A tier at one moment. Every later reservation has a generation above `last_generation`.

    `bindings` is the record size of each slab, `in_flight` the generation and slot of every copy
    that was being made then and may still become findable.
    """

    tier: Tier
    last_generation: int
    bindings: dict[int, int]
    in_flight: tuple[tuple[int, int], ...]
    slab_units: int
    columns: dict[str, npt.NDArray[Any]]  # of all rows of the table
    keys: npt.NDArray[np.uint8]
    waiting: Waiting  # of all tiers

    def slab_of(self, slot: int) -> int:
        return slot // self.slab_units

    def copies(self) -> Copies:
        """The sealed copies. Takes time, and may run on any thread."""
        columns = self.columns
        is_there = (columns["tier"] == self.tier) & (columns["state"] == State.SEALED)
        rows = np.flatnonzero(is_there)
        rows = rows[np.argsort(columns["stamp"][rows], kind="stable")]
        place = np.full(len(is_there) + 1, -1, np.int32)
        place[rows + 1] = np.arange(len(rows), dtype=np.int32)
        taken = {
            name: columns[name][rows] for name in _TAKEN if name not in ("stamp", "state", "tier")
        }
        taken["parent"] = place[taken["parent"]]
        waiting, parents, number = self._waiting_for(is_there & (columns["parent"] == 0))
        taken["parent"][place[waiting + 1]] = len(rows) + number
        return Copies(key=np.concatenate([self.keys[rows], parents]), **taken)

    def _waiting_for(
        self, may_wait: npt.NDArray[np.bool_]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """(rows that wait, keys of the pages they wait for, which of these each waits for)."""
        found: list[tuple[int, int, int]] = []
        keys = bytearray()
        for at, ((tier, _, _, key), waiting) in enumerate(self.waiting.items()):
            keys += key
            if tier == self.tier:
                found += [(row, generation, at) for row, generation in waiting]
        rows, generations, numbers = np.array(found, np.uint64).reshape(-1, 3).T
        # A copy can have gone before the image was taken, and one have come after it.
        is_there = rows < len(may_wait)
        places = np.where(is_there, rows, 0).astype(np.int64)
        is_there &= may_wait[places] & (self.columns["generation"][places] == generations)
        used, number = np.unique(numbers[is_there], return_inverse=True)
        parents = np.frombuffer(bytes(keys), np.uint8).reshape(-1, KEY_BYTES)
        return places[is_there], parents[used.astype(np.int64)], number


_TAKEN = (
    "state",
    "tier",
    "namespace",
    "shard",
    "generation",
    "slot",
    "length",
    "codec",
    "lossy",
    "parent",
    "stamp",
)


class Snapshots:
    def __init__(
        self,
        lock: threading.Lock,
        residents: Residents,
        moves: Moves,
        generations: Generations,
        pages_max: Mapping[Tier, int],
    ) -> None:
        self._pages_max = pages_max
        self._lock = lock
        self._residents = residents
        self._moves = moves
        self._generations = generations

    @property
    def last_generation(self) -> int:
        """The highest generation of any reservation so far."""
        with self._lock:
            return self._generations.last

    def take(self, tier: Tier) -> TierImage:
        """The sealed copies of `tier` as they are together at this moment."""
        table, allocator = self._residents.table, self._residents.allocators[tier]
        with self._lock:
            columns = {name: table.live(name).copy() for name in _TAKEN}
            return TierImage(
                tier=tier,
                last_generation=self._generations.last,
                bindings=allocator.bindings(),
                in_flight=tuple(
                    (table.generation[row], table.slot[row])
                    for row in self._moves.under_way()
                    if table.tier[row] == tier
                ),
                slab_units=allocator.slab_units,
                columns=columns,
                keys=table.key_np[: len(columns["state"])].copy(),
                waiting=self._residents.links.waiting(),
            )

    def load(self, tier: Tier, bindings: dict[int, int], copies: Copies) -> int:
        """Puts copies back into a store that has none yet; how many had room in the table.

        Their slabs are granted and unbound, no two of them are of one page or in one slot, and
        their namespaces are open. Without room for all, the coldest are left out. A copy whose
        parent is not put back waits for it.
        """
        residents = self._residents
        table, allocator = residents.table, residents.allocators[tier]
        with self._lock:
            rows = table.take_rows(min(len(copies), self._pages_max.get(tier, len(copies))))
            left_out = len(copies) - len(rows)
            for name in ("namespace", "shard", "slot", "length", "codec", "lossy"):
                table.column(name)[rows] = getattr(copies, name)[left_out:]
            table.column("tier")[rows] = tier
            table.key_np[rows] = copies.key[left_out : len(copies)]
            slabs = (copies.slot[left_out:] // np.uint64(allocator.slab_units)).astype(np.int64)
            by_slab = np.argsort(slabs, kind="stable")
            sorted_slabs = slabs[by_slab]
            for slab, record_bytes in bindings.items():
                begin, end = np.searchsorted(sorted_slabs, (slab, slab + 1))
                of_it = rows[by_slab[begin:end]]
                table.column("record")[of_it] = record_bytes
                allocator.restore(slab, record_bytes, table.column("slot")[of_it])
            before = copies.parent[left_out:].astype(np.int64)
            is_linked = (before >= left_out) & (before < len(copies))
            parents = rows[before[is_linked] - left_out]
            table.column("parent")[rows[is_linked]] = parents + 1
            np.add.at(table.column("children"), parents, 1)
            residents.restore(rows, copies.generation[left_out:])
            waits = (before >= 0) & ~is_linked
            residents.links.wait_for(rows[waits], copies.key[before[waits]])
            return len(rows)
