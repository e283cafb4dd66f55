"""Which copies are the shards of one page: evicted together, since a page without one of its shards
is no page.

The caller holds the store's lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtier.core.index import Index
from kvtier.core.table import NO_ROW, CopyTable

__all__ = ["Shards"]


class Shards:
    def __init__(self, table: CopyTable, index: Index, counts: Mapping[int, int]) -> None:
        """`counts`: shards of the pages of each open namespace number."""
        self._table = table
        self._index = index
        self._counts = counts

    def are_several(self, namespace: int) -> bool:
        return self._counts.get(namespace, 1) > 1

    def siblings(self, row: int) -> Sequence[int]:
        """The row and the rows of its other shards in the same tier."""
        table = self._table
        namespace = table.namespace[row]
        count = self._counts.get(namespace, 1)
        if count == 1:
            return (row,)
        rows, key = [row], table.key(row)
        for shard in range(count):
            if shard != table.shard[row]:
                head = self._index.find(namespace, shard, key)
                other = self._index.copy_in(head, table.tier[row])
                if other != NO_ROW:
                    rows.append(other)
        return rows

    def of_several(self, rows: Sequence[int]) -> list[int]:
        """Of these rows those whose pages have several shards."""
        namespace = self._table.namespace
        namespaces = [namespace[row] for row in rows]
        several = {number for number in set(namespaces) if self.are_several(number)}
        if not several:
            return []
        return [row for row, of in zip(rows, namespaces, strict=True) if of in several]
