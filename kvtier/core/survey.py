"""What lies where, for those who walk rows and not keys: scrubs, the cleaner, inspection, tests.

A part of the store, under the store's lock but where it says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvtier.core.handles import Reading
from kvtier.core.ledger import LedgerError
from kvtier.core.lifecycle import State
from kvtier.core.page import Codec, PageRef, Tier
from kvtier.core.quarantine import Verdict
from kvtier.core.table import NO_ROW

if TYPE_CHECKING:
    from kvtier.core.store import Store

__all__ = ["Survey"]

Keys = npt.NDArray[np.uint8]  # shape (n, 32)


class Survey:
    def __init__(self, store: Store) -> None:
        self._store = store

    def acquire_row(self, row: int) -> tuple[Reading, int, int, bytes] | None:
        """(Reading, namespace, shard, key) of a row if it is SEALED: scrubs walk rows, not keys."""
        with self._store._lock:
            if self._store._table.state[row] != State.SEALED:
                return None
            table = self._store._table
            return self._store._read(row), table.namespace[row], table.shard[row], table.key(row)

    def sealed_rows(self, tier: Tier) -> npt.NDArray[np.int64]:
        """Rows SEALED in a tier at this moment."""
        with self._store._lock:
            return self._store._table.rows_where(tier=tier, state=State.SEALED)

    def in_tier(self, namespace: int, shard: int, keys: Keys, tier: Tier) -> npt.NDArray[np.bool_]:
        """Which of `keys` have a copy in `tier` that stays: not one in a slab that was taken away.

        An array of False when the namespace ended.
        """
        with self._store._lock:
            if namespace not in self._store._shard_counts:
                return np.zeros(len(keys), bool)
            rows = self._store._index.find_many(namespace, shard, keys)
            heads = self._store._table.column("tier")[rows] == tier
            copies = np.where((rows != NO_ROW) & heads, rows, NO_ROW)
            for i in np.flatnonzero((rows != NO_ROW) & ~heads).tolist():
                copies[i] = self._store._index.copy_in(int(rows[i]), tier)
            found: npt.NDArray[np.bool_] = copies != NO_ROW
            allocator = self._store._residents.allocators.get(tier)
            if allocator is not None and allocator.closed:
                slabs = self._store._table.column("slot")[copies] // np.uint64(allocator.slab_units)
                found &= ~np.isin(slabs, list(allocator.closed))
            return found

    def uncopied_rows(
        self,
        tier: Tier,
        *,
        coldest_bytes: int = 1 << 62,
        hottest_bytes: int = 1 << 62,
        uses_min: int = 0,
        rows_max: int = 1 << 31,
        but: npt.NDArray[np.uint64] | None = None,
    ) -> npt.NDArray[np.int64]:
        """Of the coldest `coldest_bytes` of `tier` and its hottest `hottest_bytes`, rows without a
        copy in a lower tier, the coldest first. The generations `but` count as if they were not
        there.

        Advice: read without the lock, so that a look at a million rows keeps nobody waiting.
        """
        table = self._store._table
        rows = table.rows_where(tier=tier, state=State.SEALED)
        if but is not None and len(but):
            rows = rows[~np.isin(table.column("generation")[rows], but)]
        rows = rows[np.argsort(table.column("stamp")[rows])]
        up_to = np.cumsum(table.column("record")[rows])
        within = up_to <= np.uint64(max(0, coldest_bytes))
        if len(rows) and up_to[-1] > hottest_bytes:
            within &= up_to > up_to[-1] - np.uint64(hottest_bytes)
        rows = rows[within]
        wanted = (table.column("twin")[rows] == 0) & (table.column("uses")[rows] >= uses_min)
        found: npt.NDArray[np.int64] = rows[wanted][:rows_max]
        return found

    def pages_by_namespace(self) -> dict[int, int]:
        """Sealed copies of every namespace number that has some (one vector scan)."""
        with self._store._lock:
            table = self._store._table
            sealed = table.live("state") == State.SEALED
            numbers, counts = np.unique(table.live("namespace")[sealed], return_counts=True)
            return dict(zip(numbers.tolist(), counts.tolist(), strict=True))

    def quarantined_slots(self) -> list[tuple[Tier, int]]:
        """Where the condemned copies lie whose bytes are kept."""
        with self._store._lock:
            table = self._store._table
            return [
                (Tier(table.tier[row]), table.slot[row])
                for row in self._store._residents.quarantine
            ]

    def quarantined(self) -> list[tuple[PageRef, int, int, bytes, int, Codec, Verdict]]:
        """(ref, namespace, shard, key, length, codec, why) of the condemned copies whose bytes are
        kept, the oldest of each tier first."""
        with self._store._lock:
            table = self._store._table
            return [
                (
                    self._store._ref(row),
                    table.namespace[row],
                    table.shard[row],
                    table.key(row),
                    table.length[row],
                    Codec(table.codec[row]),
                    self._store._residents.quarantine.verdict(row),
                )
                for row in self._store._residents.quarantine
            ]

    def hold_quarantined(self, ref: PageRef) -> Reading | None:
        """A Reading of a condemned copy, for inspection alone; None when it is not kept."""
        with self._store._lock:
            row = self._store._row_of(ref)
            if row == NO_ROW or self._store._table.state[row] != State.QUARANTINED:
                return None
            return self._store._read(row) if row in self._store._residents.quarantine else None

    def clear_quarantine(self, refs: Sequence[PageRef] | None) -> int:
        """Gives the slots of condemned copies back, of all or of those named; how many."""
        with self._store._lock:
            quarantine = self._store._residents.quarantine
            if refs is None:
                rows = list(quarantine)
            else:
                rows = [row for row in map(self._store._row_of, refs) if row != NO_ROW]
                rows = [row for row in dict.fromkeys(rows) if row in quarantine]
            return sum(quarantine.remove(row) for row in rows)

    def check(self) -> None:
        """Raises LedgerError unless every book of the store agrees with every other."""
        with self._store._lock:
            table, index = self._store._table, self._store._index
            self._store._residents.ledger.check(table)
            self._store.grants.check()
            sealed = table.rows_where(state=State.SEALED)
            for row in sealed.tolist():
                head = index.find(table.namespace[row], table.shard[row], table.key(row))
                if row not in index.copies(head):
                    raise LedgerError(f"row {row} is SEALED and cannot be found")
            parents = table.column("parent")[sealed].astype(np.int64) - 1
            linked = np.bincount(parents[parents >= 0], minlength=table.rows_max)
            children = table.column("children")[sealed]
            if bool((linked[sealed] != children).any()):
                raise LedgerError("children counts disagree with parent links")
