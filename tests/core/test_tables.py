"""The two state tables, walked exhaustively, and the documents that draw them."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from kvtier.core import lifecycle, movement
from kvtier.core.lifecycle import Event, IllegalTransition, State, fire_many
from kvtier.core.movement import Movement, Phase, Step
from kvtier.core.page import PutCode
from kvtier.core.table import CopyTable
from tests.core.support import take_row

KEY = bytes(range(32))


def table_in(state: State) -> tuple[CopyTable, int]:
    """A table with one row that reached `state` by legal events."""
    table = CopyTable(4)
    row = take_row(table, KEY)
    path = {
        State.FREE: [],
        State.FILLING: [Event.RESERVE],
        State.SEALED: [Event.RESERVE, Event.SEAL],
        State.RETIRING: [Event.RESERVE, Event.SEAL, Event.RETIRE],
        State.QUARANTINED: [Event.RESERVE, Event.ORPHAN],
    }[state]
    for event in path:
        fire_many(table, (row,), event, generations=(7,))
    assert table.state[row] == state
    return table, row


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_every_pair_of_state_and_event(state: State, event: Event) -> None:
    table, row = table_in(state)
    before = bytes(table.column("state")), bytes(table.column("generation"))
    after = lifecycle.TRANSITIONS.get((state, event))
    if after is None:
        with pytest.raises(IllegalTransition):
            fire_many(table, (row,), event, generations=(8,))
        assert (bytes(table.column("state")), bytes(table.column("generation"))) == before
    else:
        assert fire_many(table, (row,), event, generations=(8,)) == (state, after)
        assert table.state[row] == after


@pytest.mark.parametrize("generation", [0, 6, 7])
def test_a_reserve_needs_a_fresh_generation(generation: int) -> None:
    table, row = table_in(State.FILLING)
    fire_many(table, (row,), Event.ABANDON)
    with pytest.raises(IllegalTransition, match="not fresh"):
        fire_many(table, (row,), Event.RESERVE, generations=(generation,))
    assert table.state[row] == State.FREE
    assert table.generation[row] == 7


@pytest.mark.parametrize("state", [State.FILLING, State.RETIRING, State.QUARANTINED])
def test_nothing_becomes_free_while_a_lease_names_it(state: State) -> None:
    table, row = table_in(state)
    table.leases[row] = 1
    event = Event.ABANDON if state is State.FILLING else Event.DRAIN
    with pytest.raises(IllegalTransition, match="1 leases"):
        fire_many(table, (row,), event)
    assert table.state[row] == state


def test_the_picture_in_the_module_names_every_state_and_event() -> None:
    picture = lifecycle.__doc__
    assert picture is not None
    for name in [state.name for state in State] + [event.name.lower() for event in Event]:
        assert re.search(rf"\b{name}\b", picture), name


def test_only_lifecycle_assigns_a_state_or_generation() -> None:
    root = Path(lifecycle.__file__).parents[1]
    writes = re.compile(r"\.(state|generation)\[[^\]]*\]\s*=[^=]")
    found = [
        path.name for path in root.rglob("*.py") if writes.search(path.read_text(encoding="utf-8"))
    ]
    assert found == ["lifecycle.py"]


class FakeHandles:
    """Source and target of a movement, recording what was called."""

    def __init__(self, code: PutCode = PutCode.STORED) -> None:
        self.calls: list[str] = []
        self._code = code

    def seal(self) -> PutCode:
        self.calls.append("seal")
        return self._code

    def abandon(self) -> None:
        self.calls.append("abandon")

    def release(self) -> None:
        self.calls.append("release")


def movement_in(phase: Phase) -> tuple[Movement, FakeHandles]:
    code = PutCode.EXISTS if phase is Phase.FAILED else PutCode.STORED
    handles = FakeHandles(code)
    moving = Movement(handles, handles)  # type: ignore[arg-type]
    for name in ("copied", "verified", "publish")[: min(phase, Phase.DONE) - 1]:
        getattr(moving, name)()
    assert moving.phase is phase
    handles.calls.clear()
    return moving, handles


@pytest.mark.parametrize(
    ("phase", "action"),
    list(itertools.product(Phase, ["copied", "verified", "publish", "fail"])),
)
def test_every_pair_of_phase_and_step(phase: Phase, action: str) -> None:
    moving, handles = movement_in(phase)
    step = {
        "copied": Step.COPY,
        "verified": Step.VERIFY,
        "publish": Step.PUBLISH,
        "fail": Step.FAIL,
    }[action]
    after = movement.TRANSITIONS.get((phase, step))
    if after is None:
        with pytest.raises(IllegalTransition):
            getattr(moving, action)()
        assert moving.phase is phase
        assert handles.calls == []
    else:
        getattr(moving, action)()
        assert moving.phase is after
    if after is Phase.DONE:
        assert handles.calls == ["seal", "release"]
    if after is Phase.FAILED:
        assert handles.calls == ["abandon", "release"]


def test_a_lost_publish_lets_go_of_the_source_and_is_final() -> None:
    handles = FakeHandles(PutCode.EXISTS)
    moving = Movement(handles, handles)  # type: ignore[arg-type]
    moving.copied()
    moving.verified()
    assert moving.publish() is PutCode.EXISTS
    assert moving.phase is Phase.FAILED
    assert handles.calls == ["seal", "release"]
    with pytest.raises(IllegalTransition):
        moving.fail()
