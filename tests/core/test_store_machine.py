"""The store machine over a small tier, and over one so small that most puts evict, with every
policy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import initialize, run_state_machine_as_test

from kvtier.core.grants import Grants
from kvtier.core.lifecycle import Event
from kvtier.core.page import PutCode, Tier
from kvtier.core.placement import Placement
from kvtier.core.policy import POLICIES
from kvtier.core.policy.lru import LruTailFirst
from kvtier.core.residents import Residents
from kvtier.core.store import Store
from kvtier.core.table import NO_ROW
from kvtier.testing.store_machine import StoreMachine
from tests.core.support import make_store


class Roomy(StoreMachine):
    grants_share, quarantine_share = 0.2, 0.4
    make_store = staticmethod(
        lambda: make_store(slots=16, grants_share=0.2, quarantine_share=0.4),
    )


class Tight(StoreMachine):
    grants_share, quarantine_share = 0.5, 0.75
    make_store = staticmethod(
        lambda: make_store(slots=4, slab_slots=2, grants_share=0.5, quarantine_share=0.75)
    )


class Tiny(StoreMachine):
    make_store = staticmethod(lambda: make_store(slots=2))


class Full(Tiny):
    """Without room from the first step on: what is wrong with evictions shows at once."""

    @initialize()
    def fill(self) -> None:
        for n in (0, 1):
            self.seal(self.reserve(n=n, parent=None))


class OtherTurns(StoreMachine):
    """For policies that go by more than the last use: any page that nothing keeps may go, but only
    one, and only when there is no room."""

    def make_way(self, *, room: bool, code: PutCode | None) -> None:
        for n in self.there - self.found():
            self.used[n] = -1
        super().make_way(room=room, code=code)


class RoomyOther(OtherTurns, Roomy):
    ttl_ms = 3000


class TightOther(OtherTurns, Tight):
    ttl_ms = 3000


SHORT = settings(max_examples=30, stateful_step_count=40, deadline=None, print_blob=True)
# A planted fault has to be found, not made small.
HUNT = settings(SHORT, max_examples=1000, phases=[Phase.generate], report_multiple_bugs=False)


SMALL = [(Tight, "lru"), (TightOther, "arc"), (TightOther, "s3-fifo")]
LARGE = [(Roomy, "lru"), (RoomyOther, "arc"), (RoomyOther, "s3-fifo")]


@pytest.fixture
def with_policy(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    monkeypatch.setattr("tests.core.support.Store", partial(Store, make_policy=POLICIES[policy]))


@pytest.mark.usefixtures("with_policy")
@pytest.mark.parametrize(("machine", "policy"), [*SMALL, LARGE[0]])
def test_the_store_agrees_with_the_oracle(machine: type[StoreMachine], policy: str) -> None:
    run_state_machine_as_test(machine, settings=SHORT)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("with_policy")
@pytest.mark.parametrize(("machine", "policy"), [*SMALL, *LARGE])
def test_the_store_agrees_with_the_oracle_for_long(
    machine: type[StoreMachine], policy: str
) -> None:
    run_state_machine_as_test(machine, settings=settings(SHORT, max_examples=500))


@pytest.fixture
def careless_seal(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Store._seal

    def careless(self: Store, filling):
        self._shard_counts.setdefault(filling.namespace, 1)
        return original(self, filling)

    monkeypatch.setattr(Store, "_seal", careless)


@pytest.mark.usefixtures("careless_seal")
def test_the_machine_finds_a_seal_that_ignores_an_ended_namespace() -> None:
    """A check that cannot fail is none. By chance it takes up to a quarter of a minute, so driven
    by hand: its namespace ends between a put's two halves."""
    machine = Roomy()
    filling = machine.reserve(n=0, parent=None)
    machine.bump()
    with pytest.raises(AssertionError):
        machine.seal(filling)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("careless_seal")
def test_the_machine_finds_that_seal_by_chance() -> None:
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Roomy, settings=HUNT)


@pytest.mark.parametrize("of_grants", [False, True])
def test_the_machine_finds_a_slot_that_is_never_given_back(
    monkeypatch: pytest.MonkeyPatch, *, of_grants: bool
) -> None:
    """Of a put that was begun alone, or of a grant."""
    original = Residents.abandon_many

    def leaky(self: Residents, rows: Sequence[int]) -> None:
        if rows:
            self._fire_many(rows, Event.ABANDON)

    alone, many = (original, leaky) if of_grants else (leaky, original)
    monkeypatch.setattr(Residents, "abandon", lambda self, row: alone(self, (row,)))
    monkeypatch.setattr(Residents, "abandon_many", many)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Tight, settings=HUNT)


def test_the_machine_finds_a_grant_that_is_freed_at_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its holder may still write there."""

    def careless(self: Grants, rows: Iterable[int]) -> int:
        generations = [self._residents.table.generation[row] for row in rows]
        for holder in list(self._held):
            self._free([row for row in self._let_go(holder, generations) if row != NO_ROW])
        return len(generations)

    monkeypatch.setattr(Grants, "_quarantine", careless)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Roomy, settings=HUNT)


def test_the_machine_finds_an_eviction_that_ignores_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rare by chance, so driven by hand: two pages, one pinned, then two more."""
    for name in ("hold", "release", "hold_many", "release_many"):
        monkeypatch.setattr(Residents, name, lambda self, rows: None)
    machine = Tiny()
    for n in (0, 1):
        machine.seal(machine.reserve(n=n, parent=None))
    machine.pin(numbers=[0], ttl=9)
    machine.seal(machine.reserve(n=2, parent=None))
    with pytest.raises(AssertionError, match="a pinned page was evicted"):
        machine.reserve(n=3, parent=None)


def test_the_machine_finds_a_store_that_never_evicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Placement, "_evict", lambda self, tier, record_bytes, count: False)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Full, settings=HUNT)


def test_the_machine_finds_a_store_that_evicts_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Placement._evict

    def greedy(self: Placement, tier: Tier, record_bytes: int, count: int) -> bool:
        return original(self, tier, record_bytes, count + 1)

    monkeypatch.setattr(Placement, "_evict", greedy)
    with pytest.raises(AssertionError, match="another page's turn"):
        run_state_machine_as_test(Full, settings=HUNT)


def test_the_machine_finds_an_eviction_out_of_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pages, the older one used again: the other has to go."""
    monkeypatch.setattr(LruTailFirst, "touch", lambda self, rows: None)
    machine = Tiny()
    for n in (0, 1):
        machine.seal(machine.reserve(n=n, parent=None))
    machine.release(machine.acquire(numbers=[0]))
    with pytest.raises(AssertionError, match="another page's turn"):
        machine.reserve(n=2, parent=None)
