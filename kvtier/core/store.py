"""The store: which pages are where, who may use them, and who gives way. One lock, held for table
edits alone.

Bytes are moved outside the lock by whoever holds a Filling, a Reading or a grant. No lock but this
one is taken in core, and the only call out of it is the generation journal (once in 2**20
reservations). Every public method is safe from any thread; batches are atomic against each other.
`pins`, `grants`, `usage`, `forecasts`, `watching`, `room`, `survey` and `snapshots` are parts of
the store under the same lock.

Time is an argument (monotonic seconds); nothing here reads a clock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from kvtier.core.counters import Counters
from kvtier.core.events import EventKind, EventLog
from kvtier.core.forecasts import Forecasts
from kvtier.core.generations import Generations
from kvtier.core.grants import Grants
from kvtier.core.handles import Filling, Reading
from kvtier.core.index import Index
from kvtier.core.lapses import Lapses
from kvtier.core.ledger import TierCounts
from kvtier.core.lifecycle import State
from kvtier.core.listing import Listing
from kvtier.core.moves import Moves
from kvtier.core.page import Codec, DeleteCode, GetCode, PageMeta, PageRef, PutCode, Tier
from kvtier.core.page_columns import PageColumns
from kvtier.core.pins import Pins
from kvtier.core.placement import Placement
from kvtier.core.policy.base import Policy
from kvtier.core.policy.lru import Clock, LruTailFirst
from kvtier.core.quarantine import NO_VERDICT, Verdict
from kvtier.core.residents import Residents
from kvtier.core.room import Room
from kvtier.core.slabs import SlabAllocator
from kvtier.core.snapshots import Snapshots
from kvtier.core.store_config import StoreConfig
from kvtier.core.survey import Survey
from kvtier.core.table import NO_ROW, CopyTable
from kvtier.core.usage import Usage
from kvtier.core.watching import Watching

__all__ = ["Counters", "Store"]

Keys = npt.NDArray[np.uint8]  # shape (n, 32)
Codes = npt.NDArray[np.uint8]
MakePolicy = Callable[[CopyTable, Clock], Policy]


def _with_clock(
    make: MakePolicy | Mapping[Tier, MakePolicy], tier: Tier, clock: Clock
) -> Callable[[CopyTable], Policy]:
    of_tier = make[tier] if isinstance(make, Mapping) else make
    return lambda table: of_tier(table, clock)


class Store:
    def __init__(
        self,
        config: StoreConfig,
        *,
        tiers: dict[Tier, SlabAllocator],
        generations: Generations,
        make_policy: MakePolicy | Mapping[Tier, MakePolicy] = LruTailFirst,
        listing: Listing | None = None,
    ) -> None:
        """`make_policy`: for all tiers, or one for each. `listing` hears of every findable page."""
        self.boot_id = config.boot_id
        self._lock = threading.Lock()
        self._shard_counts: dict[int, int] = {}  # of the namespace numbers that are open
        self._table = CopyTable(config.pages_max)
        self._index = Index(self._table, seed=config.seed)
        self._events = EventLog(config.events_max)
        clock = Clock()
        self._residents = Residents(
            table=self._table,
            index=self._index,
            allocators=tiers,
            generations=generations,
            events=self._events,
            lapses=Lapses(self._table, clock),
            make_policy={tier: _with_clock(make_policy, tier, clock) for tier in tiers},
            shard_counts=self._shard_counts,
            quarantine_share=config.quarantine_share,
            listing=listing,
        )
        self._listing = listing
        self._placement = Placement(self._residents, config.tier_pages_max)
        self._ended: set[int] = set()  # numbers whose pages `sweep` has to look for
        self._sweeping: npt.NDArray[np.int64] = np.empty(0, np.int64)  # and rows it has found
        self._counters = Counters()
        self._generations = generations
        self._moves = Moves(self._table)
        self.survey = Survey(self)
        self.room = Room(self._lock, self._residents)
        self.snapshots = Snapshots(
            self._lock, self._residents, self._moves, generations, config.tier_pages_max
        )
        self.pins = Pins(self._lock, self._residents, self._shard_counts)
        self.watching = Watching(self._lock, self._residents, self._shard_counts)
        self.usage = Usage(self._lock, self._residents, self._shard_counts, self._counters)
        self.forecasts = Forecasts(self._lock, self._residents, self._shard_counts, clock)
        self.grants = Grants(
            self._lock,
            self._residents,
            placement=self._placement,
            open_namespaces=self._shard_counts,
            counters=self._counters,
            config=config,
        )

    # -- namespaces --------------------------------------------------------------------------------

    def open_namespace(self, namespace: int, shard_count: int, *, generation: int = 1) -> None:
        """Must precede every other use of a namespace number. `generation` is for the listing."""
        with self._lock:
            self._shard_counts[namespace] = shard_count
            if self._listing is not None:
                self._listing.open_namespace(namespace, shard_count, generation)

    def end_namespace(self, namespace: int) -> None:
        """Every page of the namespace is a miss from now on; `sweep` frees their slots."""
        with self._lock:
            if self._shard_counts.pop(namespace, None) is not None:
                self._ended.add(namespace)
                if self._listing is not None:
                    self._listing.end_namespace(namespace)
                self._events.record(EventKind.BUMPED, None, namespace, 0, b"")

    def sweep(self, pages_max: int) -> int:
        """Retires up to `pages_max` pages of ended namespaces; how many. 0: all done."""
        with self._lock:
            if not len(self._sweeping) and self._ended:
                # One scan an end: nothing is sealed under a number that has ended.
                ended = np.isin(self._table.live("namespace"), np.fromiter(self._ended, np.uint32))
                self._sweeping = np.flatnonzero(ended & (self._table.live("state") == State.SEALED))
                self._ended.clear()
                self._residents.links.cut(self._sweeping)
            rows, self._sweeping = self._sweeping[:pages_max], self._sweeping[pages_max:]
            # Rows can have been evicted, and used again, since the scan.
            for row in rows.tolist():
                if (
                    self._table.state[row] == State.SEALED
                    and self._table.namespace[row] not in self._shard_counts
                ):
                    self._residents.retire(row)
            return len(rows)

    # -- finding and reading -----------------------------------------------------------------------

    def lookup(
        self,
        namespace: int,
        shard: int,
        keys: Keys,
        *,
        is_counted: bool = True,
        is_exact: bool = False,
    ) -> tuple[Codes, Codes]:
        """(GetCode, Tier or 0) for each of `keys`, shape (n, 32). HIT needs every shard of the
        family.

        STALE for all when the namespace number has ended. Does not count as a use, and with
        `is_counted` False not as a lookup either. With `is_exact` a best copy that is lossy counts
        as none.
        """
        with self._lock:
            count = self._shard_counts.get(namespace)
            if count is None:
                return np.full(len(keys), GetCode.STALE, np.uint8), np.zeros(len(keys), np.uint8)
            rows = self._index.find_many(namespace, shard, keys)
            lossy = self._table.column("lossy")
            hit = rows != NO_ROW
            for other in range(count):
                there = rows if other == shard else self._index.find_many(namespace, other, keys)
                hit &= there != NO_ROW
                if is_exact:
                    hit &= lossy[there] == 0
            tiers = np.where(hit, self._table.column("tier")[rows], np.uint8(0))
            hits = int(np.count_nonzero(hit))
            if is_counted:
                self._counters.lookup_hits += hits
                self._counters.lookup_misses += len(keys) - hits
            codes = np.where(hit, np.uint8(GetCode.HIT), np.uint8(GetCode.MISS))
            return codes, tiers

    def acquire(
        self, namespace: int, shard: int, keys: Keys, *, is_use: bool = True
    ) -> list[Reading | GetCode]:
        """A Reading of the best copy of each key, or MISS, or STALE."""
        with self._lock:
            if namespace not in self._shard_counts:
                return [GetCode.STALE] * len(keys)
            rows = self._index.find_many(namespace, shard, keys)
            if is_use:
                self.usage.touch(rows[rows != NO_ROW])
            return [GetCode.MISS if row == NO_ROW else self._read(row) for row in rows.tolist()]

    def acquire_next(
        self, ref: PageRef, namespace: int, shard: int, key: bytes
    ) -> Reading | GetCode:
        """A Reading of the copy to try after `ref`, of the same tier (put anew) or a lower one."""
        with self._lock:
            for row in self._index.copies(self._index.find(namespace, shard, key)):
                if self._table.tier[row] >= ref.tier and self._ref(row) != ref:
                    return self._read(row)
            return GetCode.MISS

    # -- writing -----------------------------------------------------------------------------------

    def reserve(
        self,
        namespace: int,
        shard: int,
        meta: PageMeta,
        record_bytes: int,
        *,
        tier: Tier = Tier.HOST,
        source: Reading | None = None,
    ) -> Filling | PutCode:
        """A slot for a page, or EXISTS, STALE_GENERATION, BUSY. May evict.

        A page that is in any tier already is EXISTS, unless it is exact where the present ones are
        lossy: then it takes the place of the lossy one in its tier when it is sealed. With a
        `source`, a copy in another tier, only a copy in `tier` counts, and this and `seal` say
        STALE_GENERATION if the source can be found no more.
        """
        with self._lock:
            is_lost = source is not None and not self._moves.may_begin(source)
            if is_lost or namespace not in self._shard_counts:
                self._counters.stale_commits += 1
                return PutCode.STALE_GENERATION
            self._residents.check_name(namespace, shard)
            head = self._index.find(namespace, shard, meta.key)
            only_in = tier if source else None
            if self._residents.is_there(head, lossy=meta.lossy, only_in=only_in):
                self._counters.exists += 1
                return PutCode.EXISTS
            self._use_parent(namespace, shard, meta.parent)
            row = self._placement.begin(tier, record_bytes)
            if row == NO_ROW:
                self._counters.busy += 1
                return PutCode.BUSY
            self._residents.name_many((row,), namespace, shard, PageColumns.of((meta,)))
            if source is not None:
                self._moves.begin(row, source)
            return Filling(self, row=row, ref=self._ref(row), namespace=namespace, meta=meta)

    def condemn(self, ref: PageRef, verdict: Verdict = NO_VERDICT) -> bool:
        """Takes a corrupt copy out of sight, keeping its bytes. False: that allocation is gone
        already."""
        with self._lock:
            row = self._row_of(ref)
            if row == NO_ROW or self._table.state[row] != State.SEALED:
                return False
            self._residents.condemn(row, verdict)
            self._counters.condemned += 1
            return True

    def settle_orphan(self, ref: PageRef) -> bool:
        """The writer of an orphaned slot has stopped for sure: the slot is free. False: not one.

        A grant is none: `grants` knows when its holder has stopped.
        """
        with self._lock:
            row = self._row_of(ref)
            is_orphan = row != NO_ROW and self._residents.is_orphan(row)
            if not is_orphan or self.grants.has(ref.generation):
                return False
            self._residents.drain(row)
            return True

    def delete(self, namespace: int, shard: int, keys: Keys) -> Codes:
        """DeleteCode for each key; every copy in every tier is gone when this returns."""
        with self._lock:
            if namespace not in self._shard_counts:
                return np.full(len(keys), DeleteCode.STALE, np.uint8)
            codes = np.full(len(keys), DeleteCode.ABSENT, np.uint8)
            # The tail of a chain first: then no child has to be looked for.
            for i in range(len(keys) - 1, -1, -1):
                head = self._index.find(namespace, shard, keys[i].tobytes())
                for row in self._index.copies(head):
                    self._residents.retire(row)
                    codes[i] = DeleteCode.DELETED
                    self._counters.deleted += 1
            return codes

    # -- tiers and counts --------------------------------------------------------------------------

    def status(self) -> dict[Tier, TierCounts]:
        """Counts of every tier, taken together."""
        with self._lock:
            ledger = self._residents.ledger
            return {tier: ledger.counts(tier, self._table) for tier in self._residents.allocators}

    def counters(self) -> Counters:
        with self._lock:
            self._counters.evicted = self._placement.evicted
            self._counters.evicted_last = self._placement.evicted_last
            self._counters.slabs_moved = self._placement.slabs_moved
            return Counters(**{name: getattr(self._counters, name) for name in Counters.__slots__})

    # -- for handles -------------------------------------------------------------------------------

    def _seal(self, filling: Filling) -> PutCode:
        with self._lock:
            row, meta, ref = filling.row, filling.meta, filling.ref
            table = self._table
            is_lost, is_move = self._moves.is_lost(row), self._moves.end(row)
            if table.generation[row] != ref.generation or table.state[row] != State.FILLING:
                self._counters.stale_commits += 1
                return PutCode.STALE_GENERATION
            is_lost = is_lost or not self._residents.is_lasting(row)
            if is_lost or filling.namespace not in self._shard_counts:
                self._residents.abandon(row)
                self._counters.stale_commits += 1
                return PutCode.STALE_GENERATION
            head = self._index.find(filling.namespace, table.shard[row], meta.key)
            only_in = ref.tier if is_move else None
            if self._residents.is_there(head, lossy=meta.lossy, only_in=only_in):
                self._residents.abandon(row)
                self._counters.exists += 1
                return PutCode.EXISTS
            self._residents.seal_many((row,), PageColumns.of((meta,)), (head,))
            self._counters.stored += 1
            return PutCode.STORED

    def _abandon(self, filling: Filling) -> None:
        with self._lock:
            if self._table.generation[filling.row] == filling.ref.generation:
                self._moves.end(filling.row)
                self._residents.abandon(filling.row)

    def _orphan(self, filling: Filling) -> None:
        with self._lock:
            if self._table.generation[filling.row] == filling.ref.generation:
                self._moves.end(filling.row)
                self._residents.orphan(filling.row)

    def _read_again(self, reading: Reading) -> Reading:
        with self._lock:
            return self._read(reading.row)

    def _release(self, row: int) -> None:
        with self._lock:
            self._residents.release(row)

    # -- inside the lock ---------------------------------------------------------------------------

    def _use_parent(self, namespace: int, shard: int, parent: bytes) -> None:
        """A page that goes on is in use: it must not be what gives way for the page after it."""
        row = self._index.find(namespace, shard, parent) if parent else NO_ROW
        if row != NO_ROW:
            self._residents.lead(row)

    def _ref(self, row: int) -> PageRef:
        table = self._table
        return PageRef(self.boot_id, Tier(table.tier[row]), table.slot[row], table.generation[row])

    def _row_of(self, ref: PageRef) -> int:
        """The row of an allocation that still lives, or NO_ROW (a vector scan: for rare calls)."""
        if ref.boot_id != self.boot_id:
            return NO_ROW
        rows = np.flatnonzero(self._table.live("generation") == ref.generation)
        live = [r for r in rows.tolist() if self._table.state[r] != State.FREE]
        return live[0] if live and self._ref(live[0]) == ref else NO_ROW

    def _read(self, row: int) -> Reading:
        self._residents.hold(row)
        table = self._table
        return Reading(
            self,
            row=row,
            ref=self._ref(row),
            length=table.length[row],
            codec=Codec(table.codec[row]),
            lossy=bool(table.lossy[row]),
        )
