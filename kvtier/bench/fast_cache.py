"""A Cache of policy lru whose loops are compiled: the same outcome for every call, sooner.

What is compiled is the policy's own way through its own arrays (fast_lru.py) and the
book of blocks around it. Importing this needs numba. One thread.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.bench import cache_kernels
from kvtier.bench.cache import Cache
from kvtier.bench.fast_lru import FastLru
from kvtier.core.policy.lru import Clock
from kvtier.core.table import NO_ROW

__all__ = ["FastCache"]

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


class FastCache(Cache):
    def __init__(self, parent: Ints, slots: int) -> None:
        super().__init__(parent, slots, "lru")
        self._lru = FastLru(self._table, Clock())
        self._policy = self._lru
        self._before: Ints = self._table.column("parent")
        self._kept: Longs = np.empty(1, np.int64)
        self._tree: tuple[Ints, Longs] | None = None

    def serve(self, path: Ints) -> int:
        """See Cache."""
        n = len(path)
        rows = self._row_np.take(path)
        found = int(rows.argmin()) if n else 0
        if n and rows[found] != NO_ROW:
            found = n
        if found:
            used = rows[:found].astype(np.int64)
            self._uses[used] = 1
            self._lru.touch(used)
        if found < n:
            self.store(path[found:])
        return found

    def _evict(self, count: int, pinned: int) -> Ints:
        if pinned != NO_ROW:
            self._leases[pinned] += 1
        rows = self._lru.evict_many(count)
        n = len(rows)
        if pinned != NO_ROW:
            self._leases[pinned] -= 1
            if not (self._leases[pinned] or self._children[pinned] or self._queued[pinned]):
                self._policy.ready(pinned)
        self._free[self._free_count : self._free_count + n] = rows[::-1]
        self._free_count += n
        self.evicted += n
        gone, used = np.empty(n, np.int32), np.empty(n, np.bool_)
        cache_kernels.leave(
            rows, self._block_np, self._parent, self._row_np, self._after_np, gone, self._uses, used
        )
        self.gone_used = used
        return gone

    def _admit(self, path: Ints) -> None:
        n = len(path)
        self._free_count -= n
        rows = self._free[self._free_count : self._free_count + n][::-1].astype(np.int64)
        if len(self._kept) < n:
            self._kept = np.empty(2 * n, np.int64)
        found = cache_kernels.join(
            path, rows, self._block_np, self._parent, self._row_np, self._after_np, self._uses,
            self._queued_np, self._children_np, self._before, self._kept,
        )  # fmt: skip
        if found < 0:
            found = -1 - found
            self._link_late(path, rows)
        for row in self._kept[:found].tolist():
            self._policy.keep(row)
        self._policy.admit_many(rows)
        self.stored += n

    def _link_late(self, path: Ints, rows: Longs) -> None:
        """Links blocks that are here to blocks of `path`, which came after them."""
        if self._tree is None:
            self._tree = _children(self._parent)
        order, begin = self._tree
        for block, row in zip(path.tolist(), rows.tolist(), strict=True):
            held = self._row_np[order[begin[block] : begin[block + 1]]]
            self._before[held[held != NO_ROW]] = row + 1


def _children(parent: Ints) -> tuple[Ints, Longs]:
    """(all blocks in the order of the blocks before them, where those after each block begin)."""
    order = np.argsort(parent, kind="stable").astype(np.int32)
    begin = np.searchsorted(parent[order], np.arange(len(parent) + 1))
    return order, begin.astype(np.int64)
