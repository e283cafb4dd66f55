"""Requests: the runs that their blocks fall into, what they are worth, and what they teach.

A request's segment is that part of its path which no later request has used; all of it has one age.
A segment falls into runs, which differ in what is known of their blocks: those that several
conversations share, by how long ago they were used; those of the conversation's earlier requests;
new ones; the last one that is not whole; and what a later request of the conversation has left.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.core.jit import compiled
from kvtier.core.policy.gittins.buckets import (
    EDGES,
    age_place,
    gap_class,
    half_octave,
    octave,
)
from kvtier.core.policy.gittins.hazard import chances, learn
from kvtier.core.policy.gittins.index import fill_curve, read_curve
from kvtier.core.policy.gittins.layout import (
    BINS,
    CLASSES,
    CURVE_FREE,
    CURVES_USED,
    ENDED,
    FEATURE_FIRST,
    GAP,
    HINT,
    LENGTH,
    NEXT,
    NONE,
    NOW,
    OLDEST,
    PATH_MEAN,
    ROW_COUNT,
    RUN_CURVE,
    RUN_END,
    RUN_KIND,
    RUNS,
    RUNS_MAX,
    SHADOW_END,
    START,
    TURN,
    UNSAID,
    State,
)

__all__ = [
    "PARTIAL", "SESSION_NEW", "SESSION_OLD", "SHARED", "SUPERSEDED", "add_run", "classify",
    "classify_longer", "clear_curves", "heed", "learn_use", "pass_bins", "price", "run_at",
    "slot_of", "supersede", "sweep_curves", "worth",
]  # fmt: skip

# Kinds of runs; of shared ones the gap classes 1 .. 12 follow. The first requests of conversations
# have the same kinds again from 16 on.
PARTIAL: Final = 0
SESSION_OLD: Final = 1
SESSION_NEW: Final = 2
SUPERSEDED: Final = 3
SHARED: Final = 3
_FIRST_TURN: Final = 16
_GAP_TOP: Final = 12

_NEVER: Final = 1e-6  # chance of reuse in a bin where none was announced
_KEEPS_WORD: Final = 0.9  # chance of reuse in the bin that was announced

_TURNS: Final = np.array([1, 2, 3, 4, 5, 7, 10, 15, 23, 41], np.int64)


@compiled
def slot_of(state: State, number: int) -> int:
    """The place of a request that is remembered."""
    return 1 + number % (len(state.time) - 1)


@compiled
def classify(state: State, slot: int, output: int, new: int, before: int) -> None:
    """Writes the classes of a request whose TURN, GAP and LENGTH are written.

    `output` tokens (NONE: not known), `new` blocks, `before`: GAP of the request that it continues.
    """
    row = state.slot[slot]
    is_first = row[TURN] == 1
    turn = 0
    while turn + 1 < len(_TURNS) and row[TURN] >= _TURNS[turn + 1]:
        turn += 1
    half = 16 if is_first else 0
    row[CLASSES] = FEATURE_FIRST[1] + turn
    row[CLASSES + 1] = FEATURE_FIRST[2] + row[GAP]
    row[CLASSES + 2] = FEATURE_FIRST[3] + half + (0 if output < 0 else 1 + octave(output, 14))
    row[CLASSES + 3] = FEATURE_FIRST[4] + half + octave(new, 15)
    row[CLASSES + 4] = FEATURE_FIRST[5] + (24 if is_first else 0) + half_octave(row[LENGTH], 23)
    row[CLASSES + 5] = FEATURE_FIRST[6] + before


@compiled
def classify_longer(state: State, slot: int, new: int) -> None:
    """As `classify`, of a request whose path has grown by so many new blocks."""
    row = state.slot[slot]
    is_first = row[TURN] == 1
    run, begin = 0, 0
    while run < row[RUNS]:
        if row[RUN_KIND + run] & (_FIRST_TURN - 1) == SESSION_NEW:
            new = max(new, row[RUN_END + run] - begin)
        begin = row[RUN_END + run]
        run += 1
    row[CLASSES + 3] = FEATURE_FIRST[4] + (16 if is_first else 0) + octave(new, 15)
    row[CLASSES + 4] = FEATURE_FIRST[5] + (24 if is_first else 0) + half_octave(row[LENGTH], 23)


@compiled
def add_run(state: State, slot: int, end: int, kind: int, gap: int) -> None:
    """The blocks up to `end`, after those of the run before; joined to it where it is the same.

    `gap`: the class of a shared run. Beyond RUNS_MAX the last run grows.
    """
    row = state.slot[slot]
    if kind == SHARED:
        kind = SHARED + min(gap, _GAP_TOP)
    kind += _FIRST_TURN if row[TURN] == 1 else 0
    runs = row[RUNS]
    if runs and (runs == RUNS_MAX or row[RUN_KIND + runs - 1] == kind):
        row[RUN_END + runs - 1] = end
        row[RUN_KIND + runs - 1] = kind
        return
    row[RUN_END + runs] = end
    row[RUN_KIND + runs] = kind
    row[RUN_CURVE + runs] = NONE
    row[RUNS] = runs + 1


@compiled
def run_at(state: State, slot: int, position: int) -> int:
    """The run of a position of the path; the last one for what is beyond."""
    row = state.slot[slot]
    run = 0
    while run + 1 < row[RUNS] and row[RUN_END + run] <= position:
        run += 1
    return run


@compiled
def _heed(hint: int, kind: int, chance: npt.NDArray[np.float64]) -> None:
    """What was said of the conversation's return, in place of what was learned. What others use
    too is worth what it was, unless the conversation comes back before them."""
    is_shared = kind > SHARED
    if hint == ENDED:
        if not is_shared:
            chance[:] = _NEVER
        return
    for at in range(BINS):
        if at == hint:
            chance[at] = max(chance[at], _KEEPS_WORD)
        elif at < hint and not is_shared:
            chance[at] = _NEVER


@compiled
def price(state: State, slot: int) -> None:
    """Computes the index over age of each run, from what is known now. There must be room."""
    chance = np.empty(BINS, np.float64)
    row = state.slot[slot]
    for run in range(row[RUNS]):
        if row[RUN_END + run] <= row[START]:
            continue
        curve = row[RUN_CURVE + run]
        if curve == NONE:
            curve = state.counts[CURVE_FREE]
            if curve == NONE:
                continue
            state.counts[CURVE_FREE] = state.curve_next[curve]
            state.counts[CURVES_USED] += 1
            row[RUN_CURVE + run] = curve
        chances(state.slot, state.fine, state.coarse, slot, run, chance)
        if row[HINT] != UNSAID:
            _heed(row[HINT], row[RUN_KIND + run] & (_FIRST_TURN - 1), chance)
        fill_curve(chance, state.curve[curve])


@compiled
def heed(state: State, slot: int, returns_after: float) -> None:
    """Somebody says when the conversation of a request comes back, in seconds from NOW; a negative
    number: never. There must be room for RUNS_MAX curves."""
    age = state.level[NOW] - state.time[slot]
    state.slot[slot, HINT] = ENDED if returns_after < 0 else int(age_place(age + returns_after))
    price(state, slot)


@compiled
def clear_curves(state: State, slot: int) -> None:
    row = state.slot[slot]
    for run in range(RUNS_MAX):
        curve = row[RUN_CURVE + run]
        if curve != NONE:
            state.curve_next[curve] = state.counts[CURVE_FREE]
            state.counts[CURVE_FREE] = curve
            state.counts[CURVES_USED] -= 1
            row[RUN_CURVE + run] = NONE


@compiled
def sweep_curves(state: State) -> None:
    """Takes the curves of requests of which nothing is cached, in the tier or in the shadow."""
    for number in range(state.counts[OLDEST], state.counts[NEXT]):
        slot = slot_of(state, number)
        row = state.slot[slot]
        if row[ROW_COUNT] == 0 and row[SHADOW_END] <= row[START]:
            clear_curves(state, slot)


@compiled
def worth(
    slots: npt.NDArray[np.int32],
    curves: npt.NDArray[np.uint16],
    age: float,
    slot: int,
    position: int,
) -> float:
    """What the block at a position of the path is worth at an age: the logarithm of its index.

    `slots`, `curves`: of a State."""
    run, last = 0, slots[slot, RUNS] - 1
    while run < last and slots[slot, RUN_END + run] <= position:
        run += 1
    curve: int = slots[slot, RUN_CURVE + run]
    if curve == NONE:
        return 0.0
    return read_curve(curves[curve], age_place(age))


@compiled
def _weight(blocks: int, path_mean: float) -> float:
    weight: float = (blocks / max(1.0, path_mean)) ** 0.25
    return weight


@compiled
def learn_use(state: State, slot: int, begin: int, end: int) -> None:
    """A request now uses the blocks begin .. end of this path, begin being its START."""
    place = int(age_place(state.level[NOW] - state.time[slot]))
    slots, fine, coarse, mean = state.slot, state.fine, state.coarse, state.level[PATH_MEAN]
    at = begin
    for run in range(slots[slot, RUNS]):
        upto = min(end, slots[slot, RUN_END + run])
        if upto > at:
            learn(slots, fine, coarse, slot, run, place, 1.0, _weight(upto - at, mean))
            at = upto


@compiled
def pass_bins(state: State) -> None:
    """What has outlived a bin of age since the last request teaches that. NOW must be written."""
    now, following, oldest = state.level[NOW], state.counts[NEXT], state.counts[OLDEST]
    slots, fine, coarse, mean = state.slot, state.fine, state.coarse, state.level[PATH_MEAN]
    times, passed = state.time, state.passed
    for at in range(BINS):
        number = max(passed[at], oldest)
        while number < following:
            slot = 1 + number % (len(times) - 1)
            if times[slot] + EDGES[at + 1] > now:
                break
            begin = slots[slot, START]
            for run in range(slots[slot, RUNS]):
                end = slots[slot, RUN_END + run]
                if end > begin:
                    learn(slots, fine, coarse, slot, run, at, 0.0, _weight(end - begin, mean))
                    begin = end
            number += 1
        passed[at] = number


@compiled
def supersede(state: State, slot: int) -> None:
    """A later request of the conversation has left what is after START behind."""
    row = state.slot[slot]
    kind = SUPERSEDED + (_FIRST_TURN if row[TURN] == 1 else 0)
    row[HINT] = UNSAID
    is_left = False
    for run in range(row[RUNS]):
        if row[RUN_END + run] > row[START]:
            row[RUN_KIND + run] = kind
            is_left = True
    if is_left:
        price(state, slot)


@compiled
def gap_of(state: State, slot: int) -> int:
    """The class of the time since a request."""
    return gap_class(state.level[NOW] - state.time[slot])
