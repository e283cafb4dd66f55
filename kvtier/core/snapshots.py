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
from kvtier.core.moves import Moves
from kvtier.core.page import Tier
from kvtier.core.residents import Residents

__all__ = ["Copies", "Snapshots", "TierImage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """Columns of one length n, the coldest copy first. `parent` is a place in them, or -1."""

    namespace: npt.NDArray[np.uint32]
    shard: npt.NDArray[np.uint16]
    key: npt.NDArray[np.uint8]  # (n, 32)
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
        return Copies(key=self.keys[rows], **taken)


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
            )

    def load(self, tier: Tier, bindings: dict[int, int], copies: Copies) -> int:
        """Puts copies back into a store that has none yet; how many had room in the table.

        Their slabs are granted and unbound, no two of them are of one page or in one slot, and
        their namespaces are open. Without room for all, the coldest are left out.
        """
        residents = self._residents
        table, allocator = residents.table, residents.allocators[tier]
        with self._lock:
            rows = table.take_rows(min(len(copies), self._pages_max.get(tier, len(copies))))
            left_out = len(copies) - len(rows)
            for name in ("namespace", "shard", "slot", "length", "codec", "lossy"):
                table.column(name)[rows] = getattr(copies, name)[left_out:]
            table.column("tier")[rows] = tier
            table.key_np[rows] = copies.key[left_out:]
            slabs = (copies.slot[left_out:] // np.uint64(allocator.slab_units)).astype(np.int64)
            by_slab = np.argsort(slabs, kind="stable")
            sorted_slabs = slabs[by_slab]
            for slab, record_bytes in bindings.items():
                begin, end = np.searchsorted(sorted_slabs, (slab, slab + 1))
                of_it = rows[by_slab[begin:end]]
                table.column("record")[of_it] = record_bytes
                allocator.restore(slab, record_bytes, table.column("slot")[of_it])
            parents = copies.parent[left_out:].astype(np.int64) - left_out
            linked = parents >= 0
            table.column("parent")[rows[linked]] = rows[parents[linked]] + 1
            np.add.at(table.column("children"), rows[parents[linked]], 1)
            residents.restore(tier, rows, copies.generation[left_out:])
            return len(rows)
