"""How many pages and bytes of a tier are in which state, counted at each transition.

`check` holds these counters against a full scan of the table and against the allocator's own books:
three accounts that are kept apart on purpose. The caller holds the store's lock.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtier.core.lifecycle import State
from kvtier.core.page import Tier
from kvtier.core.slabs import SlabAllocator
from kvtier.core.table import CopyTable

__all__ = ["Ledger", "LedgerError", "TierCounts"]

_OCCUPIED = (State.FILLING, State.SEALED, State.RETIRING, State.QUARANTINED)


class LedgerError(AssertionError):
    """The books of a tier disagree: a slot leaked or was used twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCounts:
    """One tier at one moment. Bytes are of whole slots."""

    capacity_bytes: int
    granted_bytes: int
    free_bytes: int
    filling: int
    sealed: int
    retiring: int
    quarantined: int
    used_bytes: int
    quarantined_bytes: int
    pinned: int


class Ledger:
    def __init__(self, allocators: dict[Tier, SlabAllocator]) -> None:
        self._allocators = allocators
        self._pages = {tier: [0] * len(State) for tier in allocators}
        self._bytes = {tier: [0] * len(State) for tier in allocators}

    def move(
        self, tier: Tier, before: State, after: State, record_bytes: int, *, pages: int = 1
    ) -> None:
        """So many pages, of `record_bytes` together, went from one state to another."""
        counts, sizes = self._pages[tier], self._bytes[tier]
        if before is not State.FREE:
            counts[before] -= pages
            sizes[before] -= record_bytes
            assert counts[before] >= 0
            assert sizes[before] >= 0
        if after is not State.FREE:
            counts[after] += pages
            sizes[after] += record_bytes

    def pages(self, tier: Tier) -> int:
        """Copies of a tier in any state: each has a row of the table."""
        return sum(self._pages[tier])

    def bytes_in(self, tier: Tier, state: State) -> int:
        return self._bytes[tier][state]

    def counts(self, tier: Tier, table: CopyTable) -> TierCounts:
        pages, sizes = self._pages[tier], self._bytes[tier]
        allocator = self._allocators[tier]
        used = sum(sizes)
        pinned = int(np.count_nonzero((table.live("leases") > 0) & (table.live("tier") == tier)))
        return TierCounts(
            capacity_bytes=allocator.capacity_bytes,
            granted_bytes=allocator.granted * allocator.slab_bytes,
            free_bytes=allocator.capacity_bytes - used,
            filling=pages[State.FILLING],
            sealed=pages[State.SEALED],
            retiring=pages[State.RETIRING],
            quarantined=pages[State.QUARANTINED],
            used_bytes=used,
            quarantined_bytes=sizes[State.QUARANTINED],
            pinned=pinned,
        )

    def check(self, table: CopyTable) -> None:
        """Raises LedgerError unless all books agree: free + used by state = capacity, in every
        tier."""
        for tier, allocator in self._allocators.items():
            for state in _OCCUPIED:
                rows = table.rows_where(tier=tier, state=state)
                scanned = len(rows), int(table.column("record")[rows].sum())
                booked = self._pages[tier][state], self._bytes[tier][state]
                if scanned != booked:
                    raise LedgerError(f"{tier.name} {state.name}: scan {scanned}, ledger {booked}")
            books = allocator.counts()
            total = books.ungranted + books.unbound + books.used + books.free + books.tails
            if total != allocator.capacity_bytes:
                raise LedgerError(f"{tier.name}: {books} is {total} of {allocator.capacity_bytes}")
            if books.used != sum(self._bytes[tier]):
                raise LedgerError(
                    f"{tier.name}: slots of {books.used} bytes are taken, pages hold"
                    f" {sum(self._bytes[tier])}"
                )
            self._check_overlap(tier, table)

    def _check_overlap(self, tier: Tier, table: CopyTable) -> None:
        mask = (table.live("tier") == tier) & (table.live("state") != State.FREE)
        order = np.argsort(table.live("slot")[mask])
        start = table.live("slot")[mask][order].astype(np.int64) * 4096
        end = start + table.live("record")[mask][order].astype(np.int64)
        if len(start) and bool((start[1:] < end[:-1]).any()):
            raise LedgerError(f"{tier.name}: two pages share a slot")
