"""Where a new page goes and which pages give way for it.

A slot comes from the size class; else the coldest page of the class gives way; else, or when
everything in another class's slab is colder than the coldest page of this class, that slab is
emptied and changes class. Evicting a page takes its sibling shards with it, since a page without
one of its shards is no page. Never a page with a lease, never the head of a chain before its tail.
The caller holds the store's lock.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvtier.core.lifecycle import State
from kvtier.core.page import Tier
from kvtier.core.policy.lru import NEVER
from kvtier.core.residents import Residents
from kvtier.core.table import NO_ROW

__all__ = ["Placement"]

#: Between two looks at other classes' slabs (a vector scan of the table) lie so many evictions of a
#: class.
_SLAB_LOOK_EVERY = 256


class Placement:
    def __init__(self, residents: Residents, shard_count: Callable[[int], int]) -> None:
        self._residents = residents
        self._shard_count = shard_count
        self._until_look: dict[tuple[Tier, int], int] = {}
        self.evicted = 0
        self.slabs_moved = 0

    def make_room(self, tier: Tier, record_bytes: int) -> int | None:
        """A slot in `tier`, evicting as needed; None when everything that could give way is in
        use."""
        allocator = self._residents.allocators[tier]
        slot = allocator.reserve(record_bytes)
        while slot is None:
            if not self._evict(tier, record_bytes):
                return None
            slot = allocator.reserve(record_bytes)
        return slot

    def evict_page(self, row: int) -> None:
        """Retires a copy and its sibling shards in the same tier."""
        for sibling in self._siblings(row):
            self._residents.retire(sibling)
            self.evicted += 1

    def _evict(self, tier: Tier, record_bytes: int) -> bool:
        key = (tier, record_bytes)
        queue = self._residents.queue(tier, record_bytes)
        own_coldest = queue.coldest()
        until_look = self._until_look.get(key, 0)
        if own_coldest == NEVER or until_look <= 0:
            self._until_look[key] = _SLAB_LOOK_EVERY
            slab = self._coldest_slab(tier, record_bytes, colder_than=own_coldest)
            if slab is not None:
                self._empty_slab(tier, slab)
                return True
        self._until_look[key] -= 1
        row = queue.victim(self._evictable)
        if row == NO_ROW:
            return False
        self.evict_page(row)
        return True

    def _evictable(self, row: int) -> bool:
        table = self._residents.table
        return all(
            table.leases[sibling] == 0 and table.children[sibling] == 0
            for sibling in self._siblings(row)
        )

    def _siblings(self, row: int) -> list[int]:
        """The row and the rows of its other shards in the same tier."""
        residents, table = self._residents, self._residents.table
        namespace = table.namespace[row]
        count = self._shard_count(namespace)
        if count == 1:
            return [row]
        rows = [row]
        key = table.key(row)
        for shard in range(count):
            if shard != table.shard[row]:
                other = residents.in_tier(
                    residents.index.find(namespace, shard, key), table.tier[row]
                )
                if other != NO_ROW:
                    rows.append(other)
        return rows

    def _coldest_slab(self, tier: Tier, record_bytes: int, *, colder_than: int) -> int | None:
        """The slab of another class whose hottest page is the coldest, if all of it may give
        way."""
        table = self._residents.table
        units = self._residents.allocators[tier].slab_range(0)[1]
        mine = (table.live("tier") == tier) & (table.live("state") != State.FREE)
        mine &= table.live("record") != record_bytes
        rows = np.flatnonzero(mine)
        if not len(rows):
            return None
        slabs = (table.live("slot")[rows] // np.uint64(units)).astype(np.int64)
        busy = (table.live("leases")[rows] != 0) | (table.live("state")[rows] != State.SEALED)
        heat = np.where(busy, np.uint64(NEVER), table.live("stamp")[rows])
        hottest = np.zeros(int(slabs.max()) + 1, np.uint64)
        present = np.zeros(len(hottest), bool)
        np.maximum.at(hottest, slabs, heat)
        present[slabs] = True
        hottest[~present] = NEVER
        slab = int(hottest.argmin())
        return slab if int(hottest[slab]) < min(colder_than, NEVER) else None

    def _empty_slab(self, tier: Tier, slab: int) -> None:
        table = self._residents.table
        low, high = self._residents.allocators[tier].slab_range(slab)
        slots = table.live("slot")
        inside = (table.live("tier") == tier) & (table.live("state") == State.SEALED)
        inside &= (slots >= low) & (slots < high)
        rows = np.flatnonzero(inside)
        rows = np.union1d(rows, self._descendants(rows))
        self.slabs_moved += 1
        for row in rows.tolist():
            if table.state[row] == State.SEALED:  # a sibling may have taken it along
                self.evict_page(row)

    def _descendants(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Unpinned pages that would be unreachable without `rows`."""
        table = self._residents.table
        parents = table.live("parent").astype(np.int64) - 1
        free_to_go = (table.live("state") == State.SEALED) & (table.live("leases") == 0)
        found = rows
        frontier = rows
        while len(frontier):
            frontier = np.flatnonzero(np.isin(parents, frontier) & (parents >= 0) & free_to_go)
            frontier = np.setdiff1d(frontier, found)
            found = np.union1d(found, frontier)
        return found
