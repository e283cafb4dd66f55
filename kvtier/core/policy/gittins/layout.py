"""The arrays in which a forecast keeps everything, and how they grow.

All of it is numbers in arrays: kernels run on them, a copy of them is the whole state, and their
size is what bounds memory. A slot is a place for one request; slot 0 is for pages whose request was
forgotten (ORPHANS), and request number `s` is in slot 1 + s mod (slots - 1) as long as it is
remembered. A block is a place for one remembered block, free ones chained by BLOCK_NEXT.

The caller has the only reference while a kernel runs.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["State", "make_state"]

BINS: Final = 44
COARSE: Final = 8  # groups of bins
RUNS_MAX: Final = 6
FEATURES: Final = 7  # of a run, the first of them its kind
NONE: Final = -1
ORPHANS: Final = 0

# Columns of `slot`, int32.
START: Final = 0  # blocks of its path before this one were used by a later request
LENGTH: Final = 1  # of its path
LEAF: Final = 2  # the block at the end of its path
RUNS: Final = 3  # how many runs
TURN: Final = 4
GAP: Final = 5  # class of the time since the request that it continues
CLASSES: Final = 6  # FEATURES - 1 places: rows of the model, but for the kind of the run
RUN_END: Final = 12  # RUNS_MAX places: the position after the run
RUN_KIND: Final = 18  # RUNS_MAX places: rows of the model
RUN_CURVE: Final = 24  # RUNS_MAX places: its index over age, or NONE
SHADOW_END: Final = 30  # its blocks from START to before this are in the learned shadow
SHADOW_AT: Final = 31  # place in the list to sample from, or NONE
LRU_END: Final = 32  # as SHADOW_END, of the shadow that is LRU
ROW_TAIL: Final = 33  # last row of its pages in the tier, or NONE
ROW_COUNT: Final = 34
ROW_AT: Final = 35
SHADOW_TAIL: Final = 36  # block at SHADOW_END - 1
HINT: Final = 37  # what was said of its return: UNSAID, ENDED, or the bin of age that it comes in
SLOT_COLUMNS: Final = 38
UNSAID: Final = -1
ENDED: Final = -2

# Columns of `block`, int32.
OWNER: Final = 0  # slot of the request that used it last
PARENT: Final = 1  # block before it, or NONE
KIDS: Final = 2  # blocks after it in the learned shadow
BLOCK_NEXT: Final = 3
DEPTH: Final = 4  # blocks before it: its position in every path that it is in
BLOCK_COLUMNS: Final = 5

# Places of `counts`, int64.
OLDEST: Final = 0  # number of the oldest request that is remembered
NEXT: Final = 1  # number of the request to come
KNOWN: Final = 2  # blocks remembered
BLOCK_FREE: Final = 3
CURVE_FREE: Final = 4
CURVES_USED: Final = 5
SHADOW_LIVE: Final = 6  # length of the list to sample from
SHADOW_TOTAL: Final = 7
LRU_TOTAL: Final = 8
LRU_OLDEST: Final = 9
ROW_LIVE: Final = 10
ROW_OLDEST: Final = 11
IS_LRU: Final = 12  # 1: the guard has put LRU in charge
RANDOM: Final = 13
MATCHED: Final = 14  # of the last request: known blocks
SHADOW_HIT: Final = 15
LRU_HIT: Final = 16
SWITCHES: Final = 17  # times the guard has changed its mind
COUNTS: Final = 18

# Places of `level`, float64.
NOW: Final = 0
PATH_MEAN: Final = 1
LEAD: Final = 2  # decayed blocks that the learned shadow hit more than LRU's
WEIGHT: Final = 3  # decayed blocks asked for
LEVELS: Final = 4

#: Rows of the model: kind, turn, gap, output, new length, total length, gap before.
KIND_ROWS: Final = 32
FEATURE_FIRST: Final = (0, 32, 44, 64, 96, 128, 176)
MODEL_ROWS: Final = 196
POOL: Final = 8

_SLOTS_MIN: Final = 1 << 9
_BLOCKS_MIN: Final = 1 << 10


class State(NamedTuple):
    """Shapes by the constants above."""

    slot: npt.NDArray[np.int32]  # (slots, SLOT_COLUMNS)
    time: npt.NDArray[np.float64]  # (slots,): when the request came
    block: npt.NDArray[np.int32]  # (blocks, BLOCK_COLUMNS)
    word: npt.NDArray[np.uint64]  # (blocks,): what it is known by
    table: npt.NDArray[np.int32]  # (2 ** k,): block + 1 by hash of its word, 0: none
    curve: npt.NDArray[np.uint16]  # (curves, BINS + 1): logarithm of the index at each edge of age
    curve_next: npt.NDArray[np.int32]  # (curves,): next free
    fine: npt.NDArray[np.float32]  # (2, MODEL_ROWS, BINS): weights, and means of squared gradients
    coarse: npt.NDArray[np.float32]  # (2, MODEL_ROWS, COARSE): the same
    passed: npt.NDArray[np.int64]  # (BINS,): number of the first request that is not past this bin
    shadow_list: npt.NDArray[np.int32]  # (slots,): slots to sample from
    row_list: npt.NDArray[np.int32]  # (slots,): the same of the tier
    pool: npt.NDArray[np.int32]  # (2, POOL): slots that were among the worst lately
    counts: npt.NDArray[np.int64]  # (COUNTS,)
    level: npt.NDArray[np.float64]  # (LEVELS,)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self)


def make_state(seed: int) -> State:
    count = np.zeros(COUNTS, np.int64)
    count[RANDOM] = (seed * 0x9E3779B97F4A7C15 + 0x1234567) % (1 << 63) | 1
    count[CURVE_FREE] = count[BLOCK_FREE] = 0
    second_moment = 0.1
    fine = np.zeros((2, MODEL_ROWS, BINS), np.float32)
    coarse = np.zeros((2, MODEL_ROWS, COARSE), np.float32)
    fine[1] = coarse[1] = second_moment
    blocks, slots = _BLOCKS_MIN, _SLOTS_MIN + 1
    return State(
        slot=_blank_slots(slots),
        time=np.zeros(slots, np.float64),
        block=_chained(blocks, 0),
        word=np.zeros(blocks, np.uint64),
        table=np.zeros(2 * blocks, np.int32),
        curve=np.zeros((_SLOTS_MIN, BINS + 1), np.uint16),
        curve_next=_chain(_SLOTS_MIN, 0),
        fine=fine,
        coarse=coarse,
        passed=np.zeros(BINS, np.int64),
        shadow_list=np.zeros(slots, np.int32),
        row_list=np.zeros(slots, np.int32),
        pool=np.full((2, POOL), NONE, np.int32),
        counts=count,
        level=np.array([0.0, 0.0, 0.0, 0.0]),
    )


def _blank_slots(slots: int) -> npt.NDArray[np.int32]:
    blank = np.zeros((slots, SLOT_COLUMNS), np.int32)
    blank[:, [SHADOW_AT, ROW_AT, ROW_TAIL, LEAF, SHADOW_TAIL, HINT]] = NONE
    blank[:, RUN_CURVE : RUN_CURVE + RUNS_MAX] = NONE
    return blank


def _chain(size: int, first: int) -> npt.NDArray[np.int32]:
    links = np.arange(first + 1, first + size + 1, dtype=np.int32)
    links[-1] = NONE
    return links


def _chained(size: int, first: int) -> npt.NDArray[np.int32]:
    block = np.zeros((size, BLOCK_COLUMNS), np.int32)
    block[:, BLOCK_NEXT] = _chain(size, first)
    block[:, OWNER] = NONE
    return block


def more_blocks(state: State) -> State:
    """Room for twice as many blocks; `rehash` has to fill the table."""
    had = len(state.word)
    block = np.concatenate([state.block, _chained(had, had)])
    block[-1, BLOCK_NEXT] = state.counts[BLOCK_FREE]
    state.counts[BLOCK_FREE] = had
    return state._replace(
        block=block,
        word=np.concatenate([state.word, np.zeros(had, np.uint64)]),
        table=np.zeros(2 * len(state.table), np.int32),
    )


def more_curves(state: State) -> State:
    had = len(state.curve)
    links = _chain(had, had)
    links[-1] = state.counts[CURVE_FREE]
    state.counts[CURVE_FREE] = had
    return state._replace(
        curve=np.concatenate([state.curve, np.zeros_like(state.curve)]),
        curve_next=np.concatenate([state.curve_next, links]),
    )


def more_slots(state: State, owners: npt.NDArray[np.int32]) -> State:
    """Twice as many requests. `owners`, of the pages of the tier, is changed in place."""
    had = len(state.time) - 1
    numbers = np.arange(state.counts[OLDEST], state.counts[NEXT])
    old, new = 1 + numbers % had, 1 + numbers % (2 * had)
    moved = np.zeros(had + 1, np.int32)
    moved[old] = new
    slot, time = _blank_slots(2 * had + 1), np.zeros(2 * had + 1, np.float64)
    slot[ORPHANS], time[ORPHANS] = state.slot[ORPHANS], state.time[ORPHANS]
    slot[new], time[new] = state.slot[old], state.time[old]
    held = state.block[:, OWNER]
    state.block[:, OWNER] = np.where(held > 0, moved[held], held)
    owners[:] = np.where(owners > 0, moved[owners], owners)
    lists: list[npt.NDArray[Any]] = []
    for array in (state.shadow_list, state.row_list):
        longer = np.zeros(2 * had + 1, np.int32)
        longer[: had + 1] = moved[array]
        lists.append(longer)
    pool = np.where(state.pool > 0, moved[state.pool], state.pool)
    return state._replace(
        slot=slot, time=time, shadow_list=lists[0], row_list=lists[1], pool=pool.astype(np.int32)
    )
