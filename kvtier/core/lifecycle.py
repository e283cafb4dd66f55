"""The life of a page copy, as one table.

    FREE --reserve--> FILLING --seal--> SEALED --retire--> RETIRING --drain--> FREE
                         |                 |                  |
                         |                 +----condemn---+---+
                         +--abandon--> FREE               v
                         +--orphan---------------> QUARANTINED --drain--> FREE

    FREE --restore--> SEALED    a copy that was sealed in an earlier boot and has survived

Rules, proven by walking every (state, event) pair:

* an event that is not in the table raises and changes nothing;
* every reserve takes a fresh generation, so a ref to an earlier life of the slot is stale for good;
  a restore brings the one that the copy was reserved with;
* a page can be found if, and only if, it is SEALED;
* DRAIN needs that no lease, queued I/O or grant names the slot any more.

This is the only file that assigns a state or a generation. The caller holds the store's lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = [
    "TRANSITIONS",
    "Event",
    "IllegalTransition",
    "State",
    "fire_many",
    "next_state",
    "restore",
]


class State(IntEnum):
    FREE = 0
    FILLING = 1
    SEALED = 2
    RETIRING = 3
    QUARANTINED = 4


#: By number: a look-up costs a fifth of making the enum of it.
_STATES: tuple[State, ...] = tuple(State)


class Event(IntEnum):
    RESERVE = 1
    SEAL = 2
    ABANDON = 3
    ORPHAN = 4
    RETIRE = 5
    CONDEMN = 6
    DRAIN = 7
    RESTORE = 8


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.FREE, Event.RESERVE): State.FILLING,
    (State.FREE, Event.RESTORE): State.SEALED,
    (State.FILLING, Event.SEAL): State.SEALED,
    (State.FILLING, Event.ABANDON): State.FREE,
    (State.FILLING, Event.ORPHAN): State.QUARANTINED,
    (State.SEALED, Event.RETIRE): State.RETIRING,
    (State.SEALED, Event.CONDEMN): State.QUARANTINED,
    (State.RETIRING, Event.DRAIN): State.FREE,
    (State.RETIRING, Event.CONDEMN): State.QUARANTINED,
    (State.QUARANTINED, Event.DRAIN): State.FREE,
}


_FRESH = frozenset({Event.RESERVE, Event.RESTORE})
# Found on the class, a member costs ten times as much.
_FREE = State.FREE


class IllegalTransition(AssertionError):
    """A programmer's error: this event cannot happen to a page in this state."""


class _Columns(Protocol):
    """The columns of core/table.py that a transition reads and writes."""

    state: memoryview
    generation: memoryview
    leases: memoryview


class _Arrays(Protocol):
    """The same columns as arrays."""

    def column(self, name: str) -> npt.NDArray[Any]: ...


def next_state(state: State, event: Event) -> State:
    """The state after `event`, or IllegalTransition."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(f"{event.name} cannot happen in state {state.name}") from None


def fire_many(
    columns: _Columns, rows: Sequence[int], event: Event, *, generations: Sequence[int] = ()
) -> tuple[State, State]:
    """Applies `event` to each of `rows`, all different and all in one state: (it, the new one).

    RESERVE and RESTORE take the `generations` of the rows; other events ignore them. On
    IllegalTransition no row has changed.
    """
    states, leases, numbers = columns.state, columns.leases, columns.generation
    first = states[rows[0]]
    for row in rows:
        if states[row] != first:
            raise IllegalTransition(f"{event.name} of rows that are not all {_STATES[first].name}")
    before = _STATES[first]
    after = next_state(before, event)
    if event in _FRESH:
        for row, generation in zip(rows, generations, strict=True):
            if generation <= numbers[row]:
                raise IllegalTransition(f"generation {generation} is not fresh for row {row}")
        for row, generation in zip(rows, generations, strict=True):
            columns.generation[row] = generation
    elif after is _FREE:
        for row in rows:
            if leases[row]:
                raise IllegalTransition(f"{event.name} of row {row} with {leases[row]} leases")
    value = int(after)
    for row in rows:
        columns.state[row] = value
    return before, after


def restore(
    table: _Arrays, rows: npt.NDArray[np.int64], generations: npt.NDArray[np.uint64]
) -> None:
    """RESTORE for all of `rows`, which were never used, with the generations they had: a vector
    pass, for a whole tier."""
    states = table.column("state")
    if bool((states[rows] != State.FREE).any()) or bool((generations == 0).any()):
        raise IllegalTransition("RESTORE of a row that is not FREE, or without a generation")
    table.column("generation")[rows] = generations
    states[rows] = next_state(State.FREE, Event.RESTORE)
