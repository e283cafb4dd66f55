"""Finds page copies by (namespace no., shard no., key), compared in full.

An open-addressing table of row numbers at a load of at most one half, probed linearly, with
backward-shift deletion (no tombstones, so probe lengths do not grow with age). The key is a hash
already but opaque, so its words are mixed once more with a seed that differs on every start. A page
with copies in several tiers has one entry: the copy of the best tier, from which the `twin` column
leads to the others.

In the index <=> SEALED: core/residents.py alone puts rows in and takes them out, the other parts of
the store search. The caller holds the store's lock.
"""

from __future__ import annotations

from collections.abc import Iterable

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
#: Of the words of a key.
_FACTORS = np.array([1, _C1, _C2, _C3], np.uint64)
#: Below so many keys the scalar loop is faster than the vector one.
_VECTOR_FROM = 12
#: Below so many only the hashes are vectors: what follows is short for each.
_LOOP_BELOW = 64


class Index:
    """An index over the SEALED rows of `table`."""

    def __init__(self, table: CopyTable, *, seed: int) -> None:
        self._table = table
        self._bits = max(4, (2 * table.rows_max - 1).bit_length())
        self._shift = 64 - self._bits
        self._slot_mask = (1 << self._bits) - 1
        self._entries_np: npt.NDArray[np.int32] = np.zeros(1 << self._bits, np.int32)
        self._entries = self._entries_np.data
        #: Of the rows that are here: where a search for the page begins. Zeros cost no memory.
        self._homes_np: npt.NDArray[np.uint32] = np.zeros(table.rows_max, np.uint32)
        self._homes = self._homes_np.data
        self._seed = seed & _MASK
        self.pages = 0

    @property
    def nbytes(self) -> int:
        return self._entries_np.nbytes + self._homes_np.nbytes

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
        if n < _VECTOR_FROM:
            probe = self._probe
            few = [probe(namespace, shard, (a, b, c, d))[1] for a, b, c, d in words.tolist()]
            return np.array(few, np.int64)
        found = np.full(n, NO_ROW, np.int64)
        table = self._table
        at = self._places(np.uint64(self._salt(namespace, shard)), words)
        if n < _LOOP_BELOW:
            probe_from = self._probe_from
            entries = self._entries_np[at]
            for i in np.flatnonzero(entries).tolist():
                a, b, c, d = words[i].tolist()
                found[i] = probe_from(int(at[i]), namespace, shard, (a, b, c, d))[1]
            return found
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
        home = self._place(table.namespace[row], table.shard[row], table.words(row))
        self._homes[row] = home
        at, head = self._probe_from(home, table.namespace[row], table.shard[row], table.words(row))
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

    def remove_many(self, rows: Iterable[int]) -> list[bool]:
        """Makes copies unfindable, one after the other; whether each was the best one of its page
        by then.

        Copies in other tiers stay findable.
        """
        entries, homes, twin, mask = self._entries, self._homes, self._table.twin, self._slot_mask
        were_best = []
        for row in rows:
            at = homes[row]
            while (entry := entries[at]) and entry != row + 1:
                at = (at + 1) & mask
            following, twin[row] = twin[row], 0
            if not entry:
                self._unlink(row, following)
            elif following:
                entries[at] = following
            else:
                self._delete_entry(at)
                self.pages -= 1
            were_best.append(entry != 0)
        return were_best

    def _unlink(self, row: int, following: int) -> None:
        """Takes a copy that is not the best one out of its page's list."""
        table = self._table
        _, here = self._probe_from(
            self._homes[row], table.namespace[row], table.shard[row], table.words(row)
        )
        while here != NO_ROW and table.twin[here] - 1 != row:
            here = table.twin[here] - 1
        assert here != NO_ROW, "the row is not in the index"
        table.twin[here] = following

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
        at = self._places(self._salts(rows), table.key_words_np[rows])
        self._homes_np[rows] = at
        self.pages += len(rows)
        if len(rows) < _LOOP_BELOW:
            places, mask = self._entries, self._slot_mask
            for row, place in zip(rows.tolist(), at.tolist(), strict=True):
                while places[place]:
                    place = (place + 1) & mask
                places[place] = row + 1
            return
        todo = np.arange(len(rows))
        while len(todo):
            empty = entries[at[todo]] == 0
            # Of rows that want the same empty place the last one gets it; the others go on.
            entries[at[todo[empty]]] = rows[todo[empty]] + 1
            todo = todo[entries[at[todo]] != rows[todo] + 1]
            if not len(todo):
                break
            at[todo] = (at[todo] + 1) & self._slot_mask

    def _delete_entry(self, at: int) -> None:
        """Backward shift: moves later entries of the probe run into the hole where they may go."""
        entries, homes, mask = self._entries, self._homes, self._slot_mask
        hole, here = at, (at + 1) & mask
        while entry := entries[here]:
            # The entry may fill the hole unless its home lies strictly after the hole, cyclically.
            if ((here - homes[entry - 1]) & mask) >= ((here - hole) & mask):
                entries[hole] = entry
                hole = here
            here = (here + 1) & mask
        entries[hole] = 0

    def _probe(
        self, namespace: int, shard: int, words: tuple[int, int, int, int]
    ) -> tuple[int, int]:
        """(table position, row) of the entry, or (first empty position, NO_ROW)."""
        return self._probe_from(self._place(namespace, shard, words), namespace, shard, words)

    def _probe_from(
        self, at: int, namespace: int, shard: int, words: tuple[int, int, int, int]
    ) -> tuple[int, int]:
        """`_probe` from where the search begins."""
        entries, table, mask = self._entries, self._table, self._slot_mask
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
        mixed = words[0] + words[1] * _C1 + words[2] * _C2 + words[3] * _C3
        mixed = (mixed + self._salt(namespace, shard)) & _MASK
        return (((mixed ^ (mixed >> 32)) * _C5) & _MASK) >> self._shift

    def _places(
        self, salts: np.uint64 | npt.NDArray[np.uint64], words: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.int64]:
        """`_place` over an array of keys, shape (n, 4), of one salt or of one each."""
        mixed: npt.NDArray[np.uint64] = words.dot(_FACTORS)
        mixed += salts
        mixed ^= mixed >> np.uint64(32)
        mixed *= np.uint64(_C5)
        return (mixed >> np.uint64(self._shift)).astype(np.int64)

    def _salt(self, namespace: int, shard: int) -> int:
        """What the hashes of a place begin with."""
        return (((namespace << 16) | shard) * _C4 + self._seed) & _MASK

    def _salts(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
        """`_salt` of each of `rows`."""
        names = self._table.column("namespace")[rows].astype(np.uint64)
        names <<= np.uint64(16)
        names |= self._table.column("shard")[rows]
        names *= np.uint64(_C4)
        names += np.uint64(self._seed)
        return names
