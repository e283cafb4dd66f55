"""Finds page copies by (namespace no., shard no., key), compared in full.

An open-addressing table of row numbers at a load of at most one half, probed linearly, with
backward-shift deletion (no tombstones, so probe lengths do not grow with age). The key is a hash
already but opaque, so its words are mixed once more with a seed that differs on every start. A page
with copies in several tiers has one entry: the copy of the best tier, from which the `twin` column
leads to the others.

In the index <=> SEALED. Called by core/store.py alone, which holds the lock.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.core.table import NO_ROW, CopyTable

__all__ = ["Index"]

_MASK = (1 << 64) - 1
# Odd 64-bit constants: any will do that have no structure in common.
_C1 = 0x9E3779B97F4A7C15
_C2 = 0xC2B2AE3D27D4EB4F
_C3 = 0x165667B19E3779F9
_C4 = 0xD6E8FEB86659FD93
_C5 = 0xA0761D6478BD642F
#: Below so many keys the scalar loop is faster than the vector one.
_VECTOR_FROM = 12


class Index:
    """An index over the SEALED rows of `table`."""

    def __init__(self, table: CopyTable, *, seed: int) -> None:
        self._table = table
        self._bits = max(4, (2 * table.rows_max - 1).bit_length())
        self._shift = 64 - self._bits
        self._slot_mask = (1 << self._bits) - 1
        self._entries_np: npt.NDArray[np.int32] = np.zeros(1 << self._bits, np.int32)
        self._entries = self._entries_np.data
        self._seed = seed & _MASK
        self.pages = 0

    @property
    def nbytes(self) -> int:
        return self._entries_np.nbytes

    def find(self, namespace: int, shard: int, key: bytes) -> int:
        """Row of the best copy, or NO_ROW."""
        words = np.frombuffer(key, np.uint64).tolist()
        return self._probe(namespace, shard, (words[0], words[1], words[2], words[3]))[1]

    def find_many(
        self, namespace: int, shard: int, keys: npt.NDArray[np.uint8]
    ) -> npt.NDArray[np.int64]:
        """Rows of the best copies of `keys`, shape (n, 32) uint8; NO_ROW where there is none."""
        n = len(keys)
        words = np.ascontiguousarray(keys).view(np.uint64)
        found = np.full(n, NO_ROW, np.int64)
        if n < _VECTOR_FROM:
            for i, (a, b, c, d) in enumerate(words.tolist()):
                found[i] = self._probe(namespace, shard, (a, b, c, d))[1]
            return found
        table = self._table
        at = self._places(namespace, shard, words)
        todo = np.arange(n)
        while len(todo):
            rows = self._entries_np[at].astype(np.int64) - 1
            there = rows != NO_ROW
            todo, at, rows = todo[there], at[there], rows[there]
            same = (table.key_words_np[rows] == words[todo]).all(axis=1)
            same &= table.column("namespace")[rows] == namespace
            same &= table.column("shard")[rows] == shard
            found[todo[same]] = rows[same]
            other = ~same
            todo = todo[other]
            at = (at[other] + 1) & self._slot_mask
        return found

    def insert(self, row: int) -> bool:
        """Makes a sealed copy findable; whether it is the best one of its page.

        A second copy in the same tier is a programmer's error.
        """
        table = self._table
        at, head = self._probe(table.namespace[row], table.shard[row], table.words(row))
        if head == NO_ROW:
            self._entries[at] = row + 1
            self.pages += 1
            return True
        tier = table.tier[row]
        before, here = NO_ROW, head
        while here != NO_ROW and table.tier[here] < tier:
            before, here = here, table.twin[here] - 1
        assert here == NO_ROW or table.tier[here] != tier, "two copies of a page in one tier"
        table.twin[row] = here + 1
        if before == NO_ROW:
            self._entries[at] = row + 1
        else:
            table.twin[before] = row + 1
        return before == NO_ROW

    def remove(self, row: int) -> bool:
        """Makes a copy unfindable; whether it was the best one of its page.

        Copies in other tiers stay findable.
        """
        table = self._table
        at, head = self._probe(table.namespace[row], table.shard[row], table.words(row))
        assert head != NO_ROW, "the row is not in the index"
        following = table.twin[row]
        table.twin[row] = 0
        if head != row:
            while table.twin[head] - 1 != row:
                head = table.twin[head] - 1
                assert head != NO_ROW, "the row is not in the index"
            table.twin[head] = following
            return False
        if following:
            self._entries[at] = following
        else:
            self._delete_entry(at)
            self.pages -= 1
        return True

    def copies(self, head: int) -> list[int]:
        """All rows of a page, best tier first, from the row that `find` gave."""
        rows = []
        while head != NO_ROW:
            rows.append(head)
            head = self._table.twin[head] - 1
        return rows

    def copy_in(self, head: int, tier: int) -> int:
        """The copy in `tier` of the page whose best copy is `head`, or NO_ROW."""
        for row in self.copies(head):
            if self._table.tier[row] == tier:
                return row
        return NO_ROW

    def insert_many(self, rows: npt.NDArray[np.int64]) -> None:
        """As `insert` for sealed rows of pages that have no entry yet, each of another page."""
        table, entries = self._table, self._entries_np
        at = np.empty(len(rows), np.int64)
        names = table.column("namespace")[rows].astype(np.int64) << 16 | table.column("shard")[rows]
        for name in np.unique(names).tolist():
            of_it = names == name
            words = table.key_words_np[rows[of_it]]
            at[of_it] = self._places(name >> 16, name & 0xFFFF, words)
        todo = np.arange(len(rows))
        while len(todo):
            empty = entries[at[todo]] == 0
            # Of rows that want the same empty place the last one gets it; the others go on.
            entries[at[todo[empty]]] = rows[todo[empty]] + 1
            todo = todo[entries[at[todo]] != rows[todo] + 1]
            at[todo] = (at[todo] + 1) & self._slot_mask
        self.pages += len(rows)

    def _delete_entry(self, at: int) -> None:
        """Backward shift: moves later entries of the probe run into the hole where they may go."""
        entries, table, mask = self._entries, self._table, self._slot_mask
        hole, here = at, (at + 1) & mask
        while entries[here]:
            row = entries[here] - 1
            home = self._place(table.namespace[row], table.shard[row], table.words(row))
            # The entry may fill the hole unless its home lies strictly after the hole, cyclically.
            if ((here - home) & mask) >= ((here - hole) & mask):
                entries[hole] = row + 1
                hole = here
            here = (here + 1) & mask
        entries[hole] = 0

    def _probe(
        self, namespace: int, shard: int, words: tuple[int, int, int, int]
    ) -> tuple[int, int]:
        """(table position, row) of the entry, or (first empty position, NO_ROW)."""
        entries, table, mask = self._entries, self._table, self._slot_mask
        at = self._place(namespace, shard, words)
        while entry := entries[at]:
            row = entry - 1
            if (
                table.words(row) == words
                and table.namespace[row] == namespace
                and table.shard[row] == shard
            ):
                return at, row
            at = (at + 1) & mask
        return at, NO_ROW

    def _place(self, namespace: int, shard: int, words: tuple[int, int, int, int]) -> int:
        salt = ((namespace << 16) | shard) * _C4 + self._seed
        mixed = (words[0] + words[1] * _C1 + words[2] * _C2 + words[3] * _C3 + salt) & _MASK
        return (((mixed ^ (mixed >> 32)) * _C5) & _MASK) >> self._shift

    def _places(
        self, namespace: int, shard: int, words: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.int64]:
        """`_place` over an array of keys, shape (n, 4)."""
        salt = np.uint64((((namespace << 16) | shard) * _C4 + self._seed) & _MASK)
        mixed = words[:, 0] + words[:, 1] * np.uint64(_C1)
        mixed += words[:, 2] * np.uint64(_C2)
        mixed += words[:, 3] * np.uint64(_C3)
        mixed += salt
        mixed ^= mixed >> np.uint64(32)
        mixed *= np.uint64(_C5)
        return (mixed >> np.uint64(self._shift)).astype(np.int64)
