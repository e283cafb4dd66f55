"""One row for each page copy, in columns: a million pages cost their columns and no Python objects.

Rows are handed out densely and reused last-freed first, so that memory follows the number of live
pages and not the size of the arena: the columns are zero pages of the operating system until a row
is first used. Vector work reads the `*_np` arrays, scalar work the memoryviews over the same bytes
(three times faster an element).

State and generation are written by core/lifecycle.py alone. The caller holds the store's lock.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.core.lifecycle import State
from kvtier.core.page import KEY_BYTES, Tier

__all__ = ["BYTES_PER_ROW", "NO_ROW", "CopyTable"]

NO_ROW = -1
_FREE = State.FREE

#: name -> (numpy type, what it holds)
_COLUMNS: dict[str, tuple[type[np.generic], str]] = {
    "state": (np.uint8, "lifecycle.State"),
    "tier": (np.uint8, "page.Tier"),
    "codec": (np.uint8, "page.Codec"),
    "lossy": (np.uint8, "1: not the bytes its maker computed"),
    "uses": (np.uint8, "times used since it was stored, up to 255"),
    "shard": (np.uint16, "shard number"),
    "namespace": (np.uint32, "namespace number: one family in one generation"),
    "leases": (np.int32, "pins and readers that name the slot"),
    "generation": (np.uint64, "allocation number"),
    "slot": (np.uint64, "place in the tier, in units of 4 KiB"),
    "length": (np.uint64, "payload bytes"),
    "record": (np.uint64, "bytes of the slot: header and padded payload"),
    "stamp": (np.uint64, "logical time of the last use"),
    "queued": (np.uint64, "its policy's mark of a row that waits to be named, 0: none"),
    "parent": (np.int32, "row of the page before it in this tier + 1, 0: none"),
    "children": (np.int32, "rows whose parent this is"),
    "twin": (np.int32, "row of the same page's copy in the next lower tier + 1, 0: none"),
    "link": (np.int32, "next free row + 1, while free"),
}
#: What a row of a new copy has nothing of.
_CLEARED = (
    "uses",
    "shard",
    "namespace",
    "length",
    "queued",
    "parent",
    "children",
    "twin",
    "link",
)
BYTES_PER_ROW = KEY_BYTES + sum(np.dtype(kind).itemsize for kind, _ in _COLUMNS.values())


class CopyTable:
    """Columns for up to `rows_max` page copies."""

    state: memoryview
    tier: memoryview
    codec: memoryview
    lossy: memoryview
    uses: memoryview
    shard: memoryview
    namespace: memoryview
    leases: memoryview
    generation: memoryview
    slot: memoryview
    length: memoryview
    record: memoryview
    stamp: memoryview
    queued: memoryview
    parent: memoryview
    children: memoryview
    twin: memoryview
    link: memoryview

    def __init__(self, rows_max: int) -> None:
        if not 0 < rows_max < 2**31:
            raise ValueError(f"rows_max must be in 1 .. 2**31 - 1, not {rows_max}")
        self.rows_max = rows_max
        self._arrays: dict[str, npt.NDArray[Any]] = {}
        for name, (kind, _) in _COLUMNS.items():
            array = np.zeros(rows_max, kind)
            self._arrays[name] = array
            setattr(self, name, array.data)
        self.key_np: npt.NDArray[np.uint8] = np.zeros((rows_max, KEY_BYTES), np.uint8)
        self.key_words_np: npt.NDArray[np.uint64] = self.key_np.view(np.uint64)
        self._keys = self.key_np.reshape(-1).data
        self._cleared = [getattr(self, name) for name in _CLEARED]
        self._words = self.key_words_np.reshape(-1).data
        self._first_free = 0  # row + 1
        self._used_before = 0  # rows from here on were never used
        self.rows_live = 0

    def column(self, name: str) -> npt.NDArray[Any]:
        """The column as an array, for vector work."""
        return self._arrays[name]

    def live(self, name: str) -> npt.NDArray[Any]:
        """The part of a column that was ever used; rows in it may be FREE."""
        return self._arrays[name][: self._used_before]

    def key(self, row: int) -> bytes:
        return bytes(self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES])

    def set_key(self, row: int, key: bytes) -> None:
        self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES] = key

    def words(self, row: int) -> tuple[int, int, int, int]:
        """The key as four native 64-bit words."""
        at = row * 4
        words = self._words
        return words[at], words[at + 1], words[at + 2], words[at + 3]

    def take_many(self, count: int) -> list[int]:
        """FREE rows for `count` new copies; fewer when all are taken.

        The key and what a new copy has nothing of are zeros, and no lease names the row. State,
        generation, tier, slot, record, codec, lossy and stamp are those of its last copy: whoever
        takes it writes them.
        """
        rows: list[int] = []
        state, leases, words, cleared = self.state, self.leases, self._words, self._cleared
        while len(rows) < count and (row := self._next_row()) != NO_ROW:
            assert state[row] == _FREE
            assert leases[row] == 0
            words[row * 4] = words[row * 4 + 1] = words[row * 4 + 2] = words[row * 4 + 3] = 0
            for column in cleared:
                column[row] = 0
            rows.append(row)
        self.rows_live += len(rows)
        return rows

    def _next_row(self) -> int:
        """The row to take next, or NO_ROW."""
        if self._first_free:
            row = self._first_free - 1
            self._first_free = self.link[row]
        elif self._used_before < self.rows_max:
            row = self._used_before
            self._used_before += 1
        else:
            row = NO_ROW
        return row

    def take_rows(self, count: int) -> npt.NDArray[np.int64]:
        """Rows that were never used, for `count` new copies, in order; fewer when there are not so
        many."""
        rows = np.arange(self._used_before, min(self._used_before + count, self.rows_max))
        self._used_before += len(rows)
        self.rows_live += len(rows)
        return rows

    def give_rows(self, rows: Collection[int]) -> None:
        """Takes back rows whose state is FREE."""
        state, link = self.state, self.link
        for row in rows:
            assert state[row] == _FREE
            link[row] = self._first_free
            self._first_free = row + 1
        self.rows_live -= len(rows)

    def rows_where(self, *, tier: Tier | None = None, state: State) -> npt.NDArray[np.int64]:
        """Rows in a state (and tier): a vector scan over all rows ever used."""
        # Once: who reads without the lock may see the table grow meanwhile.
        end = self._used_before
        mask = self._arrays["state"][:end] == state
        if tier is not None:
            mask &= self._arrays["tier"][:end] == tier
        return np.flatnonzero(mask)

    def orphan_children(self, rows: npt.NDArray[np.int64]) -> None:
        """Cuts the parent link of every child of `rows` (one vector scan)."""
        parents = self.live("parent")
        children = np.flatnonzero(np.isin(parents, rows + 1) & (parents != 0))
        parents[children] = 0
