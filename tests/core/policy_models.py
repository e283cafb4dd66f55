"""Plain models of the eviction policies, and a cache that asks one of ours: the same calls for
both.

The models know nothing of chains, leases or rows. They are written from the papers, with one
difference that `Arc` states: the victim is chosen before the page that comes is looked at.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

import numpy as np

from kvtier.core.policy.base import Policy
from kvtier.core.policy.ghosts import mark_of
from kvtier.core.policy.lru import Clock
from kvtier.core.table import NO_ROW, CopyTable
from tests.core.support import key, take_row


def always(page: int) -> bool:
    return True


class PlainLru:
    """`may_go` says which pages nothing keeps; `get` of a new page is None when none may go."""

    def __init__(self, capacity: int, may_go: Callable[[int], bool] = always) -> None:
        self.capacity = capacity
        self.may_go = may_go
        self.pages: OrderedDict[int, None] = OrderedDict()
        self.evicted: list[int] = []

    def get(self, x: int) -> bool | None:
        hit = x in self.pages
        if not hit and len(self.pages) == self.capacity:
            victim = next(filter(self.may_go, self.pages), None)
            if victim is None:
                return None
            del self.pages[victim]
            self.evicted.append(victim)
        self.pages[x] = None
        self.pages.move_to_end(x)
        return hit

    def ghosts(self) -> list[list[int]]:
        return []


class PlainArc:
    """`learns_first`: the order of the paper, where p is adapted before the victim is chosen."""

    def __init__(
        self,
        capacity: int,
        may_go: Callable[[int], bool] = always,
        *,
        learns_first: bool = False,
    ) -> None:
        self.c, self.p, self.learns_first = capacity, 0.0, learns_first
        self.may_go = may_go
        self.t1: OrderedDict[int, None] = OrderedDict()
        self.t2: OrderedDict[int, None] = OrderedDict()
        self.b1: OrderedDict[int, None] = OrderedDict()
        self.b2: OrderedDict[int, None] = OrderedDict()
        self.evicted: list[int] = []

    def get(self, x: int) -> bool | None:
        if x in self.t1 or x in self.t2:
            self.t1.pop(x, None)
            self.t2.pop(x, None)
            self.t2[x] = None
            return True
        is_full = len(self.t1) + len(self.t2) == self.c
        if is_full and not any(map(self.may_go, (*self.t1, *self.t2))):
            return None
        if x in self.b1 or x in self.b2:
            self.remembered(x)
        else:
            self.unknown(x)
        return False

    def remembered(self, x: int) -> None:
        """Cases II and III."""
        if self.learns_first:
            self.adapt(x)
        if len(self.t1) + len(self.t2) == self.c:
            self.replace(from_b2=x in self.b2)
        if not self.learns_first:
            self.adapt(x)
        self.b1.pop(x, None)
        self.b2.pop(x, None)
        self.t2[x] = None

    def adapt(self, x: int) -> None:
        if x in self.b1:
            self.p = min(self.p + max(len(self.b2) / len(self.b1), 1), self.c)
        else:
            self.p = max(self.p - max(len(self.b1) / len(self.b2), 1), 0)

    def unknown(self, x: int) -> None:
        """Case IV."""
        in_l1 = len(self.t1) + len(self.b1)
        total = in_l1 + len(self.t2) + len(self.b2)
        if in_l1 == self.c:
            if len(self.t1) < self.c:
                self.b1.popitem(last=False)
                self.replace(from_b2=False)
            else:
                self.evicted.append(next(filter(self.may_go, self.t1)))
                del self.t1[self.evicted[-1]]
        elif total >= self.c:
            if total == 2 * self.c:
                self.b2.popitem(last=False)
            self.replace(from_b2=False)
        self.t1[x] = None

    def replace(self, *, from_b2: bool) -> None:
        is_tie = self.learns_first and from_b2 and len(self.t1) == self.p
        lists = [(self.t1, self.b1), (self.t2, self.b2)]
        if not (len(self.t1) > self.p or is_tie):
            lists.reverse()
        for pages, ghosts in lists:
            for x in pages:
                if self.may_go(x):
                    del pages[x]
                    ghosts[x] = None
                    self.evicted.append(x)
                    return

    def ghosts(self) -> list[list[int]]:
        return [list(self.b1), list(self.b2)]


class PlainS3Fifo:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.small: deque[int] = deque()  # the oldest at the left
        self.main: deque[int] = deque()
        self.ghost: OrderedDict[int, None] = OrderedDict()
        self.freq: dict[int, int] = {}
        self.evicted: list[int] = []

    def get(self, x: int) -> bool:
        if x in self.freq:
            self.freq[x] = min(self.freq[x] + 1, 3)
            return True
        if len(self.freq) == self.capacity:
            self.evict()
        if x in self.ghost:
            del self.ghost[x]
            self.main.append(x)
        else:
            self.small.append(x)
        self.freq[x] = 0
        return False

    def evict(self) -> None:
        before = len(self.evicted)
        while len(self.evicted) == before:
            if len(self.small) >= self.capacity / 10:
                self.evict_from_small()
            else:
                self.evict_from_main()

    def evict_from_small(self) -> None:
        t = self.small.popleft()
        if self.freq[t] > 1:
            self.main.append(t)
            self.freq[t] = 0
        else:
            self.ghost[t] = None
            if len(self.ghost) > self.capacity - self.capacity // 10:
                self.ghost.popitem(last=False)
            self.gone(t)

    def evict_from_main(self) -> None:
        t = self.main.popleft()
        if self.freq[t] > 0:
            self.main.append(t)
            self.freq[t] -= 1
        else:
            self.gone(t)

    def gone(self, t: int) -> None:
        del self.freq[t]
        self.evicted.append(t)

    def ghosts(self) -> list[list[int]]:
        return [list(self.ghost)]


class Pages:
    """A cache of numbered pages over one of our policies, without a store."""

    def __init__(self, make: Callable[[CopyTable, Clock], Policy], capacity: int) -> None:
        self.capacity = capacity
        self.clock = Clock()
        self.table = CopyTable(capacity)
        self.policy = make(self.table, self.clock)
        self.rows: dict[int, int] = {}
        self.names: dict[int, int] = {}
        self.marks: dict[int, int] = {}
        self.evicted: list[int] = []

    def get(self, x: int) -> bool:
        if x in self.rows:
            self.use([x])
            return True
        if len(self.rows) == self.capacity:
            self.evict()
        self.admit(x)
        return False

    def use(self, pages: Iterable[int]) -> None:
        self.policy.touch(np.array([self.rows[x] for x in pages], np.int64))
        # Somebody uses another tier, so that no page of ours is the one that was used last.
        self.clock.ticks(1)

    def admit(self, x: int) -> None:
        self.policy.admit(self.hold(x))
        self.clock.ticks(1)

    def hold(self, x: int) -> int:
        """A row for a page, without a word to the policy."""
        row = take_row(self.table, key(x))
        assert row != NO_ROW
        self.table.namespace[row], self.table.shard[row] = 1, 0
        self.rows[x], self.names[row] = row, x
        self.marks[mark_of(self.table, row)] = x
        return row

    def evict(self) -> int:
        """The page that gave way."""
        row = self.policy.evict(lambda row: True)
        assert row != NO_ROW, "no page is named, and nothing keeps a page"
        x = self.names[row]
        self.evicted.append(x)
        self.delete(x)
        return x

    def delete(self, x: int) -> None:
        row = self.rows.pop(x)
        del self.names[row]
        self.policy.forget(row)
        self.table.give_rows((row,))

    def ghosts(self) -> list[list[int]]:
        ghosts = getattr(self.policy, "ghosts", None)
        if ghosts is None:
            return []
        return [[self.marks[m] for m in ghosts.marks(of)] for of in range(len(ghosts.counts))]


class Chains(Pages):
    """With leases and pages after pages; `blocked` are pages whose sibling shards are in use."""

    def __init__(self, make: Callable[[CopyTable, Clock], Policy], capacity: int) -> None:
        super().__init__(make, capacity)
        self.parents: dict[int, int] = {}
        self.blocked: set[int] = set()
        self.refused: set[int] = set()  # since the last `ready`

    def may_go(self, x: int) -> bool:
        row = self.rows[x]
        return not (self.table.children[row] or self.table.leases[row] or x in self.blocked)

    def put(self, x: int, parent: int | None) -> bool:
        """False: nothing may go."""
        if len(self.rows) == self.capacity and not self.give_way():
            return False
        self.admit(x)
        if parent in self.rows:
            self.parents[x] = parent
            self.table.children[self.rows[parent]] += 1
            if self.table.children[self.rows[parent]] == 1:
                self.policy.keep(self.rows[parent])
        return True

    def give_way(self) -> bool:
        row = self.policy.evict(self.evictable)
        if row == NO_ROW:
            assert not any(map(self.may_go, self.rows)), "a page could have gone"
            return False
        x = self.names[row]
        assert self.may_go(x), "a page that something keeps"
        self.evicted.append(x)
        self.delete(x)
        return True

    def evictable(self, row: int) -> bool:
        x = self.names[row]
        assert x not in self.refused, "named again before it was ready"
        assert not self.table.children[row], "the head of a chain before its tail"
        assert not self.table.leases[row], "a page that is in use"
        if x in self.blocked:
            self.refused.add(x)
        return x not in self.blocked

    def delete(self, x: int) -> None:
        for child in [child for child, parent in self.parents.items() if parent == x]:
            del self.parents[child]
        parent = self.parents.pop(x, None)
        self.refused.discard(x)
        self.blocked.discard(x)
        row = self.rows[x]
        self.table.leases[row] = 0
        super().delete(x)
        if parent is not None:
            self.table.children[self.rows[parent]] -= 1
            self.lost_a_reason(parent)

    def lease(self, x: int) -> None:
        self.table.leases[self.rows[x]] += 1

    def release(self, x: int) -> None:
        row = self.rows[x]
        if self.table.leases[row]:
            self.table.leases[row] -= 1
            self.lost_a_reason(x)

    def unblock(self, x: int) -> None:
        self.blocked.discard(x)
        self.lost_a_reason(x)

    def lost_a_reason(self, x: int) -> None:
        """As core/residents.py does."""
        table, row = self.table, self.rows[x]
        if not (table.children[row] or table.leases[row] or table.queued[row]):
            self.refused.discard(x)
            self.policy.ready(row)
