"""Where a new page goes and which pages give way for it.

A slot comes from the size class; else a page of the class whose time is over (`lapses.py`) gives
way, else the coldest one; else, or when everything in another class's slab is colder than the
coldest page of this class, that slab is emptied and changes class. Evicting a page takes its
sibling shards with it, since a page without one of its shards is no page. Never a page with a
lease, never the head of a chain before its tail. The caller holds the store's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.core.chains import chain_heat, rows_after
from kvtier.core.lifecycle import State
from kvtier.core.page import TIERS, Tier
from kvtier.core.policy.lru import NEVER
from kvtier.core.residents import Residents
from kvtier.core.table import NO_ROW

__all__ = ["Placement"]

#: Between two looks at other classes' slabs (a vector scan of the table) lie so many evictions of a
#: class.
_SLAB_LOOK_EVERY = 256
#: Slabs tried in one look: a slab can turn out to be kept by a shard or a page that lies elsewhere.
_SLABS_TRIED = 64


class Placement:
    def __init__(self, residents: Residents, pages_max: Mapping[Tier, int]) -> None:
        """`pages_max`: pages of a tier that the table has rows for; without one, as many as fit."""
        self._residents = residents
        self._pages_max = pages_max
        self._until_look: dict[tuple[Tier, int], int] = {}
        self._failed_look: dict[tuple[Tier, int], int] = {}  # Residents.changes at that time
        self._has_refused = False  # since the last page was evicted
        self.evicted = 0
        self.evicted_last = 0  # of them, pages that were in no other tier
        self.slabs_moved = 0

    def begin(self, tier: Tier, record_bytes: int) -> int:
        """As `begin_many` for one; NO_ROW when there is no room for it."""
        rows = self.begin_many(tier, record_bytes, 1)
        return rows[0] if rows else NO_ROW

    def begin_many(self, tier: Tier, record_bytes: int, count: int) -> list[int]:
        """Rows without names, FILLING in slots of their own; evicts as needed. Fewer than `count`
        when everything that could give way is in use, or the table is full."""
        slots = self._make_room(tier, record_bytes, count)
        begun = 0
        try:
            rows = self._residents.begin_many(tier, slots, record_bytes)
            begun = len(rows)
        finally:
            self._residents.allocators[tier].free_many(slots[begun:])
        return rows

    def _make_room(self, tier: Tier, record_bytes: int, count: int) -> list[int]:
        """Up to `count` slots in `tier`, evicting as needed; fewer when everything that could give
        way is in use."""
        allocator = self._residents.allocators[tier]
        limit = self._pages_max.get(tier)
        slots: list[int] = []
        goes_on = True
        while True:
            may = count - len(slots)
            if limit is not None:
                may = min(may, limit - self._residents.ledger.pages(tier) - len(slots))
            slots += allocator.reserve_many(record_bytes, may)
            wanted = count - len(slots)
            if not wanted or not goes_on:
                return slots
            goes_on = self._evict(tier, record_bytes, wanted)

    def _evict(self, tier: Tier, record_bytes: int, count: int) -> bool:
        """Up to `count` slots of this size are free after it, or a slab is; False: no more will be
        in this call."""
        key = (tier, record_bytes)
        queue = self._residents.queue(tier, record_bytes)
        own_coldest = queue.coldest()
        until_look = self._until_look.get(key, 0)
        if own_coldest == NEVER or until_look <= 0:
            self._until_look[key] = until_look = _SLAB_LOOK_EVERY
            if self._empty_a_slab(tier, record_bytes, colder_than=own_coldest):
                return True
        residents, record = self._residents, self._residents.table.record
        links, siblings, evictable = residents.links, residents.shards.siblings, self._evictable
        lapses = residents.lapses
        rows: list[int] = []
        row = freed = named = 0
        try:
            while freed < count and named < until_look:
                row = lapses.next(tier, record_bytes, evictable)
                self._has_refused = False
                if row == NO_ROW:
                    row = queue.evict(evictable)
                else:
                    queue.forget(row)
                named += 1
                if row == NO_ROW:
                    break
                rows.append(row)
                links.leave(row)  # the page before it may be the next
                freed += 1
                for other in siblings(row)[1:]:
                    residents.leave(other)
                    rows.append(other)
                    freed += record[other] == record_bytes
        finally:  # what has left its queue is in no other one
            self._until_look[key] = until_look - named
            self._give_up(rows, residents.retire_left)
        # Other classes are looked at when this one had nothing to refuse.
        return bool(rows) and not (row == NO_ROW and self._has_refused)

    def _give_up(self, rows: list[int], retire: Callable[[Sequence[int]], int]) -> None:
        """`retire` says how many were their pages' last copies."""
        self.evicted += len(rows)
        self.evicted_last += retire(rows)

    def _evictable(self, row: int) -> bool:
        table = self._residents.table
        leases, children = table.leases, table.children
        allocator = self._residents.allocators[TIERS[table.tier[row]]]
        frozen, units = allocator.frozen, allocator.slab_units
        for sibling in self._residents.shards.siblings(row):
            # From a slab that nothing can be written to a page makes no room.
            is_frozen = bool(frozen) and table.slot[sibling] // units in frozen
            if leases[sibling] or children[sibling] or is_frozen:
                self._has_refused = True
                return False
        return True

    def _empty_a_slab(self, tier: Tier, record_bytes: int, *, colder_than: int) -> bool:
        """Empties the coldest slab of another class that may give way."""
        residents = self._residents
        key = (tier, record_bytes)
        if self._failed_look.get(key) == residents.changes:
            return False  # nothing has been let go since: the answer would be the same
        if set(residents.allocators[tier].classes()) <= {record_bytes}:
            return False  # no other class: seen without a look through the table
        for slab in self._coldest_slabs(tier, record_bytes, colder_than=colder_than):
            rows = self._dependents(self._rows_in(tier, slab))
            if bool((residents.table.column("leases")[rows] == 0).all()):
                self._give_up(rows.tolist(), residents.retire_many)
                self.slabs_moved += 1
                return True
        self._failed_look[key] = residents.changes
        return False

    def _coldest_slabs(self, tier: Tier, record_bytes: int, *, colder_than: int) -> list[int]:
        """Slabs of other classes all of which is colder and may go: the coldest first, and of
        equally cold ones that with the ends of chains.
        """
        table = self._residents.table
        allocator = self._residents.allocators[tier]
        units = allocator.slab_units
        live = table.live("state") != State.FREE
        mine = live & (table.live("tier") == tier) & (table.live("record") != record_bytes)
        rows = np.flatnonzero(mine)
        if not len(rows):
            return []
        heat, depth = chain_heat(
            table.live("parent"),
            np.where(
                (table.live("leases") != 0) | (table.live("state") != State.SEALED),
                np.where(live, np.uint64(NEVER), np.uint64(0)),
                table.live("stamp"),
            ),
        )
        slabs = (table.live("slot")[rows] // np.uint64(units)).astype(np.int64)
        if allocator.frozen:
            slabs_frozen = np.isin(slabs, list(allocator.frozen))
            rows, slabs = rows[~slabs_frozen], slabs[~slabs_frozen]
        numbers, places = np.unique(slabs, return_inverse=True)
        hottest = np.zeros(len(numbers), np.uint64)
        np.maximum.at(hottest, places, heat[rows])
        shallowest = np.full(len(numbers), np.iinfo(np.int64).max)
        np.minimum.at(shallowest, places, depth[rows])
        order = np.lexsort((-shallowest, hottest))[:_SLABS_TRIED]
        return [int(numbers[i]) for i in order if int(hottest[i]) < min(colder_than, NEVER)]

    def _rows_in(self, tier: Tier, slab: int) -> npt.NDArray[np.int64]:
        table = self._residents.table
        low, high = self._residents.allocators[tier].slab_range(slab)
        slots = table.live("slot")
        inside = (table.live("tier") == tier) & (table.live("state") == State.SEALED)
        return np.flatnonzero(inside & (slots >= low) & (slots < high))

    def _dependents(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The rows and all that would be useless without them: pages after them, sibling shards."""
        residents, table = self._residents, self._residents.table
        found = rows
        while True:
            after = rows_after(table.live("parent"), found)
            sharded = [
                r for r in after.tolist() if residents.shards.are_several(table.namespace[r])
            ]
            shards = [row for at in sharded for row in residents.shards.siblings(at)]
            everything = np.union1d(after, np.array(shards, np.int64))
            if len(everything) == len(after):
                return everything
            found = everything
