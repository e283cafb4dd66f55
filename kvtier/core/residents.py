"""A copy's way through its life with all books kept: lifecycle, ledger, index, chain links, queue
and events.

Every change of a row's state in a store goes through one of these methods, so that no caller can
keep half of the books. The caller holds the store's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from kvtier.core.events import EventKind, EventLog
from kvtier.core.generations import Generations
from kvtier.core.index import Index
from kvtier.core.ledger import Ledger
from kvtier.core.lifecycle import STATES, Event, State, fire, restore
from kvtier.core.links import Links
from kvtier.core.listing import Listed, ListedMany, Listing
from kvtier.core.page import KEY_BYTES, NO_SUM, TIERS, PageMeta, Tier
from kvtier.core.policy.base import Policy
from kvtier.core.quarantine import Quarantine
from kvtier.core.slabs import SlabAllocator
from kvtier.core.table import NO_ROW, CopyTable

__all__ = ["Residents"]

_NO_KEY = bytes(KEY_BYTES)


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
        make_policy: Mapping[Tier, Callable[[CopyTable], Policy]],
        shard_count: Callable[[int], int],
        quarantine_share: float,
        listing: Listing | None = None,
    ) -> None:
        self.table = table
        self.index = index
        self.allocators = allocators
        self.ledger = Ledger(allocators)
        self.events = events
        self._generations = generations
        self._make_policy = make_policy
        self._shard_count = shard_count
        self._listing = listing
        #: Rises whenever something may have become evictable or free.
        self.changes = 0
        self._queues: dict[tuple[Tier, int], Policy] = {}
        self.links = Links(table, index, on_kept=self._kept, on_ready=self._ready)
        bytes_max = {
            tier: int(allocator.capacity_bytes * quarantine_share)
            for tier, allocator in allocators.items()
        }
        self.quarantine = Quarantine(table, bytes_max, self.drain)

    def queue(self, tier: Tier, record_bytes: int) -> Policy:
        """The eviction queue of one size class of one tier."""
        key = (tier, record_bytes)
        if key not in self._queues:
            self._queues[key] = self._make_policy[tier](self.table)
        return self._queues[key]

    def begin(self, tier: Tier, slot: int, record_bytes: int) -> int:
        """FREE -> FILLING in a slot that the allocator has handed out; NO_ROW: the table is full.

        The row has no name as yet: `name` must precede `seal`.
        """
        # Drawn first: the journal behind it can fail, and nothing may have changed then.
        generation = self._generations.next()
        table = self.table
        row = table.take_row(_NO_KEY)
        if row == NO_ROW:
            return NO_ROW
        table.tier[row] = tier
        table.slot[row] = slot
        table.record[row] = record_bytes
        self._fire(row, Event.RESERVE, generation=generation)
        return row

    def name(self, row: int, namespace: int, shard: int, meta: PageMeta) -> None:
        """Which page a FILLING row is for. The numbers have passed `check_name`."""
        table = self.table
        table.set_key(row, meta.key)
        table.length[row] = meta.length
        table.codec[row] = meta.codec
        table.lossy[row] = meta.lossy
        table.namespace[row] = namespace
        table.shard[row] = shard

    @staticmethod
    def check_name(namespace: int, shard: int) -> None:
        """ValueError for a shard or namespace number that the table cannot hold."""
        if not (0 <= shard < 1 << 16 and 0 <= namespace < 1 << 32):
            raise ValueError(f"shard {shard} of namespace {namespace} does not fit the table")

    def is_there(self, head: int, meta: PageMeta, only_in: Tier | None = None) -> bool:
        """Of the page whose best copy is `head`, or NO_ROW: a copy that is as good as the new one,
        and stays, in any tier or in that one."""
        table = self.table
        return any(
            (only_in is None or table.tier[row] == only_in)
            and (meta.lossy or not table.lossy[row])
            and self.is_lasting(row)
            for row in self.index.copies(head)
        )

    def seal(self, row: int, meta: PageMeta, head: int) -> None:
        """FILLING -> SEALED: findable from now on, in place of a worse copy in the same tier and of
        one that will go with its slab. `head`: the best copy of the page so far, or NO_ROW."""
        table = self.table
        for copy in self.index.copies(head):
            if table.tier[copy] == table.tier[row]:
                self._replace(copy, row)
            elif not self.is_lasting(copy):
                self.retire(copy)
        self._fire(row, Event.SEAL)
        is_best = self.index.insert(row)
        if is_best and self._listing is not None:
            self._listing.put(self._listed(row, meta))
        self.links.join(row, meta.parent)
        self._queue_of(row).admit(row)
        self._record(EventKind.STORED, row)

    def restore(
        self, tier: Tier, rows: npt.NDArray[np.int64], generations: npt.NDArray[np.uint64]
    ) -> None:
        """FREE -> SEALED for rows whose columns and links are written, in a tier without pages."""
        restore(self.table, rows, generations)
        self.ledger.restored(tier, len(rows), int(self.table.column("record")[rows].sum()))
        self.index.insert_many(rows)
        if self._listing is not None:
            self._listing.put_many(self._listed_many(tier, rows))
        for record_bytes in np.unique(self.table.column("record")[rows]).tolist():
            queue = self.queue(tier, record_bytes)
            queue.admit_many(rows[self.table.column("record")[rows] == record_bytes])
        self.changes += 1

    def abandon(self, row: int) -> None:
        """FILLING -> FREE: its writer has stopped and will not write again."""
        self._fire(row, Event.ABANDON)
        self._give_back(row)

    def orphan(self, row: int) -> None:
        """FILLING -> QUARANTINED: its writer may still write, so no cap frees the slot."""
        self._fire(row, Event.ORPHAN)

    def is_orphan(self, row: int) -> bool:
        return self.table.state[row] == State.QUARANTINED and row not in self.quarantine

    def retire(self, row: int) -> None:
        """SEALED -> RETIRING, and on to FREE when no lease names it."""
        self._unfind(row)
        self._fire(row, Event.RETIRE)
        self.drain(row)

    def condemn(self, row: int) -> None:
        """SEALED -> QUARANTINED: unfindable at once, its bytes kept for inspection if possible."""
        self._unfind(row)
        self._fire(row, Event.CONDEMN)
        self.quarantine.add(row)
        self._let_go_if_lost(row)

    def drain(self, row: int) -> None:
        """RETIRING or QUARANTINED -> FREE, if nothing names the slot any more."""
        if self.table.leases[row] == 0:
            self._fire(row, Event.DRAIN)
            self._give_back(row)

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

    def _kept(self, row: int) -> None:
        """It has got a page after it."""
        self._queue_of(row).keep(row)

    def _ready(self, row: int) -> None:
        """One of its reasons to stay has gone: it, and its sibling shards, may be candidates."""
        table = self.table
        for at in self.siblings(row):
            if table.children[at] == 0 and table.leases[at] == 0 and table.queued[at] == 0:
                self._queue_of(at).ready(at)

    def is_sharded(self, namespace: int) -> bool:
        return self._shard_count(namespace) > 1

    def siblings(self, row: int) -> list[int]:
        """The row and the rows of its other shards in the same tier."""
        table = self.table
        namespace = table.namespace[row]
        rows = [row]
        count = self._shard_count(namespace)
        if count > 1:
            key = table.key(row)
            for shard in range(count):
                if shard != table.shard[row]:
                    other = self.index.copy_in(
                        self.index.find(namespace, shard, key), table.tier[row]
                    )
                    if other != NO_ROW:
                        rows.append(other)
        return rows

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
        if any(self._shard_count(int(number)) > 1 for number in namespaces):
            queued[:] = False  # a sibling may wait for this release
        for row in rows[~queued].tolist():
            self._released(row)

    def touch(self, rows: npt.NDArray[np.int64]) -> None:
        """The pages were used together; `rows` goes from the head of their chain to its tail."""
        table = self.table
        uses = table.column("uses")
        uses[rows] = np.minimum(uses[rows], 254) + 1
        while len(rows):
            tier, record = table.tier[int(rows[0])], table.record[int(rows[0])]
            together = (table.column("tier")[rows] == tier) & (
                table.column("record")[rows] == record
            )
            self.queue(Tier(tier), record).touch(rows[together])
            rows = rows[~together]

    def retire_many(self, rows: npt.NDArray[np.int64]) -> None:
        """Retires sealed rows; chain links of and between them are cut in one vector pass."""
        self.links.cut(rows)
        for row in rows.tolist():
            self.retire(row)

    def _replace(self, old: int, new: int) -> None:
        """Retires `old`, a copy of the same page in the same tier; `new` takes over its
        children."""
        self.links.inherit(old, new)
        self.retire(old)

    def _unfind(self, row: int) -> None:
        shards = self.siblings(row)[1:]
        next_best = self.table.twin[row] - 1
        was_best = self.index.remove(row)
        if was_best and self._listing is not None:
            self._list_next(row, next_best)
        self._queue_of(row).forget(row)
        self.links.leave(row)
        if shards:
            self._ready(shards[0])
        self._record(EventKind.REMOVED, row)

    def _list_next(self, row: int, head: int) -> None:
        """The copy that was listed has gone: the next one is listed, if there is one."""
        assert self._listing is not None, "asked for by those who have one"
        table = self.table
        if head == NO_ROW:
            self._listing.remove(table.namespace[row], table.shard[row], table.key(row))
        else:
            self._listing.put(self._listed(head))

    def _listed(self, row: int, meta: PageMeta | None = None) -> Listed:
        """`meta` is known when a copy is sealed, and not of one that was there before."""
        table = self.table
        return Listed(
            table.namespace[row],
            table.shard[row],
            table.key(row),
            table.tier[row],
            table.codec[row],
            bool(table.lossy[row]),
            table.slot[row],
            table.length[row],
            table.generation[row],
            meta is not None,
            meta.payload_sum if meta else NO_SUM,
            meta.origin_sum if meta else NO_SUM,
        )

    def _listed_many(self, tier: Tier, rows: npt.NDArray[np.int64]) -> ListedMany:
        names = ("namespace", "shard", "codec", "lossy", "slot", "length", "generation")
        columns = {name: self.table.column(name)[rows] for name in names}
        return ListedMany(tier=tier, key_words=self.table.key_words_np[rows], **columns)

    def _queue_of(self, row: int) -> Policy:
        return self.queue(TIERS[self.table.tier[row]], self.table.record[row])

    def _fire(self, row: int, event: Event, *, generation: int = 0) -> None:
        table = self.table
        before = STATES[table.state[row]]
        after = fire(table, row, event, generation=generation)
        self.ledger.move(TIERS[table.tier[row]], before, after, table.record[row])

    def _give_back(self, row: int) -> None:
        tier = TIERS[self.table.tier[row]]
        self.allocators[tier].free(self.table.slot[row])
        self.table.give_row(row)
        self.changes += 1

    def _record(self, kind: EventKind, row: int) -> None:
        table = self.table
        self.events.record(
            kind, TIERS[table.tier[row]], table.namespace[row], table.shard[row], table.key(row)
        )
