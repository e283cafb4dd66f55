"""LRU against a model that looks through all pages for the one used longest ago, and the work of
each of its calls: a few entries for every row it names, however many there are."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.core.lifecycle import State
from kvtier.core.page import Tier
from kvtier.core.policy.lru import NEVER, Clock, LruTailFirst
from kvtier.core.table import NO_ROW, CopyTable
from tests.core.support import NS, key, keys, make_store, put, take_row
from tests.seeds import seeds

ROWS = 120
#: Entries that one call may look at, besides those for the rows that it names.
LOOKS_MAX = 256 + 3 * 1024
LOOKS_PER_ROW_MAX = 5


class Both:
    """The policy and its model. A row waits, or is set aside until it is made ready."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.table, self.clock = CopyTable(ROWS), Clock()
        self.policy = LruTailFirst(self.table, self.clock)
        self.other = LruTailFirst(self.table, self.clock)  # another size class
        self.stamps: dict[int, int] = {}
        self.aside: set[int] = set()
        self.refused: set[int] = set()
        self.victims = 0

    def some(self, at_most: int) -> list[int]:
        count = min(len(self.stamps), int(self.rng.integers(1, at_most + 1)))
        return self.rng.choice(list(self.stamps), count).tolist() if count else []

    def new_row(self) -> int:
        row = take_row(self.table, self.rng.bytes(32))
        if row != NO_ROW and self.rng.random() < 0.2:  # it has found pages that waited for it
            self.table.children[row] = 1
        return row

    def arrived(self, rows: list[int], first: int) -> None:
        for stamp, row in enumerate(rows, first):
            self.stamps[row] = stamp
            if self.table.children[row]:
                self.aside.add(row)

    def admit(self) -> None:
        if (row := self.new_row()) != NO_ROW:
            self.arrived([row], self.clock.now)
            self.policy.admit(row)

    def admit_many(self) -> None:
        rows = [self.new_row() for _ in range(int(self.rng.integers(0, 30)))]
        rows = [row for row in rows if row != NO_ROW]
        self.arrived(rows, self.clock.now)
        self.policy.admit_many(np.array(rows, np.int64))

    def touch(self) -> None:
        rows = self.some(40)
        first = self.clock.now
        for back, row in enumerate(rows):  # of one named twice, the use nearest to the tail
            self.stamps[row] = first + len(rows) - 1 - back
        self.policy.touch(np.array(rows, np.int64))

    def get_child(self) -> None:
        """Sometimes nobody tells the policy of it."""
        for row in self.some(20):
            self.table.children[row] += 1
            if self.table.children[row] == 1 and self.rng.random() < 0.7:
                self.policy.keep(row)
                self.aside.add(row)

    def lease(self) -> None:
        for row in self.some(20):
            self.table.leases[row] += 1

    def let_go(self) -> None:
        """The last page after it goes, or its lease ends, or the reason to refuse it."""
        for row in self.some(20):
            column = self.table.children if self.rng.random() < 0.5 else self.table.leases
            column[row] = 0
            self.refused.discard(row)
            self.ready(row)

    def ready(self, row: int) -> None:
        """As core/residents.py does."""
        table = self.table
        if not (table.children[row] or table.leases[row] or table.queued[row]):
            self.policy.ready(row)
            self.aside.discard(row)

    def leave(self) -> None:
        for row in self.some(3)[:1]:
            self.gone(row)

    def gone(self, row: int) -> None:
        self.policy.forget(row)
        del self.stamps[row]
        self.aside.discard(row)
        self.refused.discard(row)
        self.table.children[row] = self.table.leases[row] = 0
        self.table.give_rows((row,))

    def pass_through_other(self) -> None:
        """A row that comes back has been in another queue meanwhile."""
        if (row := take_row(self.table, bytes(32))) != NO_ROW:
            self.other.admit(row)
            assert row not in self.stamps
            if self.rng.random() < 0.5:
                assert self.other.evict(lambda row: True) == row
            else:
                self.other.forget(row)
            self.table.give_rows((row,))

    def refuse(self) -> None:
        self.refused.update(self.some(5))

    def expected(self) -> int:
        """The next to be evicted. What is met before it is set aside, as the policy has to."""
        table = self.table
        for row in sorted(self.stamps, key=self.stamps.__getitem__):
            if row in self.aside:
                continue
            if table.children[row] or table.leases[row]:
                self.aside.add(row)
                continue
            return row
        return NO_ROW

    def evict(self) -> None:
        while (row := self.expected()) != NO_ROW:
            if row not in self.refused:
                break
            self.aside.add(row)
        assert self.policy.evict(lambda row: row not in self.refused) == row
        if row != NO_ROW:
            self.victims += 1
            self.gone(row)

    def look(self) -> None:
        row = self.expected()
        assert self.policy.coldest() == (NEVER if row == NO_ROW else self.stamps[row])

    def check(self) -> None:
        waiting = {row for row in self.stamps if self.table.queued[row]}
        # What the model has not met yet, the policy may have set aside with its whole block.
        unmet = self.stamps.keys() - self.aside
        assert waiting <= unmet
        assert all(self.table.children[row] or self.table.leases[row] for row in unmet - waiting)
        for row, stamp in self.stamps.items():
            assert self.table.stamp[row] == stamp


@pytest.mark.parametrize("are_small", [False, True], ids=["as it is", "in tiny steps"])
@pytest.mark.parametrize("seed", seeds(3, of=6))
def test_the_victims_are_those_of_the_model(
    monkeypatch: pytest.MonkeyPatch, seed: int, *, are_small: bool
) -> None:
    if are_small:
        order = "kvtier.core.policy.use_order"
        small = {"BLOCK_BITS": 3, "_BLOCK": 8, "_STEPS_MIN": 0, "_ROOM_MIN": 2, "_VECTOR_FROM": 3}
        for name, value in (small | {"_LOOKED_AT_ONE_BY_ONE": 1}).items():
            monkeypatch.setattr(f"{order}.{name}", value)
        monkeypatch.setattr("kvtier.core.policy.lru._KEPT_ONE_BY_ONE", 2)
    rng = np.random.default_rng(seed)
    both = Both(rng)
    calls = [
        both.admit,
        both.admit_many,
        both.touch,
        both.get_child,
        both.lease,
        both.let_go,
        both.leave,
        both.pass_through_other,
        both.refuse,
        both.evict,
        both.look,
    ]
    for _ in range(15):  # each time with other weights: it fills, empties, stands still
        weights = rng.random(len(calls)) ** 2
        for at in rng.choice(len(calls), 150, p=weights / weights.sum()).tolist():
            calls[at]()
            both.check()
    for row in list(both.stamps):
        both.table.children[row] = both.table.leases[row] = 0
        both.ready(row)
    both.refused.clear()
    while both.stamps:
        before = len(both.stamps)
        both.evict()
        assert len(both.stamps) >= before - 1
    assert both.policy.evict(lambda row: True) == NO_ROW
    assert both.victims > 50


def test_an_order_without_rows_is_as_small_as_a_new_one() -> None:
    table = CopyTable(5000)
    policy = LruTailFirst(table, Clock())
    for _ in range(2):
        rows = table.take_many(5000)
        assert len(rows) == 5000
        for row in rows:
            policy.admit(row)
        assert policy.nbytes > 4 * 5000
        for row in rows:
            policy.forget(row)
        table.give_rows(rows)
        assert policy.nbytes < 1000


class Counted:
    """Calls of a policy, none of which looks at many entries."""

    def __init__(self, policy: LruTailFirst) -> None:
        self.policy = policy
        self.most = 0

    def __call__(self, method: str, argument: object, rows: int = 1) -> int:
        before = self.policy.looked_at
        found: int = getattr(self.policy, method)(argument)
        looked_at = self.policy.looked_at - before
        self.most = max(self.most, looked_at)
        assert looked_at <= LOOKS_PER_ROW_MAX * rows + LOOKS_MAX, (method, rows)
        return found


@pytest.mark.parametrize("count", [3_000, 150_000])
def test_no_call_looks_at_many_entries(count: int) -> None:
    """Ten uses of each page, chains of every length, and then the first eviction."""
    table = CopyTable(count)
    rows = table.take_rows(count)
    table.column("state")[rows] = State.SEALED
    call = Counted(LruTailFirst(table, Clock()))
    rng = np.random.default_rng(count)
    for some in np.split(rows, 10):
        call("admit_many", some, len(some))
    for _ in range(10):
        for some in np.array_split(rng.permutation(rows), 40):
            call("touch", some, len(some))
    first = call("evict", lambda row: True)
    assert first != NO_ROW
    call("admit", first)
    # One chain of half of all pages: its head first in the queue, and kept by what comes after.
    chain = rows[: count // 2]
    call("touch", chain[::-1], len(chain))
    call("touch", rows[count // 2 :], count - len(chain))
    for row in chain[:-1].tolist():
        table.children[row] = 1
        call("keep", row)
    victims = []
    for before in chain[-2:-52:-1].tolist():
        victims.append(call("evict", lambda row: True))
        table.children[before] = 0
        call("ready", before)
    assert victims == chain[-1:-51:-1].tolist()
    # A third of the rest goes, from everywhere, and one at a time comes.
    for row in rng.permutation(chain[:-52])[: count // 6].tolist():
        call("forget", row)
    for row in rng.choice(rows[count // 2 :], 1000).tolist():
        call("touch", np.array([row]))
    assert call.most > 0


def test_leased_pages_at_the_front_are_looked_at_once_and_in_blocks() -> None:
    count = 20_000
    table = CopyTable(count)
    rows = table.take_rows(count)
    policy = LruTailFirst(table, Clock())
    policy.admit_many(rows)
    table.column("leases")[rows[:-1]] = 1
    for _ in range(3):
        assert policy.coldest() == table.stamp[int(rows[-1])]
    assert policy.looked_at < 4 * count


def test_a_store_sets_a_page_aside_as_soon_as_one_comes_after_it() -> None:
    """Else the first eviction after a long chain would have to pass over all of it."""
    store = make_store(slots=50)
    for n in range(50):
        put(store, n, n - 1 if n else None)
    table = store._residents.table
    rows = {table.key(row): row for row in store.survey.sealed_rows(Tier.HOST).tolist()}
    assert [n for n in range(50) if table.queued[rows[key(n)]]] == [49]
    store.delete(NS, 0, keys([49, 20]))
    assert [n for n in range(49) if n != 20 and table.queued[rows[key(n)]]] == [19, 48]
    store.survey.check()
