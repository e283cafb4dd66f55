"""Copies that are being made of other copies: from which, and whether that one still counts.

A move may become findable only while its source is: a page that was deleted, condemned or bumped
while it was being copied must not come back by the copy. The caller holds the store's lock.
"""

from __future__ import annotations

from kvtier.core.handles import Reading
from kvtier.core.lifecycle import State
from kvtier.core.table import CopyTable

__all__ = ["Moves"]


class Moves:
    def __init__(self, table: CopyTable) -> None:
        self._table = table
        self._sources: dict[int, tuple[int, int]] = {}  # target row -> source row, its generation

    def may_begin(self, source: Reading) -> bool:
        """The source can be found. What a delete has retired must not be copied any more: the copy
        would be younger than the delete, and so come back with a restart."""
        return self._is_sealed(source.row, source.ref.generation)

    def begin(self, target: int, source: Reading) -> None:
        self._sources[target] = (source.row, source.ref.generation)

    def end(self, target: int) -> bool:
        """The target is sealed or given back; whether it was a move."""
        return self._sources.pop(target, None) is not None

    def is_lost(self, target: int) -> bool:
        """It is a move whose source can no longer be found."""
        source = self._sources.get(target)
        return source is not None and not self._is_sealed(*source)

    def under_way(self) -> list[int]:
        """Target rows of the moves that could still be sealed."""
        return [row for row, source in self._sources.items() if self._is_sealed(*source)]

    def _is_sealed(self, row: int, generation: int) -> bool:
        table = self._table
        return table.state[row] == State.SEALED and table.generation[row] == generation
