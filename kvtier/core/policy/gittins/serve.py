"""One request: what is known of its path, what that teaches, and its own segment."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.core.policy.gittins.jit import compiled
from kvtier.core.policy.gittins.known import find, forget_block, insert
from kvtier.core.policy.gittins.layout import (
    GAP,
    KIDS,
    LEAF,
    LENGTH,
    LRU_END,
    LRU_HIT,
    LRU_TOTAL,
    MATCHED,
    NEXT,
    NONE,
    NOW,
    OLDEST,
    OWNER,
    PARENT,
    PATH_MEAN,
    ROW_AT,
    ROW_COUNT,
    ROW_TAIL,
    RUNS,
    SHADOW_END,
    SHADOW_HIT,
    SHADOW_TAIL,
    SHADOW_TOTAL,
    START,
    TURN,
    State,
)
from kvtier.core.policy.gittins.segments import (
    PARTIAL,
    SESSION_NEW,
    SESSION_OLD,
    SHARED,
    add_run,
    classify,
    clear_curves,
    gap_of,
    learn_use,
    pass_bins,
    price,
    slot_of,
    supersede,
)
from kvtier.core.policy.gittins.shadow import compare, leave, list_in, list_out, trim, trim_lru

__all__ = ["forget_oldest", "serve"]

_CONTINUES: Final = 0.5  # of the path of the request that it continues
_OWN: Final = 0.5  # of the gap since that request: what is younger is used by others too
_MEAN_OVER: Final = 1000.0  # requests


@compiled
def forget_oldest(state: State) -> None:
    """Forgets the oldest request and the blocks that it used last. Its pages in the tier, if any,
    must have been moved to ORPHANS."""
    slot = slot_of(state, state.counts[OLDEST])
    row = state.slot[slot]
    in_shadow = row[SHADOW_END] - row[START]
    if in_shadow > 0:
        leave(state, slot, in_shadow)
    if row[LRU_END] > row[START]:
        state.counts[LRU_TOTAL] -= row[LRU_END] - row[START]
    list_out(state, slot)
    clear_curves(state, slot)
    block = row[LEAF]
    for _ in range(row[LENGTH] - row[START]):
        before = state.block[block, PARENT]
        forget_block(state, block)
        block = before
    state.counts[OLDEST] += 1


@compiled
def _match(state: State, words: npt.NDArray[np.uint64], ids: npt.NDArray[np.int32]) -> int:
    known, table, have = 0, state.table, state.word
    while known < len(words):
        block = find(table, have, words[known])
        if block == NONE or state.block[block, PARENT] != (NONE if known == 0 else ids[known - 1]):
            break
        ids[known] = block
        known += 1
    return known


@compiled
def _insert(
    state: State,
    words: npt.NDArray[np.uint64],
    ids: npt.NDArray[np.int32],
    known: int,
    slot: int,
) -> int:
    """Makes the rest of the path known; how long it is then. It ends before a block that is known
    to come after another one: that path was told differently."""
    for at in range(known, len(words)):
        if find(state.table, state.word, words[at]) != NONE:
            return at
        ids[at] = insert(state, words[at], NONE if at == 0 else ids[at - 1], slot)
    return len(words)


@compiled
def _begin(state: State, slot: int, length: int, session: int) -> int:
    """Writes the columns of a new request; `session`: the slot of the one that it continues, or
    NONE. Returns GAP of that."""
    row = state.slot[slot]
    clear_curves(state, slot)
    turn, gap, before = 1, 0, 0
    if session != NONE:
        turn = state.slot[session, TURN] + 1
        gap, before = gap_of(state, session), state.slot[session, GAP]
    row[START], row[LENGTH], row[RUNS], row[TURN], row[GAP] = 0, length, 0, turn, gap
    row[ROW_TAIL], row[ROW_COUNT], row[ROW_AT] = NONE, 0, NONE
    row[SHADOW_END], row[LRU_END], row[SHADOW_TAIL] = 0, 0, NONE
    state.time[slot] = state.level[NOW]
    return before


@compiled
def _take_over(
    state: State, slot: int, session: int, ids: npt.NDArray[np.int32], known: int
) -> None:
    """The known blocks become those of the new request, piece by piece of those who used them."""
    limit = 0.0
    if session != NONE:
        limit = _OWN * (state.level[NOW] - state.time[session])
    at, in_shadow, in_lru = 0, True, True
    shadow_hit, lru_hit = 0, 0
    while at < known:
        owner = state.block[ids[at], OWNER]
        end = at
        while end < known and state.block[ids[end], OWNER] == owner:
            state.block[ids[end], OWNER] = slot
            end += 1
        other = state.slot[owner]
        if in_shadow:
            moved = max(0, min(end, other[SHADOW_END]) - at)
            shadow_hit += moved
            in_shadow = moved == end - at
        if in_lru:
            moved = max(0, min(end, other[LRU_END]) - at)
            lru_hit += moved
            in_lru = moved == end - at
        learn_use(state, owner, at, end)
        other[START] = end
        if other[SHADOW_END] <= end:
            list_out(state, owner)
        if session == NONE or state.level[NOW] - state.time[owner] < limit:
            add_run(state, slot, end, SHARED, gap_of(state, owner))
        else:
            add_run(state, slot, end, SESSION_OLD, 0)
        at = end
    state.counts[SHADOW_HIT], state.counts[LRU_HIT] = shadow_hit, lru_hit


@compiled
def serve(
    state: State,
    now: float,
    words: npt.NDArray[np.uint64],
    whole: int,
    output: int,
    pages: int,
    has_bypass: bool,
) -> int:
    """A request of the blocks known by `words`, of which the first `whole` are whole. Its slot.

    `output`: tokens, NONE where they are not known. `pages`: that the tier has room for. There must
    be room for the request, its blocks and RUNS_MAX curves.
    """
    n = len(words)
    level, count = state.level, state.counts
    level[NOW] = max(level[NOW], now)
    level[PATH_MEAN] += (n - level[PATH_MEAN]) / min(_MEAN_OVER, count[NEXT] + 1.0)
    pass_bins(state)
    ids = np.empty(n, np.int32)
    known = _match(state, words, ids)
    slot = slot_of(state, count[NEXT])
    session = NONE
    if known:
        owner = state.block[ids[known - 1], OWNER]
        if known >= _CONTINUES * state.slot[owner, LENGTH]:
            session = owner
    n = _insert(state, words, ids, known, slot)
    whole = min(whole, n)
    before = _begin(state, slot, n, session)
    _take_over(state, slot, session, ids, known)
    if whole > known:
        add_run(state, slot, whole, SESSION_NEW, 0)
    if n > max(whole, known):
        add_run(state, slot, n, PARTIAL, 0)
    classify(state, slot, output, n - known, before)
    if session != NONE:
        supersede(state, session)
    state.slot[slot, LEAF] = NONE if n == 0 else ids[n - 1]
    price(state, slot)
    count[MATCHED] = known
    count[NEXT] += 1
    _admit(state, slot, ids[:n], pages, has_bypass)
    compare(state, n)
    return slot


@compiled
def _admit(
    state: State, slot: int, ids: npt.NDArray[np.int32], pages: int, has_bypass: bool
) -> None:
    """The whole path comes into both shadows, as far as there is room."""
    row, count, n = state.slot[slot], state.counts, len(ids)
    hit = count[SHADOW_HIT]
    count[LRU_TOTAL] += n - count[LRU_HIT]
    row[LRU_END] = n
    trim_lru(state, pages)
    room = n if has_bypass else min(n, pages)
    if not has_bypass:
        trim(state, pages - max(0, room - hit))
    for at in range(max(1, hit), room):
        state.block[ids[at - 1], KIDS] += 1
    if room > 0:
        row[SHADOW_END], row[SHADOW_TAIL] = max(hit, room), ids[max(hit, room) - 1]
        count[SHADOW_TOTAL] += max(0, room - hit)
        list_in(state, slot)
    if has_bypass:
        trim(state, pages)
