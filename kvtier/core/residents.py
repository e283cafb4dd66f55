"""A copy's way through its life with all books kept: lifecycle, ledger, index, chain links, queue
and events.

Every change of a row's state in a store goes through one of these methods, so that no caller can
keep half of the books. The caller holds the store's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.core.events import EventKind, EventLog
from kvtier.core.generations import Generations
from kvtier.core.index import Index
from kvtier.core.lapses import Lapses
from kvtier.core.ledger import Ledger
from kvtier.core.lifecycle import Event, State, fire_many, restore
from kvtier.core.links import Links
from kvtier.core.listing import Listing
from kvtier.core.page import TIERS, Tier
from kvtier.core.page_columns import PageColumns
from kvtier.core.policy.base import Policy
from kvtier.core.quarantine import Quarantine, Verdict
from kvtier.core.queues import Queues
from kvtier.core.shards import Shards
from kvtier.core.slabs import SlabAllocator
from kvtier.core.table import NO_ROW, CopyTable
from kvtier.core.telling import Telling

__all__ = ["Residents"]


class Residents:
    """Rows of `table` and what every book says about them."""

    def __init__(
        self,
        *,
        table: CopyTable,
        index: Index,
        allocators: dict[Tier, SlabAllocator],
        generations: Generations,
        events: EventLog,
        lapses: Lapses,
        make_policy: Mapping[Tier, Callable[[CopyTable], Policy]],
        shard_counts: Mapping[int, int],
        quarantine_share: float,
        listing: Listing | None = None,
    ) -> None:
        self.table = table
        self.index = index
        self.allocators = allocators
        self.ledger = Ledger(allocators)
        self._generations = generations
        self.shards = Shards(table, index, shard_counts)
        self.events = events
        self._telling = Telling(table, events, listing)
        #: Rises whenever something may have become evictable or free.
        self.changes = 0
        self.queues = Queues(table, make_policy)
        self.lapses = lapses
        self.links = Links(table, index, on_kept=self._kept, on_ready=self._ready)
        bytes_max = {
            tier: int(allocator.capacity_bytes * quarantine_share)
            for tier, allocator in allocators.items()
        }
        self.quarantine = Quarantine(table, bytes_max, self.drain)

    def queue(self, tier: Tier, record_bytes: int) -> Policy:
        """The eviction queue of one size class of one tier."""
        return self.queues.of(tier, record_bytes)

    def begin_many(self, tier: Tier, slots: Sequence[int], record_bytes: int) -> list[int]:
        """FREE -> FILLING in slots that the allocator has handed out; fewer than those: the table
        is full.

        The rows have no names as yet: `name_many` must precede `seal_many`.
        """
        if not slots:
            return []
        # Drawn first: the journal behind it can fail, and nothing may have changed then.
        generation = self._generations.next(len(slots))
        table, number = self.table, int(tier)
        rows = table.take_many(len(slots))
        for row, slot in zip(rows, slots, strict=False):
            table.tier[row] = number
            table.slot[row] = slot
            table.record[row] = record_bytes
        if rows:
            generations = range(generation, generation + len(rows))
            self._fire_many(rows, Event.RESERVE, generations=generations)
        return rows

    def name_many(
        self, rows: Sequence[int], namespace: int, shard: int, pages: PageColumns
    ) -> None:
        """Which pages FILLING rows are for. The numbers have passed `check_name`."""
        table = self.table
        columns = zip(rows, pages.keys, pages.lengths, pages.codecs, pages.lossy, strict=True)
        for row, key, length, codec, lossy in columns:
            table.set_key(row, key)
            table.length[row] = length
            table.codec[row] = codec
            table.lossy[row] = lossy
            table.namespace[row] = namespace
            table.shard[row] = shard

    @staticmethod
    def check_name(namespace: int, shard: int) -> None:
        """ValueError for a shard or namespace number that the table cannot hold."""
        if not (0 <= shard < 1 << 16 and 0 <= namespace < 1 << 32):
            raise ValueError(f"shard {shard} of namespace {namespace} does not fit the table")

    def is_there(self, head: int, *, lossy: bool, only_in: Tier | None = None) -> bool:
        """Of the page whose best copy is `head`, or NO_ROW: a copy that is as good as the new one,
        and stays, in any tier or in that one."""
        table = self.table
        return any(
            (only_in is None or table.tier[row] == only_in)
            and (lossy or not table.lossy[row])
            and self.is_lasting(row)
            for row in self.index.copies(head)
        )

    def seal_many(self, rows: Sequence[int], pages: PageColumns, heads: Sequence[int]) -> None:
        """FILLING -> SEALED: findable from now on, in place of a worse copy in the same tier and of
        one that will go with its slab.

        Rows of one tier and place, all of different pages; `heads`: the best copy of each page so
        far, or NO_ROW.
        """
        begin = 0
        # What takes the place of another copy has its turn alone, so that all goes in order.
        for at, head in enumerate(heads):
            if head != NO_ROW:
                self._seal_new(rows[begin:at], pages.part(begin, at))
                self._make_way(rows[at], head)
                self._seal_new(rows[at : at + 1], pages.part(at, at + 1))
                begin = at + 1
        self._seal_new(rows[begin:], pages.part(begin, len(rows)))

    def _make_way(self, row: int, head: int) -> None:
        """Retires what a copy takes the place of when it is sealed."""
        table = self.table
        for copy in self.index.copies(head):
            if table.tier[copy] == table.tier[row]:
                self._replace(copy, row)
            elif not self.is_lasting(copy):
                self.retire(copy)

    def _seal_new(self, rows: Sequence[int], pages: PageColumns) -> None:
        """Seals one page, or pages without another copy."""
        if not rows:
            return
        self._fire_many(rows, Event.SEAL)
        if len(rows) == 1:
            is_best = self.index.insert(rows[0])
        else:
            self.index.insert_many(np.array(rows))
            is_best = True
        if is_best:
            self._telling.sealed(rows, pages)
        self.links.join_many(rows, pages.keys, pages.parents)
        if len(rows) == 1:
            self._queue_of(rows[0]).admit(rows[0])
        else:
            self._admit(np.array(rows))
        self.lapses.note(rows, pages.ttls_ms)
        self._telling.change(EventKind.STORED, rows)

    def restore(self, rows: npt.NDArray[np.int64], generations: npt.NDArray[np.uint64]) -> None:
        """FREE -> SEALED for rows whose columns and links are written, in a tier without pages."""
        if not len(rows):
            return
        restore(self.table, rows, generations)
        tier = TIERS[self.table.tier[int(rows[0])]]
        nbytes = int(self.table.column("record")[rows].sum())
        self.ledger.move(tier, State.FREE, State.SEALED, nbytes, pages=len(rows))
        self.index.insert_many(rows)
        self._telling.restored(rows)
        self._admit(rows)
        self.changes += 1

    def _admit(self, rows: npt.NDArray[np.int64]) -> None:
        """Copies of one tier can be evicted from now on."""
        tier = TIERS[self.table.tier[int(rows[0])]]
        records = self.table.column("record")[rows]
        first = int(records[0])
        if (records == first).all():
            self.queue(tier, first).admit_many(rows)
            return
        for record_bytes in np.unique(records).tolist():
            self.queue(tier, record_bytes).admit_many(rows[records == record_bytes])

    def abandon(self, row: int) -> None:
        """FILLING -> FREE: its writer has stopped and will not write again."""
        self.abandon_many((row,))

    def abandon_many(self, rows: Sequence[int]) -> None:
        """As `abandon` for each of `rows`, of one tier."""
        if rows:
            self._fire_many(rows, Event.ABANDON)
            self._give_back(rows)

    def orphan(self, row: int) -> None:
        """FILLING -> QUARANTINED: its writer may still write, so no cap frees the slot."""
        self._fire_many((row,), Event.ORPHAN)

    def is_orphan(self, row: int) -> bool:
        return self.table.state[row] == State.QUARANTINED and row not in self.quarantine

    def retire(self, row: int) -> None:
        """SEALED -> RETIRING, and on to FREE when no lease names it."""
        self.leave(row)
        self.retire_left((row,))

    def retire_many(self, rows: Sequence[int]) -> int:
        """As `retire` for each of `rows`, of one tier; how many were their pages' last copies.
        Chain links of and between them are cut in one vector pass."""
        for row in rows:
            self._queue_of(row).forget(row)
        self.links.cut(np.array(rows, np.int64))
        return self.retire_left(rows)

    def leave(self, row: int) -> None:
        """A copy leaves its queue and its chain. `retire_left` must follow."""
        self._queue_of(row).forget(row)
        self.links.leave(row)

    def retire_left(self, rows: Sequence[int]) -> int:
        """As `retire_many`, for rows that have left their queues and chains."""
        if not rows:
            return 0
        were_last = self._unfind(rows)
        self._fire_many(rows, Event.RETIRE)
        leases = self.table.leases
        self.drain_many([row for row in rows if leases[row] == 0])
        return were_last

    def condemn(self, row: int, verdict: Verdict) -> None:
        """SEALED -> QUARANTINED: unfindable at once, its bytes kept for inspection if possible."""
        self.leave(row)
        self._unfind((row,))
        self._fire_many((row,), Event.CONDEMN)
        self.quarantine.add(row, verdict)
        self._let_go_if_lost(row)

    def drain(self, row: int) -> None:
        """RETIRING or QUARANTINED -> FREE, if nothing names the slot any more."""
        if self.table.leases[row] == 0:
            self.drain_many((row,))

    def drain_many(self, rows: Sequence[int]) -> None:
        """As `drain` for each of `rows`, of one tier and state, that no lease names."""
        if rows:
            self._fire_many(rows, Event.DRAIN)
            self._give_back(rows)

    def hold(self, row: int) -> None:
        self.table.leases[row] += 1

    def release(self, row: int) -> None:
        """Ends one lease; the last one lets the page be evicted, or its slot be reused."""
        assert self.table.leases[row] > 0
        self.table.leases[row] -= 1
        if self.table.leases[row] == 0:
            self._released(row)

    def _released(self, row: int) -> None:
        self.changes += 1
        state = self.table.state[row]
        if state == State.SEALED:
            self._ready(row)
        elif state == State.RETIRING:
            self.drain(row)
        elif state == State.QUARANTINED:
            self.quarantine.trim(Tier(self.table.tier[row]))
            self._let_go_if_lost(row)

    def _let_go_if_lost(self, row: int) -> None:
        """Nobody can look at a condemned copy whose slab was taken away: it must not keep that."""
        if row in self.quarantine and not self.is_lasting(row):
            self.quarantine.remove(row)

    def is_lasting(self, row: int) -> bool:
        """Its slab has not been taken away, so that it will not go with that."""
        allocator = self.allocators[TIERS[self.table.tier[row]]]
        return allocator.is_granted(allocator.slab_of(self.table.slot[row]))

    def reconsider(self, row: int) -> None:
        """What kept it from giving way, beside leases and pages after it, is over."""
        self._ready(row)

    def _kept(self, row: int) -> None:
        """It has got a page after it."""
        self._queue_of(row).keep(row)

    def _ready(self, row: int) -> None:
        """One of its reasons to stay has gone: it, and its sibling shards, may be candidates."""
        table = self.table
        children, leases, queued = table.children, table.leases, table.queued
        for at in self.shards.siblings(row):
            if not (children[at] or leases[at] or queued[at]):
                self._queue_of(at).ready(at)

    def hold_many(self, rows: npt.NDArray[np.int64]) -> None:
        """As `hold` for each of `rows`; a row may be named more than once."""
        np.add.at(self.table.column("leases"), rows, 1)

    def release_many(self, rows: npt.NDArray[np.int64]) -> None:
        """As `release` for each of `rows`; steps only where a last lease has a consequence."""
        table = self.table
        np.subtract.at(table.column("leases"), rows, 1)
        rows = np.unique(rows)
        leases = table.column("leases")[rows]
        assert not bool((leases < 0).any())
        rows = rows[leases == 0]
        self.changes += 1
        queued = (table.column("state")[rows] == State.SEALED) & (table.column("queued")[rows] != 0)
        namespaces = np.unique(table.column("namespace")[rows[queued]])
        if any(self.shards.are_several(int(number)) for number in namespaces):
            queued[:] = False  # a sibling may wait for this release
        for row in rows[~queued].tolist():
            self._released(row)

    def touch(self, rows: npt.NDArray[np.int64]) -> None:
        """The pages were used together; `rows` goes from the head of their chain to its tail."""
        table = self.table
        if len(rows) == 1:
            row = int(rows[0])
            table.uses[row] = min(table.uses[row], 254) + 1
            self._queue_of(row).touch(rows)
            return
        uses = table.column("uses")
        uses[rows] = np.minimum(uses[rows], 254) + 1
        while len(rows):
            tier, record = table.tier[int(rows[0])], table.record[int(rows[0])]
            together = (table.column("tier")[rows] == tier) & (
                table.column("record")[rows] == record
            )
            self.queue(Tier(tier), record).touch(rows[together])
            rows = rows[~together]

    def lead(self, row: int) -> None:
        """A page is about to come after this one, which is in use so."""
        table = self.table
        table.uses[row] = min(table.uses[row], 254) + 1
        self._queue_of(row).lead(row)

    def _replace(self, old: int, new: int) -> None:
        """Retires `old`, a copy of the same page in the same tier; `new` takes over its
        children."""
        self.links.inherit(old, new)
        self.retire(old)

    def _unfind(self, rows: Sequence[int]) -> int:
        """Nobody finds these copies of one tier any more; how many were their pages' last."""
        twin = self.table.twin
        nexts = [twin[row] - 1 for row in rows]
        were_best = self.index.remove_many(rows)
        found = list(zip(rows, nexts, were_best, strict=True))
        gone = [row for row, after, is_best in found if is_best and after == NO_ROW]
        self._telling.gone(gone)
        self._telling.next_best(
            [after for _, after, is_best in found if is_best and after != NO_ROW]
        )
        for row in self.shards.of_several(rows):
            for other in self.shards.siblings(row)[1:2]:
                self._ready(other)
        self._telling.change(EventKind.REMOVED, rows)
        return len(gone)

    def _queue_of(self, row: int) -> Policy:
        return self.queues.of(self.table.tier[row], self.table.record[row])

    def _fire_many(
        self, rows: Sequence[int], event: Event, *, generations: Sequence[int] = ()
    ) -> None:
        """Rows of one tier and state."""
        table, record = self.table, self.table.record
        before, after = fire_many(table, rows, event, generations=generations)
        total = sum([record[row] for row in rows])
        self.ledger.move(TIERS[table.tier[rows[0]]], before, after, total, pages=len(rows))

    def _give_back(self, rows: Sequence[int]) -> None:
        """Of one tier."""
        table, slot = self.table, self.table.slot
        self.allocators[TIERS[table.tier[rows[0]]]].free_many([slot[row] for row in rows])
        table.give_rows(rows)
        self.changes += len(rows)
