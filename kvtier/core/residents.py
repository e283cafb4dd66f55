"""A copy's way through its life with all books kept: lifecycle, ledger, index, chain links, queue
and events.

Every change of a row's state in a store goes through one of these methods, so that no caller can
keep half of the books. The caller holds the store's lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvtier.core.events import EventKind, EventLog
from kvtier.core.generations import Generations
from kvtier.core.index import Index
from kvtier.core.ledger import Ledger
from kvtier.core.lifecycle import Event, State, fire
from kvtier.core.page import PageMeta, Tier
from kvtier.core.policy.base import Policy
from kvtier.core.slabs import SlabAllocator
from kvtier.core.table import NO_ROW, CopyTable

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
        make_policy: Callable[[CopyTable], Policy],
        quarantine_share: float,
    ) -> None:
        self.table = table
        self.index = index
        self.allocators = allocators
        self.ledger = Ledger(allocators)
        self.events = events
        self._generations = generations
        self._make_policy = make_policy
        self._queues: dict[tuple[Tier, int], Policy] = {}
        self._quarantine: dict[Tier, deque[int]] = {tier: deque() for tier in allocators}
        self._quarantine_bytes_max = {
            tier: int(allocator.capacity_bytes * quarantine_share)
            for tier, allocator in allocators.items()
        }

    def queue(self, tier: Tier, record_bytes: int) -> Policy:
        """The eviction queue of one size class of one tier."""
        key = (tier, record_bytes)
        if key not in self._queues:
            self._queues[key] = self._make_policy(self.table)
        return self._queues[key]

    def begin(
        self, tier: Tier, slot: int, record_bytes: int, namespace: int, shard: int, meta: PageMeta
    ) -> int:
        """FREE -> FILLING in a slot that the allocator has handed out; NO_ROW when the table is
        full."""
        # Drawn first: the journal behind it can fail, and nothing may have changed then.
        generation = self._generations.next()
        table = self.table
        row = table.take_row(meta.key)
        if row == NO_ROW:
            return NO_ROW
        table.tier[row] = tier
        table.slot[row] = slot
        table.record[row] = record_bytes
        table.length[row] = meta.length
        table.codec[row] = meta.codec
        table.lossy[row] = meta.lossy
        table.namespace[row] = namespace
        table.shard[row] = shard
        self._fire(row, Event.RESERVE, generation=generation)
        return row

    def seal(self, row: int, parent_key: bytes) -> None:
        """FILLING -> SEALED: findable from now on."""
        table = self.table
        self._fire(row, Event.SEAL)
        self.index.insert(row)
        if parent_key:
            parent = self.in_tier(
                self.index.find(table.namespace[row], table.shard[row], parent_key), table.tier[row]
            )
            if parent not in (NO_ROW, row):
                table.parent[row] = parent + 1
                table.children[parent] += 1
        self._queue_of(row).admit(row)
        self._record(EventKind.STORED, row)

    def in_tier(self, head: int, tier: int) -> int:
        """The copy in `tier` of the page whose best copy is `head`, or NO_ROW."""
        for row in self.index.copies(head):
            if self.table.tier[row] == tier:
                return row
        return NO_ROW

    def abandon(self, row: int) -> None:
        """FILLING -> FREE: its writer has stopped and will not write again."""
        self._fire(row, Event.ABANDON)
        self._give_back(row)

    def orphan(self, row: int) -> None:
        """FILLING -> QUARANTINED: its writer may still write."""
        self._fire(row, Event.ORPHAN)
        self._quarantine[Tier(self.table.tier[row])].append(row)

    def retire(self, row: int) -> None:
        """SEALED -> RETIRING, and on to FREE when no lease names it."""
        self._unfind(row)
        self._fire(row, Event.RETIRE)
        self.drain(row)

    def condemn(self, row: int) -> None:
        """SEALED -> QUARANTINED: unfindable at once, its bytes kept for inspection while there is
        room."""
        tier = Tier(self.table.tier[row])
        self._unfind(row)
        self._fire(row, Event.CONDEMN)
        quarantine = self._quarantine[tier]
        quarantine.append(row)
        over = self.ledger.bytes_in(tier, State.QUARANTINED) - self._quarantine_bytes_max[tier]
        for _ in range(len(quarantine)):
            if over <= 0:
                break
            oldest = quarantine.popleft()
            if self.table.leases[oldest]:
                quarantine.append(oldest)
                continue
            over -= self.table.record[oldest]
            self.drain(oldest)

    def drain(self, row: int) -> None:
        """RETIRING or QUARANTINED -> FREE, if nothing names the slot any more."""
        if self.table.leases[row] == 0:
            self._fire(row, Event.DRAIN)
            self._give_back(row)

    def hold(self, row: int) -> None:
        self.table.leases[row] += 1

    def release(self, row: int) -> None:
        """Ends one lease; the last one lets the page be evicted, or its slot be reused."""
        table = self.table
        assert table.leases[row] > 0
        table.leases[row] -= 1
        if table.leases[row] == 0:
            state = table.state[row]
            if state == State.SEALED:
                if table.children[row] == 0:
                    self._queue_of(row).ready(row)
            elif state == State.RETIRING:
                self.drain(row)

    def hold_many(self, rows: npt.NDArray[np.int64]) -> None:
        """As `hold` for each of `rows`; a row may be named more than once."""
        np.add.at(self.table.column("leases"), rows, 1)

    def release_many(self, rows: npt.NDArray[np.int64]) -> None:
        """As `release` for each of `rows`, without a step a row: leases can be large."""
        table = self.table
        np.subtract.at(table.column("leases"), rows, 1)
        rows = np.unique(rows)
        leases = table.column("leases")[rows]
        assert not bool((leases < 0).any())
        rows = rows[leases == 0]
        states = table.column("state")[rows]
        unqueued = (table.column("queued")[rows] == 0) & (table.column("children")[rows] == 0)
        for row in rows[(states == State.SEALED) & unqueued].tolist():
            self._queue_of(row).ready(row)
        for row in rows[states == State.RETIRING].tolist():
            self.drain(row)

    def touch(self, rows: npt.NDArray[np.int64]) -> None:
        """The pages were used together; `rows` goes from the head of their chain to its tail."""
        table = self.table
        while len(rows):
            tier, record = table.tier[int(rows[0])], table.record[int(rows[0])]
            together = (table.column("tier")[rows] == tier) & (
                table.column("record")[rows] == record
            )
            self.queue(Tier(tier), record).touch(rows[together])
            rows = rows[~together]

    def retire_many(self, rows: npt.NDArray[np.int64]) -> None:
        """Retires sealed rows, tails of chains first (they carry the lower stamps)."""
        order = np.argsort(self.table.column("stamp")[rows], kind="stable")
        for row in rows[order].tolist():
            self.retire(row)

    def _unfind(self, row: int) -> None:
        table = self.table
        self.index.remove(row)
        self._queue_of(row).forget(row)
        if parent := table.parent[row]:
            table.parent[row] = 0
            table.children[parent - 1] -= 1
            if table.children[parent - 1] == 0 and table.state[parent - 1] == State.SEALED:
                self._queue_of(parent - 1).ready(parent - 1)
        if table.children[row]:
            table.orphan_children(np.array([row]))
            table.children[row] = 0
        self._record(EventKind.REMOVED, row)

    def _queue_of(self, row: int) -> Policy:
        return self.queue(Tier(self.table.tier[row]), self.table.record[row])

    def _fire(self, row: int, event: Event, *, generation: int = 0) -> None:
        table = self.table
        before = State(table.state[row])
        after = fire(table, row, event, generation=generation)
        self.ledger.move(Tier(table.tier[row]), before, after, table.record[row])

    def _give_back(self, row: int) -> None:
        tier = Tier(self.table.tier[row])
        self.allocators[tier].free(self.table.slot[row])
        self.table.give_row(row)

    def _record(self, kind: EventKind, row: int) -> None:
        table = self.table
        self.events.record(
            kind, Tier(table.tier[row]), table.namespace[row], table.shard[row], table.key(row)
        )
