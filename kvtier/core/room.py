"""What a tier may use of its slabs: they come as memory and files are made, and go with a device.

A part of the store, under the store's lock.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.core.lifecycle import State
from kvtier.core.page import Tier
from kvtier.core.residents import Residents

__all__ = ["Lost", "Room"]


@dataclass(slots=True, kw_only=True)
class Lost:
    """Pages of slabs that were taken away, and which of them are out of the books already."""

    rows: npt.NDArray[np.int64]
    generations: npt.NDArray[np.uint64]
    done: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, count: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
        """The next so many."""
        begin, self.done = self.done, min(len(self.rows), self.done + count)
        return self.rows[begin : self.done], self.generations[begin : self.done]


class Room:
    def __init__(self, lock: threading.Lock, residents: Residents) -> None:
        self._lock = lock
        self._residents = residents

    def grant(self, tier: Tier, slab: int) -> None:
        """The slab may be used from now on."""
        with self._lock:
            self._residents.allocators[tier].grant(slab)
            self._residents.changes += 1

    def has_free(self, tier: Tier, record_bytes: int) -> bool:
        """A record of this size has room without anything giving way."""
        with self._lock:
            return self._residents.allocators[tier].has_free(record_bytes)

    def can_grant(self, tier: Tier, slab: int) -> bool:
        """The slab is not in use, and nothing in it is still named from when it was."""
        with self._lock:
            return self._residents.allocators[tier].can_grant(slab)

    def freeze(self, tier: Tier, slabs: Sequence[int]) -> None:
        """Nothing is stored in these granted slabs from now on; their pages are served, and none
        gives way to a page that would not have its place."""
        with self._lock:
            for slab in slabs:
                self._residents.allocators[tier].freeze(slab)

    def thaw(self, tier: Tier, slabs: Sequence[int]) -> None:
        """Slabs that were frozen are used as before."""
        with self._lock:
            residents = self._residents
            for slab in slabs:
                residents.allocators[tier].thaw(slab)
            residents.changes += 1
            rows, _ = self._sealed_in(tier, slabs)
            for row in rows.tolist():
                residents.reconsider(row)

    def withdraw(self, tier: Tier, slab: int) -> int:
        """Takes the slab away with every page in it; how many. What a lease names is unfindable at
        once and keeps its slot until the lease ends."""
        lost = self.close(tier, [slab])
        count = len(lost)
        while self.clear(lost, count):
            pass
        return count

    def close(self, tier: Tier, slabs: Sequence[int]) -> Lost:
        """Takes slabs away: nothing is stored in them from now on. Their pages are in what this
        returns, for `clear`; until then they are found, and cannot be read."""
        with self._lock:
            residents = self._residents
            allocator, table = residents.allocators[tier], residents.table
            closed = [slab for slab in slabs if allocator.is_granted(slab)]
            for slab in closed:
                allocator.withdraw(slab)
            rows, others = self._sealed_in(tier, closed)
            for row in others[table.live("state")[others] == State.QUARANTINED].tolist():
                if row in residents.quarantine:
                    residents.quarantine.remove(row)
            return Lost(rows=rows, generations=table.live("generation")[rows].copy())

    def _sealed_in(
        self, tier: Tier, slabs: Sequence[int]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(rows of pages that lie in these slabs, other rows there)"""
        table = self._residents.table
        units = np.uint64(self._residents.allocators[tier].slab_units)
        of_tier = np.flatnonzero(table.live("tier") == tier)
        rows = of_tier[np.isin(table.live("slot")[of_tier] // units, slabs)]
        is_sealed = table.live("state")[rows] == State.SEALED
        return rows[is_sealed], rows[~is_sealed]

    def clear(self, lost: Lost, pages_max: int) -> int:
        """Retires up to `pages_max` of these pages; how many it looked at. 0: all done."""
        with self._lock:
            table = self._residents.table
            rows, generations = lost.take(pages_max)
            # Rows can have been let go, and used again, since.
            is_same = (table.column("generation")[rows] == generations) & (
                table.column("state")[rows] == State.SEALED
            )
            self._residents.retire_many(rows[is_same].tolist())
            return len(rows)
