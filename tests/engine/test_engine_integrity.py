"""Faults planted under a running request: its tags find each, and that request alone ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvtier_engine.engine import Engine
from kvtier_engine.errors import KvTagMismatch
from kvtier_engine.handle import Handle
from kvtier_engine.model.load import LoadedModel
from kvtier_engine.schedule.request import Completion
from kvtier_engine.schedule.sequence import Sequence
from kvtier_engine.schedule.states import State
from kvtier_engine.settings import Integrity
from tests.engine.engine_rig import answers, engine_of, greedy, prompt_of, tiny_model

VICTIM, OTHER = greedy(prompt_of(30, seed=1), 40), greedy(prompt_of(21, seed=2), 40)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return tiny_model()


@pytest.fixture(scope="module")
def expected(model: LoadedModel) -> dict[str, tuple[int, ...]]:
    victim, other = answers(engine_of(model), [VICTIM, OTHER])
    return {"victim": victim.tokens, "other": other.tokens}


def given_to_another(engine: Engine, victim: Sequence) -> None:
    """Freed by mistake, and somebody else gets it."""
    page = victim.table.ids[-1]
    engine.pool.free([page])
    (again,) = engine.pool.allocate(1)
    assert again == page
    engine.pool.rows[page].zero_()


def off_by_one(_: Engine, victim: Sequence) -> None:
    victim.table.pages.add_(1)


def off_the_end(engine: Engine, victim: Sequence) -> None:
    victim.table.pages[1] = engine.pool.pages - 1


def swapped(_: Engine, victim: Sequence) -> None:
    # With the last one: two full pages in the wrong order are the same to softmax attention.
    pages = victim.table.pages
    pages[[0, -1]] = pages[[-1, 0]].clone()


def another_request(engine: Engine, victim: Sequence) -> None:
    """The page of somebody else's, which is alive."""
    (other,) = [sequence for sequence in engine.inside.sequences if sequence != victim]
    victim.table.pages[0] = other.table.ids[0]


FAULTS: dict[str, Callable[[Engine, Sequence], None]] = {
    fault.__name__: fault
    for fault in (given_to_another, off_by_one, off_the_end, swapped, another_request)
}


def run_with(
    model: LoadedModel, fault: Callable[[Engine, Sequence], None], integrity: Integrity
) -> tuple[Engine, Handle, Handle]:
    engine = engine_of(model, integrity=integrity)
    victim, other = engine.submit(VICTIM), engine.submit(OTHER)
    while engine.stats().get("decode_passes", 0) < 12:
        engine.step()
    fault(engine, engine.inside.sequence(victim))
    engine.run_until_idle()
    return engine, victim, other


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_ends_its_request_alone(
    model: LoadedModel, expected: dict[str, tuple[int, ...]], name: str
) -> None:
    engine, victim, other = run_with(model, FAULTS[name], Integrity.TAGS)
    with pytest.raises(KvTagMismatch):
        victim.result(0)
    assert other.result(0).tokens == expected["other"]
    stats = engine.stats()
    assert (stats["integrity_failures"], stats["requests_failed"]) == (1, 1)
    if name == "given_to_another":
        # The page is the other's, and was left to it.
        assert stats["foreign_pages"] == 1
        engine.pool.free([page for page in range(64) if engine.pool.references(page)][-1:])
    # The engine goes on, and serves the same request.
    assert answers(engine, [VICTIM])[0].tokens == expected["victim"]


@pytest.mark.parametrize("name", ["off_by_one", "swapped", "another_request"])
def test_without_tags_each_is_a_wrong_answer(
    model: LoadedModel, expected: dict[str, tuple[int, ...]], name: str
) -> None:
    engine, victim, _ = run_with(model, FAULTS[name], Integrity.OFF)
    assert isinstance(victim.end, Completion)
    assert victim.end.tokens != expected["victim"], "the fault changes nothing: a poor test"
    assert "integrity_failures" not in engine.stats()


def test_a_table_from_before_a_preemption_is_found(
    model: LoadedModel, expected: dict[str, tuple[int, ...]]
) -> None:
    engine = engine_of(model, integrity=Integrity.TAGS)
    handle = engine.submit(VICTIM)
    engine.step()
    while (sequence := engine.inside.sequence(handle)).state is not State.DECODING:
        engine.step()
    old = (sequence.table.pages.clone(), sequence.table.tags.clone())
    engine.inside.preempt(handle)
    engine.inside.evict(64)  # so that it gets pages anew
    while sequence.state is not State.DECODING:
        engine.step()
    sequence.table.pages[: len(old[0])] = old[0]
    sequence.table.tags[: len(old[1])] = old[1]
    assert not torch.equal(engine.pool.tags[old[0].long()], old[1])
    engine.run_until_idle()
    with pytest.raises(KvTagMismatch):
        handle.result(0)
    assert answers(engine, [VICTIM])[0].tokens == expected["victim"]


def test_sound_tables_pass_also_under_pressure(
    model: LoadedModel, expected: dict[str, tuple[int, ...]]
) -> None:
    engine = engine_of(model, pages=11, integrity=Integrity.TAGS)
    victim, other = answers(engine, [VICTIM, OTHER])
    assert (victim.tokens, other.tokens) == (expected["victim"], expected["other"])
    assert engine.stats()["preemptions"] > 0
    assert engine.stats().get("integrity_failures", 0) == 0


@pytest.mark.parametrize(("made", "then"), [("off", "tags"), ("tags", "off")])
def test_what_is_set_later_is_what_the_next_step_does(
    model: LoadedModel, made: str, then: str
) -> None:
    engine = engine_of(model, integrity=Integrity(made))
    victim = engine.submit(VICTIM)
    while engine.stats().get("decode_passes", 0) < 12:
        engine.step()
    engine.inside.set_integrity(Integrity(then))
    off_by_one(engine, engine.inside.sequence(victim))
    engine.run_until_idle()
    assert isinstance(victim.end, KvTagMismatch if then == "tags" else Completion)
