"""One tier of a replay: the daemon's eviction policy over the daemon's table of page copies.

Shared with the daemon: the policy objects of kvtier/core/policy as they are, the table that they
read and write, the logical clock, the calls that the store makes to them and their order (pages
used together are touched from head to tail; a page is admitted after it was linked to the page
before it; one with a page after it is not given up; its last page after it gone, it is ready again;
room for all pages of a put is made before the first is admitted).

Not shared: the store around them. A block is found by its number in the trace and not by a hash of
its key, all pages have one size, so there are no slabs to take from another class, no shards, no
leases but that of the request being served, no grants, and no cleaner that works ahead.

fast_cache.py is this with LRU's loops compiled. One thread.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvtier.bench.trace import NO_BLOCK
from kvtier.core.lapses import LapseQueue
from kvtier.core.policy import POLICIES
from kvtier.core.policy.base import Policy
from kvtier.core.policy.forecasting import FORECASTING, Forecasting
from kvtier.core.policy.lru import Clock, LruTailFirst
from kvtier.core.table import NO_ROW, CopyTable

__all__ = ["Cache"]

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


def _any_may_go(row: int) -> bool:
    """For `Policy.evict`: there are no shards here that could be in use."""
    return row != NO_ROW


class Cache:
    """Up to `slots` blocks of a tree given by the parent of each."""

    def __init__(self, parent: Ints, slots: int, policy: str, *, ttl_s: float = 0.0) -> None:
        """`policy`: a name of core's POLICIES or FORECASTING; KeyError for another. `ttl_s`: what
        every put says its pages are worth keeping for; 0: nothing. No slots: nothing is kept."""
        rows = max(1, min(slots, len(parent)))
        self.slots = min(slots, rows)
        self._table = CopyTable(rows)
        self._clock = Clock()
        self._hearing: Forecasting | None = None  # the policy, if it hears of requests
        self._policy: Policy
        if policy in FORECASTING:
            self._policy = self._hearing = FORECASTING[policy](self._table, self._clock)
        else:
            self._policy = POLICIES[policy](self._table, self._clock)
        self._parent = parent
        self._parents = parent.data
        self._row_np: Ints = np.full(len(parent), NO_ROW, np.int32)  # of each block
        self._row = self._row_np.data
        self._block_np: Ints = np.full(rows, NO_BLOCK, np.int32)  # of each row
        self._block = self._block_np.data
        # Blocks here that come after each block, which itself need not be here.
        self._after_np: Ints = np.zeros(len(parent), np.int32)
        self._after = self._after_np.data
        self._free: Ints = np.arange(rows - 1, -1, -1, dtype=np.int32)
        self._free_count = self.slots
        if self.slots < rows:
            self._free_count = 0
        self._children_np: Ints = self._table.column("children")
        self._children, self._leases = self._table.children, self._table.leases
        self._queued = self._table.queued
        self._uses: npt.NDArray[np.uint8] = self._table.column("uses")
        self._queued_np: npt.NDArray[np.uint64] = self._table.column("queued")
        # LRU remembers nothing of what was evicted, so it needs no keys.
        self._words: npt.NDArray[np.uint64] | None = None
        if not isinstance(self._policy, LruTailFirst):
            self._words = self._table.key_words_np[:, 0]
        self._ttl_ms = round(1000 * ttl_s)
        self._lapses: LapseQueue | None = None
        if self._ttl_ms:
            self._lapses = LapseQueue(self._table, self._clock, self._is_in)
        self.stored = 0
        self.evicted = 0
        #: Of the blocks that gave way last: which had been used since they were stored.
        self.gone_used: npt.NDArray[np.bool_] = np.empty(0, np.bool_)

    def __len__(self) -> int:
        return self.slots - self._free_count

    def has(self, path: Ints) -> npt.NDArray[np.bool_]:
        """Which of these blocks are here."""
        found: npt.NDArray[np.bool_] = self._row_np[path] != NO_ROW
        return found

    def prefix(self, path: Ints) -> int:
        """How many leading blocks are here."""
        rows = self._row_np[path]
        missing = int(rows.argmin()) if len(rows) else 0  # the first of the lowest
        return missing if len(rows) and rows[missing] == NO_ROW else len(rows)

    def serve(self, path: Ints) -> int:
        """A request, whose blocks are the only ones that come here: how many leading blocks are
        here; those are used, the others stored."""
        found = self.prefix(path)
        if found:
            self.touch(path[:found])
        self.store(path[found:])
        return found

    @property
    def is_hearing(self) -> bool:
        """Its policy hears of requests."""
        return self._hearing is not None

    def tell(self, now: float) -> None:
        """The time, in seconds of any clock that does not go back."""
        self._clock.tell(now)

    def request(self, now: float, path: Ints, *, whole: int, output: int) -> None:
        """A request comes that has this path, of `whole` whole blocks."""
        if self._hearing is not None:
            self._hearing.request(now, path.astype(np.uint64), whole=whole, output=output)

    def hint(self, block: int, returns_after_s: float) -> None:
        """The session of the request that ended with this block comes back so late; negative:
        never."""
        if self._hearing is not None:
            self._hearing.hint_word(np.uint64(block), returns_after_s)

    def touch(self, path: Ints) -> None:
        """A request has used these blocks, which are here, from head to tail."""
        rows = self._row_np[path].astype(np.int64)
        self._uses[rows] = 1
        self._policy.touch(rows)

    def store(self, path: Ints) -> tuple[Ints, Ints]:
        """Stores blocks that are not here, from head to tail; (those that had room, those that
        gave way). The block before the first one stays."""
        none: Ints = path[:0]
        if self._hearing is not None:
            path = path[: self._hearing.takes(path.astype(np.uint64))]
        if not len(path) or not self.slots:
            return none, none
        before = self._parents[int(path[0])]
        pinned = self._row[before] if before != NO_BLOCK else NO_ROW
        wanted = len(path) - self._free_count
        gone = none
        if wanted > 0:
            gone = self._evict(min(wanted, self.slots), pinned)
        stored = path[: self._free_count]
        if len(stored):
            self._admit(stored)
        return stored, gone

    def _evict(self, count: int, pinned: int) -> Ints:
        if pinned != NO_ROW:
            self._leases[pinned] += 1
        policy, block_of, parents, row_of = self._policy, self._block, self._parents, self._row
        children, after, leases, ready = self._children, self._after, self._leases, policy.ready
        queued, lapses = self._queued, self._lapses
        evict = policy.evict if lapses is None else self._evict_next
        rows: list[int] = []
        for _ in range(count):
            row = evict(_any_may_go)
            if row == NO_ROW:
                break
            rows.append(row)
            block = block_of[row]
            row_of[block] = NO_ROW
            before = parents[block]
            if before != NO_BLOCK:
                after[before] -= 1
                held = row_of[before]
                if held != NO_ROW:
                    left = children[held] = children[held] - 1
                    if not (left or leases[held] or queued[held]):
                        ready(held)
        if pinned != NO_ROW:
            leases[pinned] -= 1
            if not (leases[pinned] or children[pinned] or queued[pinned]):
                ready(pinned)
        freed = np.array(rows, np.int32)
        self._free[self._free_count : self._free_count + len(rows)] = freed[::-1]
        self._free_count += len(rows)
        self.evicted += len(rows)
        self.gone_used = self._uses[freed] > 0
        return self._block_np[freed]

    def _is_in(self, row: int, block: int) -> bool:
        return self._row[block] == row

    def _evict_next(self, evictable: Callable[[int], bool]) -> int:
        """The row to evict next where pages have times, as the daemon's placement chooses it."""
        assert self._lapses is not None
        row = self._lapses.next(evictable)
        if row == NO_ROW:
            return self._policy.evict(evictable)
        self._policy.forget(row)
        return row

    def _admit(self, path: Ints) -> None:
        """Blocks that are not here, one after the other of one chain, or of several."""
        n = len(path)
        self._free_count -= n
        rows = self._free[self._free_count : self._free_count + n][::-1].astype(np.int64)
        self._row_np[path] = rows
        self._block_np[rows] = path
        self._uses[rows] = 0
        self._queued_np[rows] = 0
        if self._words is not None:
            self._words[rows] = path
        parents = self._parent[path]
        if n == 1 or bool((parents[1:] == path[:-1]).all()):
            after = self._after_np[path]
            after[:-1] += 1
            self._after_np[path] = after
            self._children_np[rows] = after
            self._join(int(parents[0]))
        else:
            known = parents[parents != NO_BLOCK]
            np.add.at(self._after_np, known, 1)
            self._children_np[rows] = self._after_np[path]
            for block in np.setdiff1d(known, path).tolist():
                self._recount(block)
        self._policy.admit_many(rows)
        self.stored += n
        if self._lapses is not None:
            for row, block in zip(rows[::-1].tolist(), path[::-1].tolist(), strict=True):
                self._lapses.note(row, block, self._ttl_ms)

    def _join(self, before: int) -> None:
        """A block has come after this one."""
        if before == NO_BLOCK:
            return
        self._after[before] += 1
        row = self._row[before]
        if row != NO_ROW:
            self._children[row] += 1
            if self._children[row] == 1:
                self._policy.keep(row)

    def _recount(self, block: int) -> None:
        """Several blocks may have come after this one."""
        row = self._row[block]
        if row != NO_ROW:
            had = self._children[row]
            self._children[row] = self._after[block]
            if not had:
                self._policy.keep(row)
