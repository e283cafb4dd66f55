"""Any order of allocate, share, free and copies under way, beside a model that is a few dicts.

What the pool must never do: give a page to two, lose one, reuse one under a copy, or a tag.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvtier.client.device import DevicePool, PageNotHeld, PageTable, PoolExhausted, TagTracker
from tests.client.local_rig import two_segments

PAGES = 6
LAYOUT = two_segments(layers=1, heads=1, dim=4)
PAGE = st.integers(0, PAGES - 1)


class PoolMachine(RuleBasedStateMachine):
    """`held` and `copied` count references and copies, `tables` are what requests have."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = DevicePool(LAYOUT, PAGES)
        self.tracker = TagTracker(self.pool)
        self.held: Counter[int] = Counter()
        self.copies: list[list[int]] = []
        self.tables: list[PageTable] = []
        self.tags: set[int] = set()

    @property
    def under_copy(self) -> Counter[int]:
        return Counter(page for copy in self.copies for page in copy)

    @property
    def free(self) -> set[int]:
        return set(range(PAGES)) - set(+self.held) - set(self.under_copy)

    @rule(count=st.integers(0, PAGES + 1))
    def begin_request(self, count):
        free = self.free
        if count > len(free):
            with pytest.raises(PoolExhausted):
                self.pool.allocate(count)
            return
        ids = self.pool.allocate(count)
        assert set(ids) <= free
        tags = self.pool.known_tags(ids)
        assert len({*ids}) == len({*tags}) == count
        assert not self.tags.intersection(tags)
        self.tags.update(tags)
        self.held.update(ids)
        self.tables.append(PageTable(self.pool))
        self.tables[-1].append(ids)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def begin_with_a_shared_prefix(self, data):
        ids = data.draw(st.sampled_from(self.tables)).ids
        ids = ids[: data.draw(st.integers(0, len(ids)))]
        self.pool.share(ids)
        self.held.update(ids)
        self.tables.append(PageTable(self.pool))
        self.tables[-1].append(ids)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end_request(self, data):
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.held.subtract(table.ids)
        assert table.release() == ()

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def begin_copy(self, data):
        ids = list(data.draw(st.sampled_from(self.tables)).ids)
        self.pool.pin(ids)
        self.copies.append(ids)

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def end_copy(self, data):
        self.pool.unpin(self.copies.pop(data.draw(st.integers(0, len(self.copies) - 1))))

    @rule(page=PAGE, call=st.sampled_from(["free", "share", "pin"]))
    def name_a_page_that_nobody_holds(self, page, call):
        if self.held[page]:
            return
        with pytest.raises(PageNotHeld):
            getattr(self.pool, call)([*list(+self.held)[:1], page])

    @invariant()
    def adds_up(self):
        self.pool.check()
        now = self.pool.occupancy
        assert now.free + now.held + now.draining == PAGES
        assert (now.free, now.held) == (len(self.free), len(+self.held))
        assert now.pinned == len(self.under_copy)
        for page in range(PAGES):
            assert self.pool.references(page) == self.held[page]

    @invariant()
    def every_table_is_sound(self):
        assert self.tracker.verify(self.tables).all()


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestPool = PoolMachine.TestCase
