"""Many seeds of the whole-system simulation, and proof that it sees what it is there to see.

A failure names its seed: `World(seed).run(1200)` replays it step by step.
"""

from __future__ import annotations

import os
import sys

import pytest

from kvtier.core.handles import Filling, Reading
from kvtier.core.ledger import LedgerError
from kvtier.core.page import GetCode
from kvtier.core.residents import Residents
from kvtier.core.store import Store
from kvtier.transfer import outlet as outlet_module
from kvtier.transfer.intake import Intake
from kvtier.transfer.place import Place
from tests.sim.world import World, WrongByte, run_seeds

STEPS = 1200


def test_seeds() -> None:
    stored, hits, flips, corrupt = run_seeds(range(24), STEPS)
    assert stored > 1000
    assert hits > 500
    assert flips > 100
    assert corrupt > 10


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_thousand_seeds() -> None:
    seeds = int(os.environ.get("KVTIER_SIM_SEEDS", "1000"))
    stored, hits, flips, corrupt = run_seeds(range(1_000_000, 1_000_000 + seeds), STEPS)
    summary = f"{stored} stored, {hits} hits checked, {flips} bits flipped, {corrupt} found corrupt"
    sys.stderr.write(f"{seeds} seeds from 1000000: {summary}\n")
    assert corrupt > 0


def test_a_seed_is_one_run() -> None:
    traces = []
    for _ in range(2):
        world = World(7)
        world.run(STEPS)
        traces.append(world.trace)
    other = World(8)
    other.run(STEPS)
    assert traces[0] == traces[1] != other.trace


def fails(seeds: range) -> list[tuple[int, BaseException]]:
    found = []
    for seed in seeds:
        try:
            World(seed).run(STEPS)
        except AssertionError as error:
            found.append((seed, error))
    return found


def test_an_unverified_put_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Intake._check

    def trusting(self: Intake, meta, payload):
        monkeypatch.setattr(Place, "payload_ok", lambda *_: True)
        try:
            return original(self, meta, payload)
        finally:
            monkeypatch.undo()
            monkeypatch.setattr(Intake, "_check", trusting)

    monkeypatch.setattr(Intake, "_check", trusting)
    found = fails(range(30))
    assert any(isinstance(error, WrongByte) for _, error in found)
    assert all(f"seed {seed}" in str(error) for seed, error in found)


def test_a_lease_given_back_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = outlet_module.load

    def hasty(arena, identity, reading, key, *, check_payload):
        loaded = original(arena, identity, reading, key, check_payload=check_payload)
        reading.release()
        return loaded

    monkeypatch.setattr(outlet_module, "load", hasty)
    assert fails(range(30)) != []


def test_a_slot_that_leaks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Filling, "abandon", lambda self: None)
    found = fails(range(10))
    assert any("still being filled" in str(error) for _, error in found)


def test_a_slot_used_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Residents._give_back
    calls = iter(range(1, 1_000_000))

    def doubly(self: Residents, row: int) -> None:
        tier = next(iter(self.allocators))
        slot = self.table.slot[row]
        original(self, row)
        if next(calls) % 50 == 0:
            self.allocators[tier].free(slot)

    monkeypatch.setattr(Residents, "_give_back", doubly)
    found = fails(range(10))
    assert any(isinstance(error, (LedgerError, AssertionError)) for _, error in found)


def test_a_get_that_misses_what_is_there_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Store.acquire
    calls = iter(range(1, 1_000_000))

    def forgetful(self: Store, namespace, shard, keys):
        outcomes = original(self, namespace, shard, keys)
        if next(calls) % 2:
            return outcomes
        for outcome in outcomes:
            if isinstance(outcome, Reading):
                outcome.release()
        return [GetCode.MISS] * len(outcomes)

    monkeypatch.setattr(Store, "acquire", forgetful)
    assert any("missed what was there" in str(error) for _, error in fails(range(10)))


def test_a_quarantine_that_is_never_drained_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Residents, "_drain_quarantine", lambda self, tier: None)
    assert any("over its cap" in str(error) for _, error in fails(range(10)))
