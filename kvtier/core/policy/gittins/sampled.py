"""The requests whose tails are sampled: a list of the learned shadow's, and one of the tier's.

A list is slots in no order, and each slot on it knows its place there, so that coming and leaving
are a step each. Beside it a pool keeps some that were among the worst lately; they are looked at
first, whether they are on the list or not.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.core.jit import compiled
from kvtier.core.policy.gittins.layout import (
    NONE,
    POOL,
    RANDOM,
    ROW_AT,
    ROW_LIVE,
    SHADOW_AT,
    SHADOW_LIVE,
    State,
)

__all__ = ["SAMPLES", "SHADOW", "TIER", "come_to_list", "draw", "leave_list", "random_below"]

#: Which list, and which row of a State's `pool`.
SHADOW: Final = 0
TIER: Final = 1
SAMPLES: Final = 64

_AT: Final = (SHADOW_AT, ROW_AT)
_LIVE: Final = (SHADOW_LIVE, ROW_LIVE)


@compiled
def random_below(count: npt.NDArray[np.int64], n: int) -> int:
    """A xorshift generator of 63 bits. `count`: the counts of a State."""
    x: int = count[RANDOM]
    x ^= (x << 13) & 0x7FFFFFFFFFFFFFFF
    x ^= x >> 7
    x ^= (x << 17) & 0x7FFFFFFFFFFFFFFF
    count[RANDOM] = x
    return (x >> 16) % n


@compiled
def _listed(state: State, which: int) -> npt.NDArray[np.int32]:
    return state.row_list if which == TIER else state.shadow_list


@compiled
def come_to_list(state: State, which: int, slot: int) -> None:
    """The tail of this request may be sampled."""
    at, live = _AT[which], _LIVE[which]
    if state.slot[slot, at] == NONE:
        n = state.counts[live]
        _listed(state, which)[n] = slot
        state.slot[slot, at] = n
        state.counts[live] = n + 1


@compiled
def leave_list(state: State, which: int, slot: int) -> None:
    """The tail of this request is not sampled any more."""
    at, live = _AT[which], _LIVE[which]
    place = state.slot[slot, at]
    if place != NONE:
        listed, n = _listed(state, which), state.counts[live] - 1
        last = listed[n]
        listed[place] = last
        state.slot[last, at] = place
        state.slot[slot, at] = NONE
        state.counts[live] = n


@compiled
def draw(
    count: npt.NDArray[np.int64],
    pool: npt.NDArray[np.int32],
    listed: npt.NDArray[np.int32],
    n: int,
    tried: int,
) -> int:
    """The slot to look at in a try, -POOL being the first and SAMPLES - 1 the last: the pool, then
    the list of length `n`, whole where it is short: then there are `n` tries and no more.

    `count`: the counts of a State; `pool` and `listed`: one list's.
    """
    if tried < 0:
        slot: int = pool[POOL + tried]
    elif n > SAMPLES:
        slot = listed[random_below(count, n)]
    else:
        slot = listed[tried]
    return slot
