"""Which page comes after which, among the copies of one tier.

A copy is linked to its parent's copy in the same tier, whichever of the two was sealed first: a
page whose parent is not there waits for it, under the parent's key. So the tail of a chain can be
given up before its head wherever both are. The book of the waiting is bounded; past the bound a
page stays without a link, as if its parent had never been there.

The caller holds the store's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import numpy as np
import numpy.typing as npt

from kvtier.core.index import Index
from kvtier.core.lifecycle import State
from kvtier.core.table import NO_ROW, CopyTable

__all__ = ["Links", "Waiting"]

#: (tier, namespace, shard, key of a page that is not there) -> rows that wait for it, each with the
#: generation that it had.
Waiting = dict[tuple[int, int, int, bytes], list[tuple[int, int]]]

_WAITING_MAX = 65_536
#: Pages that are looked through for a ring; only pages that meet their parent late ask for it.
_CHAIN_MAX = 4_096


class Links:
    """`on_kept(row)` hears of a page that has got a first page after it since it was joined,
    `on_ready(row)` of one that has lost the last."""

    def __init__(
        self,
        table: CopyTable,
        index: Index,
        *,
        on_kept: Callable[[int], None],
        on_ready: Callable[[int], None],
    ) -> None:
        self._table = table
        self._index = index
        self._on_kept = on_kept
        self._on_ready = on_ready
        self._waiting: Waiting = {}
        self._waiting_count = 0

    def join_many(
        self, rows: Sequence[int], keys: Sequence[bytes], parents: Sequence[bytes]
    ) -> None:
        """Copies of one place have become findable, one after the other: links each to its parent,
        and those that wait to it. They are admitted to their queue only after this."""
        table, children = self._table, self._table.children
        first = rows[0]
        tier, namespace, shard = table.tier[first], table.namespace[first], table.shard[first]
        # A page of this call is found from its own turn on; the others were there before it.
        found = dict.fromkeys(parents, NO_ROW)
        for key in found.keys() - keys - {b""}:
            found[key] = self._index.copy_in(self._index.find(namespace, shard, key), tier)
        new = frozenset(rows)
        for row, key, parent_key in zip(rows, keys, parents, strict=True):
            found[key] = row
            if parent_key:
                parent = found[parent_key]
                if parent == NO_ROW:
                    self._wait(row, (tier, namespace, shard, parent_key))
                elif parent != row and (not children[row] or row not in self._upwards(parent)):
                    table.parent[row] = parent + 1
                    children[parent] += 1
                    if children[parent] == 1 and parent not in new:
                        self._on_kept(parent)
            if self._waiting_count:
                self._meet(row, (tier, namespace, shard, key))

    def _meet(self, row: int, name: tuple[int, int, int, bytes]) -> None:
        """Links those that wait for this page to it."""
        table = self._table
        waiting = self._waiting.pop(name, ())
        self._waiting_count -= len(waiting)
        if waiting:
            before = self._upwards(row)
            for child, generation in waiting:
                is_same = (
                    table.generation[child] == generation and table.state[child] == State.SEALED
                )
                if is_same and not table.parent[child] and child not in before:
                    table.parent[child] = row + 1
                    table.children[row] += 1

    def waiting(self) -> Waiting:
        """The book of the waiting at this moment; rows that are gone may be in it.

        Its lists can be read without the lock: none of them is ever made shorter, and what is added
        has a generation of its own.
        """
        return self._waiting.copy()

    def wait_for(self, rows: npt.NDArray[np.int64], parents: npt.NDArray[np.uint8]) -> None:
        """Copies put back without their parents wait for these, keys of shape (n, 32); of more than
        the book has room for, the last ones."""
        table = self._table
        first = max(0, len(rows) - (_WAITING_MAX - self._waiting_count))
        for row, key in zip(rows[first:].tolist(), parents[first:], strict=True):
            at = table.tier[row], table.namespace[row], table.shard[row], key.tobytes()
            self._wait(row, at)

    def leave(self, row: int) -> None:
        """A copy is no longer findable: no parent, no children."""
        table = self._table
        if parent := table.parent[row]:
            table.parent[row] = 0
            self._lose_child(parent - 1)
        if table.children[row]:
            table.orphan_children(np.array([row]))
            table.children[row] = 0

    def cut(self, rows: npt.NDArray[np.int64]) -> None:
        """As `leave` for all of `rows`, in one vector pass."""
        table = self._table
        parent, children = table.column("parent"), table.column("children")
        parents = parent[rows].astype(np.int64) - 1
        if (parents >= 0).any():
            parents = parents[parents >= 0]
            parent[rows] = 0
            np.subtract.at(children, parents, 1)
        else:
            parents = parents[:0]
        if bool(children[rows].any()):
            table.orphan_children(rows)
            children[rows] = 0
        if len(parents):
            for row in np.setdiff1d(parents, rows).tolist():
                if children[row] == 0 and table.state[row] == State.SEALED:
                    self._on_ready(row)

    def inherit(self, old: int, new: int) -> None:
        """`new` takes the place of `old`, a copy of the same page in the same tier."""
        table = self._table
        if table.children[old]:
            parents = table.live("parent")
            parents[parents == old + 1] = new + 1
            table.children[new] += table.children[old]
            table.children[old] = 0

    def _upwards(self, row: int) -> Container[int]:
        """The row and all before it: a page may not come after one of these, for a chain is no
        ring, whatever parents its makers name. Of a very long chain: every row, to be safe."""
        found: dict[int, None] = {}
        while row != NO_ROW:
            if len(found) == _CHAIN_MAX:
                return range(self._table.rows_max)
            found[row] = None
            row = self._table.parent[row] - 1
        return found

    def _lose_child(self, row: int) -> None:
        table = self._table
        table.children[row] -= 1
        if table.children[row] == 0 and table.state[row] == State.SEALED:
            self._on_ready(row)

    def _wait(self, row: int, parent: tuple[int, int, int, bytes]) -> None:
        if self._waiting_count >= _WAITING_MAX:
            self._forget_the_gone()
        if self._waiting_count < _WAITING_MAX:
            self._waiting.setdefault(parent, []).append((row, self._table.generation[row]))
            self._waiting_count += 1

    def _forget_the_gone(self) -> None:
        """Drops those that have left the tier while they waited; if few had, all of them."""
        table = self._table
        kept: Waiting = {}
        count = 0
        for parent, rows in self._waiting.items():
            alive = [
                (row, generation)
                for row, generation in rows
                if table.generation[row] == generation and table.state[row] == State.SEALED
            ]
            if alive:
                kept[parent] = alive
                count += len(alive)
        # Else this scan would come again with every page that waits.
        if count > _WAITING_MAX // 2:
            kept, count = {}, 0
        self._waiting, self._waiting_count = kept, count
