"""The pages of a tier, listed by the request that used each last, and which of them goes next.

The pages of a request are a list in the order of its path; only its tail may go, and only while no
lease and no page after it keeps it. A tail that is kept is taken off the list to sample from until
`ready`, so that it is met once. The kernels write `queued`: 0 for a page that waits for that.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.core.jit import compiled
from kvtier.core.policy.gittins.layout import (
    IS_LRU,
    NEXT,
    NONE,
    NOW,
    OLDEST,
    ORPHANS,
    POOL,
    ROW_AT,
    ROW_COUNT,
    ROW_LIVE,
    ROW_OLDEST,
    ROW_TAIL,
    START,
    State,
)
from kvtier.core.policy.gittins.sampled import (
    SAMPLES,
    TIER,
    come_to_list,
    draw,
    leave_list,
    random_below,
)
from kvtier.core.policy.gittins.segments import slot_of, worth

__all__ = [
    "BEFORE", "LINKS", "PLACE", "SLOT", "Pages", "chains", "join", "locate",
    "oldest_row", "orphan", "pick", "relist", "unlink",
]  # fmt: skip

# Columns of `link`.
BEFORE: Final = 0  # row before it in the list of its request + 1, 0: none
AFTER: Final = 1
SLOT: Final = 2  # slot of its request; _ORPHAN for ORPHANS, 0: not here
PLACE: Final = 3  # its position in the path
LINKS: Final = 4
_ORPHAN: Final = -1
_MARKED: Final = -(1 << 31)


class Pages(NamedTuple):
    """Arrays of one entry a row of core/table.py; all but the first are columns of that."""

    link: npt.NDArray[np.int32]  # (rows, LINKS)
    children: npt.NDArray[np.int32]
    leases: npt.NDArray[np.int32]
    queued: npt.NDArray[np.uint64]


@compiled
def relist(state: State, pages: Pages, row: int) -> None:
    """What kept the page has gone: it is sampled again if it is a tail."""
    pages.queued[row] = 1
    slot = max(ORPHANS, pages.link[row, SLOT])
    if state.slot[slot, ROW_TAIL] == row:
        come_to_list(state, TIER, slot)


@compiled
def unlink(state: State, pages: Pages, row: int) -> None:
    """The page leaves the list of its request."""
    link = pages.link
    slot = max(ORPHANS, link[row, SLOT])
    before, after = link[row, BEFORE], link[row, AFTER]
    if before:
        link[before - 1, AFTER] = after
    if after:
        link[after - 1, BEFORE] = before
    else:
        state.slot[slot, ROW_TAIL] = before - 1
    link[row, SLOT] = link[row, BEFORE] = link[row, AFTER] = 0
    left = state.slot[slot, ROW_COUNT] - 1
    state.slot[slot, ROW_COUNT] = left
    if left == 0:
        leave_list(state, TIER, slot)
    elif not after:
        come_to_list(state, TIER, slot)


@compiled
def _link(state: State, pages: Pages, row: int, slot: int, place: int) -> None:
    link = pages.link
    after, before = 0, state.slot[slot, ROW_TAIL] + 1
    while before and link[before - 1, PLACE] > place:
        after, before = before, link[before - 1, BEFORE]
    link[row, BEFORE], link[row, AFTER], link[row, PLACE] = before, after, place
    link[row, SLOT] = _ORPHAN if slot == ORPHANS else slot
    if before:
        link[before - 1, AFTER] = row + 1
    if after:
        link[after - 1, BEFORE] = row + 1
    else:
        state.slot[slot, ROW_TAIL] = row
    state.slot[slot, ROW_COUNT] += 1
    come_to_list(state, TIER, slot)


@compiled
def join(
    state: State,
    pages: Pages,
    rows: npt.NDArray[np.int64],
    places: npt.NDArray[np.int32],
    slot: int,
) -> None:
    """The pages, at these positions of its path, are a request's from now on."""
    for i in range(len(rows)):
        row = rows[i]
        if pages.link[row, SLOT]:
            unlink(state, pages, row)
        _link(state, pages, row, slot, places[i])
        pages.queued[row] = 1


@compiled
def locate(
    path: npt.NDArray[np.uint64], words: npt.NDArray[np.uint64], places: npt.NDArray[np.int32]
) -> int:
    """Fills `places` with the position of each word in the path; both go from head to tail.

    Returns how many were found; the rest of `places` is not written.
    """
    at = 0
    for i in range(len(words)):
        while at < len(path) and path[at] != words[i]:
            at += 1
        if at == len(path):
            return i
        places[i] = at
        at += 1
    return len(words)


@compiled
def chains(
    link: npt.NDArray[np.int32],
    parent: npt.NDArray[np.int32],
    rows: npt.NDArray[np.int64],
    ordered: npt.NDArray[np.int64],
    begins: npt.NDArray[np.int64],
) -> int:
    """Rows that are in no list as pieces of chains: fills `ordered` with all of them, each piece
    from its head to its tail and after the page before it, and `begins` with where each begins; how
    many pieces. `parent`: the column of that name."""
    for row in rows:
        link[row, BEFORE], link[row, PLACE] = 0, _MARKED
    for row in rows:
        before = parent[row] - 1
        if before >= 0 and link[before, PLACE] == _MARKED and link[before, SLOT] == 0:
            link[before, BEFORE] += 1
    pieces, end = 0, 0
    for tail in rows:
        if link[tail, BEFORE]:
            continue
        row, n = tail, 0
        while row >= 0 and link[row, PLACE] == _MARKED and link[row, SLOT] == 0:
            link[row, PLACE] = 0
            ordered[end + n] = row
            n += 1
            row = parent[row] - 1
        ordered[end : end + n] = ordered[end : end + n][::-1].copy()
        begins[pieces] = end
        pieces += 1
        end += n
    for row in rows:
        link[row, BEFORE] = 0
    return pieces


@compiled
def orphan(state: State, pages: Pages) -> None:
    """The pages of the oldest request outlive what is known of it: they go before all others."""
    slot = slot_of(state, state.counts[OLDEST])
    while state.slot[slot, ROW_COUNT]:
        row = state.slot[slot, ROW_TAIL]
        unlink(state, pages, row)
        # Before those that were orphaned earlier, which may come after it in a chain.
        place = min(NONE, state.slot[ORPHANS, START] - 1)
        state.slot[ORPHANS, START] = place if state.slot[ORPHANS, ROW_COUNT] else NONE
        _link(state, pages, row, ORPHANS, state.slot[ORPHANS, START])


@compiled
def _is_kept(state: State, pages: Pages, slot: int) -> bool:
    row = state.slot[slot, ROW_TAIL]
    if pages.children[row] or pages.leases[row]:
        pages.queued[row] = 0
        leave_list(state, TIER, slot)
        return True
    return False


@compiled
def _oldest(state: State, pages: Pages) -> int:
    """The slot of the request longest ago whose tail may go."""
    number, is_first = max(state.counts[ROW_OLDEST], state.counts[OLDEST]), True
    while number < state.counts[NEXT]:
        slot = slot_of(state, number)
        row = state.slot[slot]
        if row[ROW_COUNT] == 0:
            if is_first:
                state.counts[ROW_OLDEST] = number + 1
        else:
            is_first = False
            if row[ROW_AT] != NONE and not _is_kept(state, pages, slot):
                return slot
        number += 1
    return NONE


@compiled
def oldest_row(state: State, pages: Pages) -> int:
    """The tail of the request longest ago, or NONE."""
    slot = _oldest(state, pages)
    row: int = NONE if slot == NONE else state.slot[slot, ROW_TAIL]
    return row


@compiled
def _any(state: State, pages: Pages) -> int:
    """A slot whose tail may go, or NONE; the newest only if there is no other."""
    newest = slot_of(state, state.counts[NEXT] - 1)
    at = 0
    while at < state.counts[ROW_LIVE]:
        slot: int = state.row_list[at]
        if slot == newest:
            at += 1
        elif not _is_kept(state, pages, slot):
            return slot
    if state.slot[newest, ROW_AT] == NONE or _is_kept(state, pages, newest):
        return NONE
    return newest


@compiled
def pick(state: State, pages: Pages, spared: int) -> int:
    """The slot whose tail goes next, or NONE: the lowest index of a sample, or the oldest.

    The request that came last is not sampled, because more of its pages may be about to come, nor
    is that in slot `spared`.
    """
    if state.slot[ORPHANS, ROW_AT] != NONE and not _is_kept(state, pages, ORPHANS):
        return ORPHANS
    if state.counts[IS_LRU]:
        return _oldest(state, pages)
    pool, listed, count = state.pool[TIER], state.row_list, state.counts
    slots, curves, times = state.slot, state.curve, state.time
    link, children, leases = pages.link, pages.children, pages.leases
    now, newest = state.level[NOW], slot_of(state, count[NEXT] - 1)
    best, best_score = NONE, 1e300
    second, second_score = NONE, 1e300
    tried = -POOL
    while tried < min(SAMPLES, count[ROW_LIVE]):
        n = count[ROW_LIVE]
        slot = draw(count, pool, listed, n, tried)
        tried += 1
        if slot in (NONE, newest, spared) or slots[slot, ROW_AT] == NONE:
            continue
        row = slots[slot, ROW_TAIL]
        if children[row] or leases[row]:
            _is_kept(state, pages, slot)
            if tried > 0 and n <= SAMPLES:
                tried -= 1  # another has come to its place
            continue
        score = worth(slots, curves, now - times[slot], slot, link[row, PLACE])
        if score < best_score:
            second, second_score = best, best_score
            best, best_score = slot, score
        elif slot != best and score < second_score:
            second, second_score = slot, score
    if second != NONE:
        pool[random_below(count, POOL)] = second
    return _any(state, pages) if best == NONE else best
