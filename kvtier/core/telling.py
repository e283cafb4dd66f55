"""Who is told of what became findable or left: the listing, of best copies alone, and the watchers.

Rows of a call are of one tier. The caller holds the store's lock.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.core.events import EventKind, EventLog
from kvtier.core.listing import Listed, ListedMany, Listing
from kvtier.core.page import SUM_BYTES, TIERS
from kvtier.core.page_columns import PageColumns, rows_of
from kvtier.core.table import CopyTable

__all__ = ["Telling"]

#: Below so many pages one by one is faster.
_VECTOR_FROM = 8
_LISTED = ("namespace", "shard", "codec", "lossy", "slot", "length", "generation")


class Telling:
    def __init__(self, table: CopyTable, events: EventLog, listing: Listing | None) -> None:
        self._table = table
        self._events = events
        self._listing = listing

    def sealed(self, rows: Sequence[int], pages: PageColumns) -> None:
        """These are their pages' best copies from now on; their makers have told their sums."""
        if self._listing is None:
            return
        if len(rows) < _VECTOR_FROM:
            sums = zip(rows, pages.payload_sums, pages.origin_sums, strict=True)
            for row, payload, origin in sums:
                listed = self._listed(row)._replace(
                    has_sums=True, payload_sum=payload, origin_sum=origin
                )
                self._listing.put(listed)
            return
        self._listing.put_many(
            self._listed_many(np.array(rows))._replace(
                payload_sum=rows_of(pages.payload_sums, SUM_BYTES),
                origin_sum=rows_of(pages.origin_sums, SUM_BYTES),
            )
        )

    def restored(self, rows: npt.NDArray[np.int64]) -> None:
        """These are their pages' only copies in a store that begins."""
        if self._listing is not None:
            self._listing.fill(self._listed_many(rows))

    def gone(self, rows: Sequence[int]) -> None:
        """The last copies of their pages have gone."""
        table = self._table
        if self._listing is None:
            return
        if len(rows) < _VECTOR_FROM:
            for row in rows:
                self._listing.remove(table.namespace[row], table.shard[row], table.key(row))
            return
        which = np.array(rows)
        self._listing.remove_many(
            table.column("namespace")[which],
            table.column("shard")[which],
            table.key_words_np[which],
        )

    def next_best(self, rows: Sequence[int]) -> None:
        """These became their pages' best copies because better ones have gone."""
        if self._listing is not None:
            for row in rows:
                self._listing.put(self._listed(row))

    def change(self, kind: EventKind, rows: Sequence[int]) -> None:
        """An event for each copy."""
        table, events = self._table, self._events
        if not events.is_watched:
            events.skip(len(rows))
            return
        for row in rows:
            tier = TIERS[table.tier[row]]
            events.record(
                kind,
                tier,
                table.namespace[row],
                table.shard[row],
                table.key(row),
                lossy=bool(table.lossy[row]),
            )

    def _listed_many(self, rows: npt.NDArray[np.int64]) -> ListedMany:
        return ListedMany(
            self._table.tier[int(rows[0])],
            key_words=self._table.key_words_np[rows],
            **{name: self._table.column(name)[rows] for name in _LISTED},
        )

    def _listed(self, row: int) -> Listed:
        table = self._table
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
        )
