"""How the Gittins policy puts requests together from uses and puts, and what hints do."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest

from kvtier.core.handles import Reading
from kvtier.core.policy.lru import Clock
from kvtier.core.store import Store
from kvtier.core.table import CopyTable
from tests.core.gittins_support import layout, policy
from tests.core.support import NS, keys, make_store, present, put
from tests.seeds import seeds

Gittins = policy.Gittins
# Kernels that are not compiled multiply words as numpy's scalars, which warn.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")


class Chains:
    """A store's calls for pages that come after each other, without named requests."""

    def __init__(self, slots: int) -> None:
        self.table, self.clock = CopyTable(slots), Clock()
        self.policy = Gittins(self.table, self.clock)
        self.state = self.policy.forecast.arrays
        self.rows: dict[int, int] = {}

    def at(self, seconds: float) -> Chains:
        self.clock.seconds = seconds
        return self

    def admit(self, *pages: int, after: int | None = None) -> None:
        rows = self.table.take_many(len(pages))
        for page, row in zip(pages, rows, strict=True):
            self.table.key_words_np[row, 0] = page
            self.table.parent[row] = 0 if after is None else self.rows[after] + 1
            if after is not None:
                self.table.children[self.rows[after]] += 1
            self.rows[page] = row
            after = page
        self.policy.admit_many(np.array(rows, np.int64))

    def touch(self, *pages: int) -> None:
        self.policy.touch(np.array([self.rows[page] for page in pages], np.int64))

    def requests(self) -> list[tuple[int, int]]:
        """(length of its path, turn) of each."""
        state = self.policy.forecast.arrays
        slots = [1 + n for n in range(int(state.counts[layout.NEXT]))]
        return [(int(state.slot[s, layout.LENGTH]), int(state.slot[s, layout.TURN])) for s in slots]


def test_what_is_put_in_parts_is_one_request() -> None:
    chains = Chains(16).at(1.0)
    chains.admit(1, 2)
    chains.at(4.0).admit(3, after=2)
    chains.at(9.0).admit(4, 5, after=3)
    assert chains.requests() == [(5, 1)]


def test_a_get_and_the_put_of_what_it_lacked_are_one_request() -> None:
    chains = Chains(16).at(1.0)
    chains.admit(1, 2, 3)
    chains.at(70.0).touch(1, 2)
    chains.touch(3)  # the second part of the get
    chains.at(75.0).admit(4, 5, after=3)
    assert chains.requests() == [(3, 1), (5, 2)]


def test_another_rank_of_the_same_engine_is_the_same_request() -> None:
    chains = Chains(16).at(1.0)
    chains.admit(1, 2, 3)
    chains.at(70.0).touch(1, 2, 3)
    chains.at(70.5).touch(1, 2, 3)
    assert chains.requests() == [(3, 1), (3, 2)]
    chains.at(80.0).touch(1, 2, 3)
    assert chains.requests() == [(3, 1), (3, 2), (3, 3)]


def test_a_page_that_goes_on_after_a_while_begins_a_request() -> None:
    chains = Chains(16).at(1.0)
    chains.admit(1, 2)
    chains.at(100.0).admit(3, after=2)
    assert chains.requests() == [(2, 1), (3, 2)]


def test_many_pages_at_a_start_are_requests_by_their_chains() -> None:
    chains = Chains(16).at(1.0)
    rows = chains.table.take_many(5)
    for page, (row, parent) in enumerate(zip(rows, (0, 1, 2, 1, 0), strict=True), start=1):
        chains.table.key_words_np[row, 0] = page
        chains.table.parent[row] = parent and rows[parent - 1] + 1
        chains.rows[page] = row
    chains.policy.admit_many(np.array(rows[::-1], np.int64))  # the coldest first
    assert sorted(chains.requests()) == [(1, 1), (2, 1), (3, 2)]
    assert len(chains.policy) == 5


@pytest.mark.parametrize(("returns_after", "stays"), [(1.0, True), (36_000.0, False)])
@pytest.mark.parametrize("hinted", [1, 11])
def test_what_is_said_of_a_return_decides_who_goes(
    hinted: int, returns_after: float, stays: bool
) -> None:
    chains = Chains(16).at(1.0)
    for page in (1, 11, 21):
        chains.admit(page)
    chains.at(200.0)
    assert chains.policy.hint_word(np.uint64(hinted), returns_after)
    gone = chains.table.key_words_np[chains.policy.evict(lambda _: True), 0]
    assert bool(gone != hinted) == stays


def test_an_ended_conversation_goes_first() -> None:
    for ended in (1, 11):
        chains = Chains(16).at(1.0)
        for page in (1, 11, 21):
            chains.admit(page)
        assert chains.policy.hint_word(np.uint64(ended), -1.0)
        assert chains.table.key_words_np[chains.policy.evict(lambda _: True), 0] == ended
    assert not chains.policy.hint_word(np.uint64(77), 1.0), "nobody has used it"


@pytest.mark.parametrize("seed", seeds(1, of=3))
def test_in_a_store_that_tells_time_and_hints_books_stay_whole(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.core.support.Store", partial(Store, make_policy=Gittins))
    store, rng = make_store(slots=24, slab_slots=4), random.Random(seed)
    for n in range(80):
        now = 1.0 + 10 * n * rng.random()
        store.forecasts.tell_time(now)
        chain = rng.randrange(8) * 100
        for read in store.acquire(NS, 0, keys([chain, chain + 1])):
            if isinstance(read, Reading):
                read.release()
        for k in range(chain, chain + rng.randrange(1, 8)):
            put(store, k, k - 1 if k > chain else None)
        store.forecasts.hint(NS, keys([chain]).tobytes(), rng.choice([-1.0, 30.0]), now=now)
        for first in range(0, 800, 100):
            held = present(store, range(first, first + 8))
            assert held == list(range(first, first + len(held)))
    assert store.forecasts.hint(NS, keys([chain]).tobytes(), 1.0, now=now)
    store.survey.check()
