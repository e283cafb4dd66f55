"""The Gittins policy over the table of page copies: what it keeps whole, bounded and the same."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest

from kvtier.core.handles import Reading
from kvtier.core.policy.forecasting import FORECASTING
from kvtier.core.policy.lru import Clock
from kvtier.core.store import Store
from kvtier.core.table import NO_ROW, CopyTable
from tests.core.gittins_support import forecast as forecasts
from tests.core.gittins_support import layout, pages, policy, segments
from tests.core.support import NS, keys, make_store, present, put
from tests.seeds import seeds

Gittins = policy.Gittins
# Kernels that are not compiled multiply words as numpy's scalars, which warn.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")


@pytest.fixture
def requests_max(monkeypatch: pytest.MonkeyPatch) -> int:
    """Of a small tier, where the kernels are not compiled."""
    monkeypatch.setattr(forecasts, "REQUESTS_MIN", 512)
    return 512


class Tier:
    """The calls of a store whose pages are known by whole numbers, in chains."""

    def __init__(self, slots: int, *, seed: int = 1, has_bypass: bool = False) -> None:
        self.table = CopyTable(slots)
        self.policy = Gittins(self.table, Clock(), seed=seed, has_bypass=has_bypass)
        self.row: dict[int, int] = {}
        self.page: dict[int, int] = {}
        self.before: dict[int, int] = {}
        self.free = list(range(slots))
        self.now = 0.0

    def serve(self, path: list[int], *, after: float = 1.0) -> int:
        """A request; how many leading pages it finds."""
        self.now += after
        self.policy.request(self.now, np.array(path, np.uint64), output=10)
        hits = next((i for i, page in enumerate(path) if page not in self.row), len(path))
        if hits:
            self.policy.touch(np.array([self.row[page] for page in path[:hits]], np.int64))
        new = path[hits:]
        new = new[: self.policy.takes(np.array(new, np.uint64))]
        while len(self.free) < len(new) and self.evict() != NO_ROW:
            pass
        rows = []
        for page in new[: len(self.free)]:
            row = self.free.pop()
            rows.append(row)
            self.table.key_words_np[row, 0] = page
            self.table.children[row] = self.table.queued[row] = 0
            self.row[page], self.page[row] = row, page
            at = path.index(page)
            self.before[page] = path[at - 1] if at else NO_ROW
            if at:
                self.table.children[self.row[path[at - 1]]] += 1
        if rows:
            self.policy.admit_many(np.array(rows, np.int64))
        return hits

    def evict(self) -> int:
        row = self.policy.evict(lambda _: True)
        if row != NO_ROW:
            assert not self.table.children[row], "a page that another one needs"
            assert not self.table.leases[row], "a page with a lease"
            self.gone(row)
        return row

    def gone(self, row: int) -> None:
        page = self.page.pop(row)
        del self.row[page]
        self.free.append(row)
        before = self.before[page]
        if before != NO_ROW:
            held = self.row[before]
            self.table.children[held] -= 1
            if not (self.table.children[held] or self.table.queued[held]):
                self.policy.ready(held)


def paths(seed: int, requests: int) -> list[list[int]]:
    """Conversations that go on, branch off each other, and end."""
    rng = random.Random(seed)
    fresh = iter(range(1, 10**9))
    chats = [[next(fresh)] for _ in range(6)]
    found = []
    for _ in range(requests):
        at = rng.randrange(len(chats))
        if rng.random() < 0.1:
            source = rng.choice(chats)
            chats[at] = source[: rng.randrange(len(source))]
        chats[at] = [*chats[at], *(next(fresh) for _ in range(rng.randrange(1, 6)))][:24]
        found.append(list(chats[at]))
    return found


@pytest.mark.parametrize("has_bypass", [False, True])
@pytest.mark.parametrize("seed", seeds(1, of=3))
def test_never_a_page_that_another_one_needs(seed: int, has_bypass: bool) -> None:
    tier = Tier(40, seed=seed, has_bypass=has_bypass)
    for path in paths(seed, 100):
        tier.serve(path)
        for page, before in tier.before.items():
            assert page not in tier.row or before == NO_ROW or before in tier.row
        assert len(tier.policy) == len(tier.row) <= 40
    held = len(tier.page)
    assert len(_drain(tier)) == held


def test_all_pages_come_out_once() -> None:
    tier = Tier(40)
    for path in paths(9, 60):
        tier.serve(path)
    held = set(tier.page)
    out = list(iter(tier.evict, NO_ROW))
    assert set(out) == held
    assert len(out) == len(held)


def test_a_page_with_a_lease_stays_until_it_is_let_go() -> None:
    tier = Tier(8)
    tier.serve([1, 2, 3])
    tier.serve([11, 12])
    leased = tier.row[3]
    tier.table.leases[leased] = 1
    assert len(_drain(tier)) == 2
    assert sorted(tier.row) == [1, 2, 3]
    tier.table.leases[leased] = 0
    assert not tier.table.queued[leased], "it waits for ready"
    tier.policy.ready(leased)
    assert len(_drain(tier)) == 3


def test_what_is_refused_is_not_named_before_it_is_ready() -> None:
    tier = Tier(8)
    tier.serve([1])
    row = tier.row[1]
    assert tier.policy.evict(lambda _: False) == NO_ROW
    assert tier.policy.evict(lambda _: True) == NO_ROW
    tier.policy.ready(row)
    assert tier.policy.evict(lambda _: True) == row


def test_a_page_that_is_forgotten_is_not_named() -> None:
    tier = Tier(8)
    tier.serve([1, 2, 3])
    row = tier.row[3]
    tier.policy.forget(row)
    tier.gone(row)
    tier.policy.forget(row)
    assert [len(tier.policy), len(_drain(tier))] == [2, 2]


@pytest.mark.parametrize("has_bypass", [False, True])
def test_state_is_bounded_under_a_scan(has_bypass: bool, requests_max: int) -> None:
    tier = Tier(100, has_bypass=has_bypass)
    sizes = []
    for n in range(500):
        tier.serve([n * 4 + k for k in range(1, 5)])
        if n in (440, 499):
            sizes.append(tier.policy.forecast.arrays.nbytes)
    count = tier.policy.forecast.arrays.counts
    assert count[layout.KNOWN] <= forecasts.KNOWN_PER_PAGE * 100
    assert count[layout.NEXT] - count[layout.OLDEST] <= requests_max
    assert sizes[0] == sizes[1]


def test_requests_of_one_page_are_bounded_too(requests_max: int) -> None:
    tier = Tier(4)
    for n in range(requests_max + 90):
        tier.serve([n % 90 + 1])
    count = tier.policy.forecast.arrays.counts
    assert count[layout.NEXT] == requests_max + 90
    assert count[layout.NEXT] - count[layout.OLDEST] <= requests_max
    assert len(_drain(tier)) == 4


@pytest.mark.parametrize("requests", [3, 64])
def test_what_is_worth_least_goes(requests: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where few requests have pages each is looked at, with the pool, and none twice for that."""
    tier = Tier(requests, seed=2)
    for n in range(requests):
        tier.serve([n + 1])
    tries: list[int] = []
    draw = pages.draw
    monkeypatch.setattr(pages, "draw", lambda *given: tries.append(given[-1]) or draw(*given))
    state = tier.policy.forecast.arrays
    for left in range(requests, max(0, requests - 20), -1):
        live = state.row_list[: state.counts[layout.ROW_LIVE]]
        ages = state.level[layout.NOW] - state.time[live]
        worth = {
            slot: segments.worth(state.slot, state.curve, age, slot, 0)
            for slot, age in zip(live.tolist(), ages.tolist(), strict=True)
        }
        row = tier.policy.evict(lambda _: True)
        (gone,) = set(worth) - set(state.row_list[: state.counts[layout.ROW_LIVE]].tolist())
        assert worth[gone] == min(worth.values())
        assert tries == list(range(-layout.POOL, left))
        tries.clear()
        tier.gone(row)


@pytest.mark.parametrize("seed", [1, pytest.param(5, marks=pytest.mark.soak)])
def test_the_same_seed_decides_the_same(seed: int) -> None:
    found = []
    for _ in range(2):
        tier = Tier(60, seed=seed)
        found.append(([tier.serve(path) for path in paths(3, 150)], sorted(tier.row)))
    assert found[0] == found[1]


def test_what_was_learned_is_taken_up_whole() -> None:
    tier = Tier(60)
    for path in paths(4, 120):
        tier.serve(path)
    learned = tier.policy.learned()
    other = Gittins(CopyTable(60), Clock())
    other.learn_from(learned)
    ours, theirs = tier.policy.forecast.arrays, other.forecast.arrays
    assert np.array_equal(ours.fine, theirs.fine)
    assert np.array_equal(ours.coarse, theirs.coarse)
    assert other.learned() == learned
    assert len(learned) == policy.LEARNED_BYTES


@pytest.mark.parametrize("damage", ["short", "nan", "square", "guard"])
def test_what_nothing_can_have_learned_is_refused_and_changes_nothing(damage: str) -> None:
    tier = Tier(4)
    before = tier.policy.learned()
    saved = bytearray(before)
    numbers = {"nan": (0, np.float32("nan")), "square": (196 * 44 * 4, np.float32(-1))}
    if damage in numbers:
        at, number = numbers[damage]
        saved[at : at + 4] = number.tobytes()
    elif damage == "guard":
        saved[-1] = 7
    else:
        del saved[-1]
    with pytest.raises(ValueError, match=r"bytes where|nothing can|negative"):
        tier.policy.learn_from(bytes(saved))
    assert tier.policy.learned() == before


def test_pages_that_no_request_names_are_evicted_tail_first() -> None:
    tier = Tier(8)
    for row, page in enumerate([1, 2, 3]):
        tier.table.key_words_np[row, 0] = page
        tier.row[page], tier.page[row], tier.before[page] = row, page, page - 1 or NO_ROW
        tier.table.parent[row] = row
        tier.policy.admit(row)
        if row:
            tier.table.children[row - 1] = 1
            tier.policy.keep(row - 1)
    tier.policy.touch(np.array([0, 1, 2], np.int64))
    assert _drain(tier) == [2, 1, 0]


def test_paths_that_contradict_each_other_break_nothing() -> None:
    rng = random.Random(3)
    forecast = forecasts.Forecast()
    for n in range(150):
        path = [rng.randrange(30) for _ in range(rng.randrange(9))]  # a block may come twice
        forecast.serve(float(n), np.array(path, np.uint64), pages=10)
    counts = forecast.arrays.counts
    owned = 0
    for number in range(counts[layout.OLDEST], counts[layout.NEXT]):
        slot = forecast.arrays.slot[1 + number % (len(forecast.arrays.time) - 1)]
        owned += max(0, slot[layout.LENGTH] - slot[layout.START])
    assert owned == counts[layout.KNOWN] <= 30
    assert 0 <= counts[layout.SHADOW_TOTAL] <= 10
    assert 0 <= counts[layout.LRU_TOTAL] <= 10


def test_names_make_policies() -> None:
    for make in FORECASTING.values():
        made = make(CopyTable(4), Clock())
        assert made.evict(lambda _: True) == NO_ROW
        assert made.takes(np.array([7], np.uint64)) == 1


def _drain(tier: Tier) -> list[int]:
    return list(iter(tier.evict, NO_ROW))


@pytest.mark.parametrize("seed", seeds(1, of=2))
def test_in_a_store_every_page_keeps_the_one_before_it(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.core.support.Store", partial(Store, make_policy=Gittins))
    store, rng = make_store(slots=24, slab_slots=4), random.Random(seed)
    for _ in range(60):
        chain = rng.randrange(8) * 100
        for n in range(chain, chain + rng.randrange(1, 8)):
            put(store, n, n - 1 if n > chain else None)
        for read in store.acquire(NS, 0, keys([chain, chain + 1])):
            if isinstance(read, Reading):
                read.release()
        for first in range(0, 800, 100):
            held = present(store, range(first, first + 8))
            assert held == list(range(first, first + len(held)))
    store.survey.check()
