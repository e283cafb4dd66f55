"""From chances of reuse to one number: what a page is worth at an age.

Keeping a page earns one hit if it is used within a horizon and costs the time that its slot is held
until then. The best ratio of the two over all horizons is the Gittins index of the page at its age
(J. C. Gittins, "Bandit Processes and Dynamic Allocation Indices", Journal of the Royal Statistical
Society B 41(2), 1979); the page with the lowest goes first. It is stored as a logarithm in 16 bits.
"""

from __future__ import annotations

from math import log2
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.core.jit import compiled
from kvtier.core.policy.gittins.buckets import EDGES
from kvtier.core.policy.gittins.layout import BINS

__all__ = ["fill_curve", "read_curve"]

#: Logarithms from -40 to 24, in steps of 1 / 1024.
_LOWEST: Final = 40.0
_STEPS: Final = 1024.0
_TOP: Final = 65535.0
_SMALLEST: Final = 1e-12


@compiled
def fill_curve(chance: npt.NDArray[np.float64], curve: npt.NDArray[np.uint16]) -> None:
    """The index at every edge of age, shape (BINS + 1,).

    `chance`: shape (BINS,), of reuse in each bin of those that reach it. Goes from the last bin to
    the first: a bin takes in what follows it as long as that is better than the two together.
    """
    hit = np.empty(BINS)  # of one that begins at the first bin of a group of bins
    held = np.empty(BINS)
    alive = np.empty(BINS)
    last = np.empty(BINS, np.int64)  # of the group that begins here
    for at in range(BINS - 1, -1, -1):
        hits, stays, end = chance[at], 1.0 - chance[at], at
        cost = (EDGES[at + 1] - EDGES[at]) * (1.0 - 0.5 * chance[at])
        while end + 1 < BINS and hit[end + 1] * cost > hits * held[end + 1]:
            after = end + 1
            hits += stays * hit[after]
            cost += stays * held[after]
            stays *= alive[after]
            end = last[after]
        hit[at], held[at], alive[at], last[at] = hits, cost, stays, end
        worth = max(hits / cost, _SMALLEST)
        curve[at] = np.uint16(min(max((log2(worth) + _LOWEST) * _STEPS, 1.0), _TOP))
    curve[BINS] = curve[BINS - 1]


@compiled
def read_curve(curve: npt.NDArray[np.uint16], place: float) -> float:
    """The stored logarithm, between two edges: `place` as by `age_place`."""
    at = int(place)
    part = place - at
    return float(curve[at]) * (1.0 - part) + float(curve[at + 1]) * part
