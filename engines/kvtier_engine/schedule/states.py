"""The life of a request as a table; an illegal event raises and changes nothing.

    WAITING --admit--> PREFILLING --computed--> DECODING --finish--> FINISHED
       |                 ^    \\                  /
       \\--await--> AWAITING_KV  \\--preempt-------/--> PREEMPTED --admit, await--> as WAITING
                  (loaded ^)                          finish leads to FINISHED from everywhere

AWAITING_KV has its pages while a load from kvtier fills them, and computes nothing.
"""

from __future__ import annotations

import enum

from kvtier_engine.errors import EngineInconsistent

__all__ = ["TRANSITIONS", "Event", "State", "after"]


class State(enum.Enum):
    WAITING = "waiting"
    AWAITING_KV = "awaiting_kv"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Event(enum.Enum):
    """FINISH is any end: done, cancelled or failed."""

    ADMIT = "admit"
    AWAIT = "await"
    LOADED = "loaded"
    COMPUTED = "computed"
    PREEMPT = "preempt"
    FINISH = "finish"


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.WAITING, Event.ADMIT): State.PREFILLING,
    (State.WAITING, Event.AWAIT): State.AWAITING_KV,
    (State.PREEMPTED, Event.ADMIT): State.PREFILLING,
    (State.PREEMPTED, Event.AWAIT): State.AWAITING_KV,
    (State.AWAITING_KV, Event.LOADED): State.PREFILLING,
    (State.PREFILLING, Event.COMPUTED): State.DECODING,
    (State.PREFILLING, Event.PREEMPT): State.PREEMPTED,
    (State.DECODING, Event.PREEMPT): State.PREEMPTED,
    (State.WAITING, Event.FINISH): State.FINISHED,
    (State.AWAITING_KV, Event.FINISH): State.FINISHED,
    (State.PREFILLING, Event.FINISH): State.FINISHED,
    (State.DECODING, Event.FINISH): State.FINISHED,
    (State.PREEMPTED, Event.FINISH): State.FINISHED,
}


def after(state: State, event: Event) -> State:
    """The state that follows. Raises EngineInconsistent for an event that cannot be there."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise EngineInconsistent(
            f"{event.name} of a request that is {state.name}", remedy="report this: a defect"
        ) from None
