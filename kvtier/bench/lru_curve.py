"""LRU at many sizes in one pass: what the daemon's policy finds, request by request, sooner.

The blocks that LRU keeps in a cache are among those that it keeps in a larger one, so how many
other blocks were used since a block's last use says in which caches it is (R. L. Mattson et al.,
"Evaluation techniques for storage hierarchies", IBM Systems Journal 9(2), 1970). A tree of counts
(P. M. Fenwick, Software: Practice and Experience 24(3), 1994) answers that in O(log blocks).

This does not run the daemon's code: tests hold it to that, for every request. It needs numba. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.bench.caches import NUMBA_REMEDY
from kvtier.bench.errors import BenchInput
from kvtier.bench.replay import Replay, ReplayPlan, Traffic
from kvtier.bench.trace import Trace
from kvtier.errors import MissingExtra
from kvtier.packing.optional_code import load_optional

__all__ = ["lru_curve", "one_pass", "smallest_lru"]

_SIZES_A_PASS: Final = 24

Ints = npt.NDArray[np.int32]


def lru_curve(trace: Trace, slots: Sequence[int]) -> list[Ints]:
    """For each of `slots`, of each request, the leading blocks found. Raises MissingExtra."""
    try:
        kernels = load_optional("kvtier.bench.lru_kernels")
    except ImportError as error:
        raise MissingExtra(
            f"one pass: numba cannot be used: {error}", remedy=NUMBA_REMEDY
        ) from error
    order = np.argsort(np.array(slots, np.int64), kind="stable")
    hits = np.zeros((trace.requests, len(order)), np.int32)
    rising = np.array(slots, np.int64)[order]
    kernels.lru_hits(trace.leaf, trace.blocks, trace.parent, rising, hits)
    found: list[Ints] = [hits[:, 0]] * len(order)
    for column, at in enumerate(order.tolist()):
        found[at] = np.ascontiguousarray(hits[:, column])
    return found


def smallest_lru(trace: Trace, target: float) -> int:
    """Slots of about the smallest LRU (within 3 %) whose cold hit ratio reaches the target; all
    blocks when none does. Raises MissingExtra."""
    total = trace.input_tokens.sum()
    low, high = 1, trace.blocks_seen
    for _ in range(2):
        sizes = sorted({round(size) for size in np.geomspace(low, high, _SIZES_A_PASS).tolist()})
        for at, prefix in enumerate(lru_curve(trace, sizes)):
            if trace.tokens(prefix).sum() >= target * total:
                low, high = sizes[max(0, at - 1)], sizes[at]
                break
        else:
            return trace.blocks_seen
    return high


def one_pass(trace: Trace, plans: Sequence[ReplayPlan]) -> list[Replay]:
    """As `replay` of each plan, all of LRU and of one tier. Raises BenchInput for others."""
    for plan in plans:
        if plan.policy != "lru" or len(plan.slots) != 1:
            raise BenchInput(
                "one pass is for LRU and one tier", remedy="leave out --one-pass, or the rest"
            )
    slots = [next(iter(plan.slots.values())) for plan in plans]
    found = []
    for plan, size, prefix in zip(plans, slots, lru_curve(trace, slots), strict=True):
        written = int(np.maximum(np.minimum(trace.blocks, size) - prefix, 0).sum())
        traffic = Traffic(read=int(prefix.sum()), written=written, evicted=max(0, written - size))
        (tier,) = plan.slots
        found.append(Replay(plan=plan, hits={tier: prefix}, traffic={tier: traffic}))
    return found
