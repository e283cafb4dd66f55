"""Proof that the simulation sees what it is there to see: with a fault planted in the product, some
seed of a few fails, and says which one it is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

import pytest

from kvtier.core.grants import Grants
from kvtier.core.handles import Filling, Reading
from kvtier.core.movement import Movement, Step
from kvtier.core.moves import Moves
from kvtier.core.page import GetCode, Tier
from kvtier.core.quarantine import Quarantine
from kvtier.core.residents import Residents
from kvtier.core.store import Store
from kvtier.daemon.durability import Durability
from kvtier.tiers import nvme_recovery
from kvtier.transfer import mover as mover_module
from kvtier.transfer import outlet as outlet_module
from kvtier.transfer.intake import Intake
from kvtier.transfer.place import Place
from kvtier.transfer.turns import Turns
from tests.sim.oracle import Broken
from tests.sim.sim_disk import StateDisk
from tests.sim.world import World

STEPS = 1200

# Each search begins with a seed that finds its fault soon.


def failures(seeds: Iterable[int], *, of: str = "") -> None:
    """One of the seeds finds the fault, says which seed it is, and what the fault has done."""
    found = []
    for seed in seeds:
        try:
            World(seed).run(STEPS)
        except Broken as error:
            found.append(f"{type(error).__name__} {error}")
            if f"seed {seed}:" in str(error) and of in found[-1]:
                return
    raise AssertionError(f"none of {found} tells of {of!r}")


# -- pages in host memory ------------------------------------------------------------------------


def test_an_unverified_put_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Intake._check
    verified = Place.payload_ok

    def trusting(self: Intake, meta, payload):
        Place.payload_ok = lambda *_: True
        try:
            return original(self, meta, payload)
        finally:
            Place.payload_ok = verified

    monkeypatch.setattr(Intake, "_check", trusting)
    monkeypatch.setattr(Place, "payload_ok", verified)
    failures(range(1, 30), of="WrongByte")


def test_a_lease_given_back_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = outlet_module.load

    def hasty(arena, identity, reading, key, *, check_payload):
        loaded = original(arena, identity, reading, key, check_payload=check_payload)
        reading.release()
        return loaded

    monkeypatch.setattr(outlet_module, "load", hasty)
    failures(range(30))


def test_a_slot_that_leaks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Filling, "abandon", lambda self: None)
    failures(range(1, 20), of="still being filled")


def test_a_slot_used_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Residents._give_back
    numbers = iter(range(1, 1_000_000))

    def doubly(self: Residents, rows: Sequence[int]) -> None:
        tier, slots = Tier(self.table.tier[rows[0]]), [self.table.slot[row] for row in rows]
        original(self, rows)
        self.allocators[tier].free_many([slot for slot in slots if next(numbers) % 50 == 0])

    monkeypatch.setattr(Residents, "_give_back", doubly)
    failures(range(1, 10))


def test_a_slot_that_is_used_anew_while_its_holder_writes_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Grants, "end", Grants.settle)
    failures(range(68, 98), of="a sum failed without damage")


def test_a_get_that_misses_what_is_there_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Store.acquire
    calls = iter(range(1, 1_000_000))

    def forgetful(self: Store, namespace, shard, keys, **how):
        outcomes = original(self, namespace, shard, keys, **how)
        if next(calls) % 2:
            return outcomes
        for outcome in outcomes:
            if isinstance(outcome, Reading):
                outcome.release()
        return [GetCode.MISS] * len(outcomes)

    monkeypatch.setattr(Store, "acquire", forgetful)
    failures(range(10), of="missed what was there")


def test_a_quarantine_that_is_never_drained_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Quarantine, "trim", lambda self, tier: None)
    failures(range(4, 40), of="over its cap")


# -- pages on their way to and from NVMe ---------------------------------------------------------


def test_a_demotion_of_a_page_that_was_deleted_meanwhile_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Moves, "is_lost", lambda self, target: False)
    failures(range(60))


def test_an_unverified_promotion_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = mover_module.check

    def trusting(record, identity, reading, key, *, check_payload):
        return original(record, identity, reading, key, check_payload=False)

    monkeypatch.setattr(mover_module, "check", trusting)
    failures(range(11, 60), of="a sum failed without damage")


def test_a_slot_reused_while_a_late_write_is_under_way_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def give_back(self: Movement) -> None:
        self._step(Step.STRAND)
        self.target.abandon()

    monkeypatch.setattr(Movement, "strand", give_back)
    failures(range(42, 82))


# -- what a restart has to find, and what not ----------------------------------------------------


async def nothing(self, *_: object, **__: object) -> None:
    """In place of a method that journals."""


def test_a_delete_that_is_not_journalled_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Durability, "journal", nothing)
    failures(range(7, 60), of="came back")


def test_a_checkpoint_that_loses_copies_in_flight_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Moves, "under_way", lambda self: [])
    failures(range(30), of="did not come back")


def test_a_segment_that_is_not_marked_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Durability, "mark", nothing)
    failures(range(30), of="did not come back")


def test_a_torn_copy_in_the_way_of_a_whole_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def at_once(self: Turns, name: object) -> AsyncIterator[None]:
        yield

    monkeypatch.setattr(Turns, "of", at_once)
    monkeypatch.setattr(nvme_recovery, "is_whole", lambda *_, **__: True)
    failures(range(135, 200), of="did not come back")


def test_a_bump_that_is_not_saved_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def save(self: StateDisk, state) -> None:
        if len(state["families"]) > len(self.namespaces.get("families", ())):
            self.namespaces = state

    monkeypatch.setattr(StateDisk, "save_namespaces", save)
    failures(range(2, 30), of="was bumped and is back")


def test_a_start_with_an_older_directory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme_recovery, "refusal", lambda *_: None)
    failures(range(10), of="a start with an older directory is not refused")


def test_a_healthy_directory_that_is_refused_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices note a journal before it is there."""
    monkeypatch.setattr(Durability, "number", property(lambda self: self._number + 1))
    failures(range(10), of="is an older copy")


def test_pages_that_are_not_waited_for_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that does not say what it lacks takes the place of the one that has it."""
    monkeypatch.setattr(Durability, "wait_for", lambda self, waits: None)
    failures(range(12, 30), of="did not come back with its device")
