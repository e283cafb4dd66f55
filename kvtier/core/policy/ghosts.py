"""Pages that were evicted, remembered by a mark: lists in the order of eviction, and a hash table.

A mark is a 64-bit mix of namespace, shard and key, so nothing here names a row, and two pages with
one mark are a mistake about a page's history, once in 2**64 pairs. It is Python's own hash: keyed
anew in each process, so that nobody can choose keys that collide; nothing stores it.

Nodes of doubly linked lists in int32 columns, chained from hash buckets: every operation is O(1)
(amortised over growing and shrinking), 25 to 29 bytes a mark. The caller holds the store's lock.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.core.table import CopyTable

__all__ = ["NO_LIST", "Ghosts", "mark_of"]

#: `Ghosts.remove` of a mark that is not there.
NO_LIST = -1

_MASK = (1 << 64) - 1
_NODES_MIN = 64
#: With more nodes than so many for each mark expected, the columns are made anew.
_NODES_A_MARK_MAX = 8


def mark_of(table: CopyTable, row: int) -> int:
    """The mark of the page whose copy the row is."""
    return hash((table.namespace[row] << 16 | table.shard[row], table.key(row))) & _MASK


class Ghosts:
    """`lists` lists of marks, each mark in one of them at most."""

    def __init__(self, lists: int) -> None:
        # Node 0 .. lists - 1 are the ends of the lists: `after` of one is the oldest of its list,
        # `before` the newest. Nodes from there on hold marks.
        self._lists = lists
        self._room = 0
        self._free = 0  # a node that was given back; `chain` leads to the others
        self._free_count = 0
        self._clear(_NODES_MIN)

    def __len__(self) -> int:
        return sum(self.counts)

    @property
    def nbytes(self) -> int:
        columns = (self._marks_np, self._before_np, self._after_np, self._chain_np, self._list_np)
        return sum(column.nbytes for column in columns) + self._buckets_np.nbytes

    def add(self, mark: int, to: int) -> None:
        """The mark is the newest of list `to`, wherever it was before."""
        self.remove(mark)
        node = self._take_node()
        self._marks[node] = mark
        self._list[node] = to
        bucket = mark & self._bucket_mask
        self._chain[node] = self._buckets[bucket]
        self._buckets[bucket] = node
        newest = self._before[to]
        self._before[node], self._after[node] = newest, to
        self._after[newest] = self._before[to] = node
        self.counts[to] += 1

    def remove(self, mark: int) -> int:
        """The list that the mark was in; NO_LIST when it was in none."""
        marks, chain = self._marks, self._chain
        bucket = mark & self._bucket_mask
        previous, node = 0, self._buckets[bucket]
        while node and marks[node] != mark:
            previous, node = node, chain[node]
        if not node:
            return NO_LIST
        if previous:
            chain[previous] = chain[node]
        else:
            self._buckets[bucket] = chain[node]
        before, after, to = self._before[node], self._after[node], self._list[node]
        self._after[before], self._before[after] = after, before
        chain[node], self._free = self._free, node
        self._free_count += 1
        self.counts[to] -= 1
        return to

    def drop_oldest(self, of: int) -> None:
        """Forgets the oldest mark of a list that has one."""
        assert self.counts[of]
        self.remove(self._marks[self._after[of]])

    def fit(self, room: int) -> None:
        """So many marks are expected at most: the columns grow to this size at once, and shrink
        when they are far larger."""
        self._room = room
        if len(self._marks) > _NODES_A_MARK_MAX * max(_NODES_MIN, room):
            self._shrink()

    def marks(self, of: int) -> list[int]:
        """The marks of a list, the oldest first."""
        found, node = [], self._after[of]
        while node != of:
            found.append(self._marks[node])
            node = self._after[node]
        return found

    def _take_node(self) -> int:
        if self._free_count:
            node = self._free
            self._free = self._chain[node]
            self._free_count -= 1
            return node
        if self._used == len(self._marks):
            self._grow()
        self._used += 1
        return self._used - 1

    def _clear(self, nodes: int) -> None:
        self._allocate(nodes)
        self.counts = [0] * self._lists
        for end in range(self._lists):
            self._after[end] = self._before[end] = end
        self._used = self._lists  # nodes from here on were never used
        self._free = self._free_count = 0

    def _shrink(self) -> None:
        """Columns for as many as are expected and as there are, with the same lists in them."""
        kept = [np.array(self.marks(of), np.uint64) for of in range(self._lists)]
        self._clear(self._size_for(max(self._room, len(self))))
        for of, marks in enumerate(kept):
            first, end = self._used, self._used + len(marks)
            if first == end:
                continue
            self._marks_np[first:end], self._list_np[first:end] = marks, of
            self._before_np[first:end] = np.arange(first - 1, end - 1)
            self._after_np[first:end] = np.arange(first + 1, end + 1)
            self._before[first] = self._after[end - 1] = of
            self._after[of], self._before[of] = first, end - 1
            self.counts[of], self._used = len(marks), end
        self._chain_all()

    def _size_for(self, marks: int) -> int:
        """A power of two."""
        return max(_NODES_MIN, 1 << (marks + self._lists - 1).bit_length())

    def _allocate(self, nodes: int) -> None:
        """Zeros, which cost no memory until they are used."""
        self._marks_np: npt.NDArray[np.uint64] = np.zeros(nodes, np.uint64)
        self._before_np: npt.NDArray[np.int32] = np.zeros(nodes, np.int32)
        self._after_np: npt.NDArray[np.int32] = np.zeros(nodes, np.int32)
        self._chain_np: npt.NDArray[np.int32] = np.zeros(nodes, np.int32)
        self._list_np: npt.NDArray[np.uint8] = np.zeros(nodes, np.uint8)
        self._buckets_np: npt.NDArray[np.int32] = np.zeros(nodes, np.int32)
        self._marks, self._list = self._marks_np.data, self._list_np.data
        self._before, self._after = self._before_np.data, self._after_np.data
        self._chain, self._buckets = self._chain_np.data, self._buckets_np.data
        self._bucket_mask = nodes - 1

    def _grow(self) -> None:
        """More nodes and buckets; every node is in use when this is called."""
        marks, lists = self._marks_np, self._list_np
        before, after = self._before_np, self._after_np
        used = self._used
        self._allocate(self._size_for(max(used, self._room)))
        self._marks_np[:used], self._list_np[:used] = marks, lists
        self._before_np[:used], self._after_np[:used] = before, after
        self._chain_all()

    def _chain_all(self) -> None:
        """Chains the nodes in use, which are all up to the last, from empty buckets."""
        nodes = np.arange(self._lists, self._used)
        buckets = (self._marks_np[nodes] & np.uint64(self._bucket_mask)).astype(np.int64)
        order = np.argsort(buckets, kind="stable")
        nodes, buckets = nodes[order], buckets[order]
        is_same = buckets[1:] == buckets[:-1]
        self._chain_np[nodes[1:][is_same]] = nodes[:-1][is_same]
        self._buckets_np[buckets] = nodes  # the last of each bucket leads to the others
