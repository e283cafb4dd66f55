"""One request: what is known of its path, what that teaches, and its own segment."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.core.jit import compiled
from kvtier.core.policy.gittins.known import find, forget_block, insert
from kvtier.core.policy.gittins.layout import (
    GAP,
    HINT,
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
    UNSAID,
    State,
)
from kvtier.core.policy.gittins.sampled import SHADOW, come_to_list, leave_list
from kvtier.core.policy.gittins.segments import (
    PARTIAL,
    SESSION_NEW,
    SESSION_OLD,
    SHARED,
    add_run,
    classify,
    classify_longer,
    clear_curves,
    gap_of,
    learn_use,
    pass_bins,
    price,
    slot_of,
    supersede,
)
from kvtier.core.policy.gittins.shadow import compare, go_on, leave, trim, trim_lru

__all__ = ["forget_oldest", "grow", "serve"]

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
    leave_list(state, SHADOW, slot)
    clear_curves(state, slot)
    block = row[LEAF]
    for _ in range(row[LENGTH] - row[START]):
        before = state.block[block, PARENT]
        forget_block(state, block)
        block = before
    state.counts[OLDEST] += 1


@compiled
def _match(
    state: State, words: npt.NDArray[np.uint64], ids: npt.NDArray[np.int32], before: int
) -> int:
    """How many of the words are known to come one after the other, the first after the block
    `before`; fills `ids` with these."""
    known, table, have = 0, state.table, state.word
    while known < len(words):
        block = find(table, have, words[known])
        if block == NONE or state.block[block, PARENT] != before:
            break
        ids[known] = before = block
        known += 1
    return known


@compiled
def _insert(
    state: State,
    words: npt.NDArray[np.uint64],
    ids: npt.NDArray[np.int32],
    known: int,
    before: int,
    slot: int,
) -> int:
    """Makes the rest of the words known; how many are then. It ends before a block that is known
    to come after another one: that path was told differently."""
    for at in range(known, len(words)):
        if find(state.table, state.word, words[at]) != NONE:
            return at
        ids[at] = insert(state, words[at], before if at == 0 else ids[at - 1], slot)
    return len(words)


@compiled
def _begin(state: State, slot: int, session: int) -> int:
    """Writes the columns of a new request; `session`: the slot of the one that it continues, or
    NONE. Returns GAP of that."""
    row = state.slot[slot]
    clear_curves(state, slot)
    turn, gap, before = 1, 0, 0
    if session != NONE:
        turn = state.slot[session, TURN] + 1
        gap, before = gap_of(state, session), state.slot[session, GAP]
    row[START], row[LENGTH], row[RUNS], row[TURN], row[GAP] = 0, 0, 0, turn, gap
    row[ROW_TAIL], row[ROW_COUNT], row[ROW_AT] = NONE, 0, NONE
    row[SHADOW_END], row[LRU_END], row[SHADOW_TAIL], row[LEAF] = 0, 0, NONE, NONE
    row[HINT] = UNSAID
    state.time[slot] = state.level[NOW]
    return before


@compiled
def _take_over(
    state: State, slot: int, session: int, ids: npt.NDArray[np.int32], known: int
) -> None:
    """The known blocks, which come after the request's path, become its own, piece by piece of
    those who used them."""
    limit = 0.0
    if session != NONE:
        limit = _OWN * (state.level[NOW] - state.time[session])
    first = state.slot[slot, LENGTH]
    in_shadow = state.slot[slot, SHADOW_END] == first
    in_lru = state.slot[slot, LRU_END] == first
    shadow_hit, lru_hit, at = 0, 0, 0
    while at < known:
        owner = state.block[ids[at], OWNER]
        end = at
        while end < known and state.block[ids[end], OWNER] == owner:
            state.block[ids[end], OWNER] = slot
            end += 1
        other = state.slot[owner]
        if in_shadow:
            moved = max(0, min(first + end, other[SHADOW_END]) - first - at)
            shadow_hit += moved
            in_shadow = moved == end - at
        if in_lru:
            moved = max(0, min(first + end, other[LRU_END]) - first - at)
            lru_hit += moved
            in_lru = moved == end - at
        learn_use(state, owner, first + at, first + end)
        other[START] = first + end
        if other[SHADOW_END] <= first + end:
            leave_list(state, SHADOW, owner)
        if session == NONE or state.level[NOW] - state.time[owner] < limit:
            add_run(state, slot, first + end, SHARED, gap_of(state, owner))
        else:
            add_run(state, slot, first + end, SESSION_OLD, 0)
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
    known = _match(state, words, ids, NONE)
    slot = slot_of(state, count[NEXT])
    session = NONE
    if known:
        owner = state.block[ids[known - 1], OWNER]
        if known >= _CONTINUES * state.slot[owner, LENGTH]:
            session = owner
    n = _insert(state, words, ids, known, NONE, slot)
    whole = min(whole, n)
    before = _begin(state, slot, session)
    _take_over(state, slot, session, ids, known)
    if whole > known:
        add_run(state, slot, whole, SESSION_NEW, 0)
    if n > max(whole, known):
        add_run(state, slot, n, PARTIAL, 0)
    state.slot[slot, LENGTH] = n
    classify(state, slot, output, n - known, before)
    if session != NONE:
        supersede(state, session)
    state.slot[slot, LEAF] = NONE if n == 0 else ids[n - 1]
    price(state, slot)
    count[MATCHED] = known
    count[NEXT] += 1
    _admit(state, slot, NONE, ids[:n], pages, has_bypass)
    compare(state, n)
    return slot


@compiled
def grow(
    state: State, slot: int, words: npt.NDArray[np.uint64], pages: int, has_bypass: bool
) -> int:
    """The path of a request goes on with these words: it is told of in parts. How many of them it
    has then. There must be room as for `serve`."""
    row, before = state.slot[slot], state.slot[slot, LEAF]
    first = row[LENGTH]
    ids = np.empty(len(words), np.int32)
    known = _match(state, words, ids, before)
    n = _insert(state, words, ids, known, before, slot)
    if n == 0:
        return 0
    _take_over(state, slot, slot if row[TURN] > 1 else NONE, ids, known)
    if n > known:
        add_run(state, slot, first + n, SESSION_NEW, 0)
    row[LENGTH], row[LEAF] = first + n, ids[n - 1]
    classify_longer(state, slot, n - known)
    price(state, slot)
    _admit(state, slot, before, ids[:n], pages, has_bypass)
    go_on(state, n)
    return n


@compiled
def _admit(
    state: State,
    slot: int,
    before: int,
    ids: npt.NDArray[np.int32],
    pages: int,
    has_bypass: bool,
) -> None:
    """The last blocks of the path, which come after the block `before`, come into both shadows, as
    far as there is room."""
    row, count, n = state.slot[slot], state.counts, state.slot[slot, LENGTH]
    first = n - len(ids)
    if row[LRU_END] == first:
        count[LRU_TOTAL] += n - first - count[LRU_HIT]
        row[LRU_END] = n
        trim_lru(state, pages)
    if row[SHADOW_END] != first:
        return
    hit = first + count[SHADOW_HIT]
    room = n if has_bypass else max(first, min(n, pages))
    if not has_bypass:
        trim(state, pages - max(0, room - hit))
        if row[SHADOW_END] != first:  # it had to give way itself
            return
    for at in range(max(1, hit), room):
        state.block[before if at == first else ids[at - 1 - first], KIDS] += 1
    if max(hit, room) > first:
        row[SHADOW_END], row[SHADOW_TAIL] = max(hit, room), ids[max(hit, room) - 1 - first]
        count[SHADOW_TOTAL] += max(0, room - hit)
        come_to_list(state, SHADOW, slot)
    if has_bypass:
        trim(state, pages)
