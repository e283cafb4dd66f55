"""Two caches without pages, as large as the tier: one that evicts by what it has learned, and LRU.

They say which of the two orders is better for these requests (a guard): `LEAD` is the decayed sum
of the blocks that the first hit more than the second, `WEIGHT` that of all blocks asked for. Where
the lead falls below a small share of the weight LRU takes charge of the tier, until it is above 0.

The learned one is sampled: of so many requests drawn at random, and of those that were among the
worst lately, the tail with the lowest index goes, and with it its run. So a block costs O(1).
"""

from __future__ import annotations

from typing import Final

from kvtier.core.jit import compiled
from kvtier.core.policy.gittins.layout import (
    IS_LRU,
    KIDS,
    LEAD,
    LRU_END,
    LRU_HIT,
    LRU_OLDEST,
    LRU_TOTAL,
    NEXT,
    NONE,
    NOW,
    OLDEST,
    OWNER,
    PARENT,
    POOL,
    RUN_END,
    SHADOW_AT,
    SHADOW_END,
    SHADOW_HIT,
    SHADOW_LIVE,
    SHADOW_TAIL,
    SHADOW_TOTAL,
    START,
    SWITCHES,
    WEIGHT,
    State,
)
from kvtier.core.policy.gittins.sampled import (
    SAMPLES,
    SHADOW,
    come_to_list,
    draw,
    leave_list,
    random_below,
)
from kvtier.core.policy.gittins.segments import run_at, slot_of, worth

__all__ = ["compare", "go_on", "leave", "trim", "trim_lru"]

_HALF_LIFE: Final = 2000.0  # requests
_DECAY: Final = 0.5 ** (1 / _HALF_LIFE)
_GIVES_UP_AT: Final = -0.003


@compiled
def _worst(state: State) -> int:
    """The slot whose tail is worth least, of a sample; NONE when there is none.

    The list is looked through whole where it is short.
    """
    pool, listed, count = state.pool[SHADOW], state.shadow_list, state.counts
    slots, blocks, curves, times = state.slot, state.block, state.curve, state.time
    now = state.level[NOW]
    best, best_score = NONE, 1e300
    second, second_score = NONE, 1e300
    tried = -POOL
    while tried < min(SAMPLES, count[SHADOW_LIVE]):
        n = count[SHADOW_LIVE]
        slot = draw(count, pool, listed, n, tried)
        tried += 1
        if slot == NONE or slots[slot, SHADOW_AT] == NONE:
            continue
        if blocks[slots[slot, SHADOW_TAIL], KIDS]:
            leave_list(state, SHADOW, slot)  # until the last block after it has gone
            if tried > 0 and n <= SAMPLES:
                tried -= 1  # another has come to its place
            continue
        score = worth(slots, curves, now - times[slot], slot, slots[slot, SHADOW_END] - 1)
        if score < best_score:
            second, second_score = best, best_score
            best, best_score = slot, score
        elif slot != best and score < second_score:
            second, second_score = slot, score
    if second != NONE:
        pool[random_below(count, POOL)] = second
    return best


@compiled
def leave(state: State, slot: int, most: int) -> None:
    """The last blocks of a request leave the learned shadow: `most` of them, or as many as no block
    there needs."""
    slots, blocks = state.slot, state.block
    tail, gone = slots[slot, SHADOW_TAIL], 0
    before = tail
    while gone < most and blocks[tail, KIDS] == 0:
        gone += 1
        before = blocks[tail, PARENT]
        if before == NONE:
            break
        tail = before
        blocks[tail, KIDS] -= 1
    slots[slot, SHADOW_TAIL] = before
    slots[slot, SHADOW_END] -= gone
    state.counts[SHADOW_TOTAL] -= gone
    if slots[slot, SHADOW_END] <= slots[slot, START]:
        leave_list(state, SHADOW, slot)
    if before != NONE and blocks[before, KIDS] == 0:
        owner = blocks[before, OWNER]
        other = slots[owner]
        if owner != slot and other[SHADOW_TAIL] == before and other[SHADOW_END] > other[START]:
            come_to_list(state, SHADOW, owner)


@compiled
def trim(state: State, blocks_max: int) -> None:
    """Evicts from the learned shadow until so many blocks are left."""
    while state.counts[SHADOW_TOTAL] > blocks_max:
        slot = _worst(state)
        if slot == NONE:
            return
        row = state.slot[slot]
        run = run_at(state, slot, row[SHADOW_END] - 1)
        begin = row[START] if run == 0 else max(row[START], row[RUN_END + run - 1])
        leave(state, slot, min(row[SHADOW_END] - begin, state.counts[SHADOW_TOTAL] - blocks_max))


@compiled
def trim_lru(state: State, blocks_max: int) -> None:
    """Evicts from the LRU shadow: the tail of the oldest request that has any block there."""
    number = max(state.counts[LRU_OLDEST], state.counts[OLDEST])
    while state.counts[LRU_TOTAL] > blocks_max and number < state.counts[NEXT]:
        row = state.slot[slot_of(state, number)]
        has = row[LRU_END] - row[START]
        if has > 0:
            cut = min(has, state.counts[LRU_TOTAL] - blocks_max)
            row[LRU_END] -= cut
            state.counts[LRU_TOTAL] -= cut
        else:
            number += 1
    state.counts[LRU_OLDEST] = number


@compiled
def compare(state: State, blocks: int) -> None:
    """After a request of so many blocks: who is in charge of the tier from now on."""
    lead = state.level[2] * _DECAY + state.counts[SHADOW_HIT] - state.counts[LRU_HIT]
    weight = state.level[3] * _DECAY + blocks
    state.level[LEAD], state.level[WEIGHT] = lead, weight
    is_lru = state.counts[IS_LRU]
    if (not is_lru and lead < _GIVES_UP_AT * weight) or (is_lru and lead > 0.0):
        state.counts[IS_LRU] = 1 - is_lru
        state.counts[SWITCHES] += 1


@compiled
def go_on(state: State, blocks: int) -> None:
    """As `compare`, after so many blocks more of a request that has been compared."""
    state.level[LEAD] += state.counts[SHADOW_HIT] - state.counts[LRU_HIT]
    state.level[WEIGHT] += blocks
