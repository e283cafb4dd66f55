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

from kvtier.core.policy.gittins.buckets import EDGES
from kvtier.core.policy.gittins.jit import compiled
from kvtier.core.policy.gittins.layout import BINS

__all__ = ["fill_curve", "index_at", "read_curve"]

#: Logarithms from -40 to 24, in steps of 1 / 1024.
_LOWEST: Final = 40.0
_STEPS: Final = 1024.0
_TOP: Final = 65535.0


@compiled
def index_at(chance: npt.NDArray[np.float64], begin: int) -> float:
    """Hits a second of a page that has just reached bin `begin`, by the best horizon.

    `chance`: shape (BINS,), of reuse in each bin of those that reach it.
    """
    alive, hit, held, best = 1.0, 0.0, 0.0, 0.0
    for at in range(begin, BINS):
        width = EDGES[at + 1] - EDGES[at]
        hit += alive * chance[at]
        held += alive * width * (1.0 - 0.5 * chance[at])
        alive *= 1.0 - chance[at]
        best = max(best, hit / held)
    return best


@compiled
def fill_curve(chance: npt.NDArray[np.float64], curve: npt.NDArray[np.uint16]) -> None:
    """The index at every edge of age, shape (BINS + 1,)."""
    for begin in range(BINS):
        worth = max(index_at(chance, begin), 1e-12)
        curve[begin] = np.uint16(min(max((log2(worth) + _LOWEST) * _STEPS, 1.0), _TOP))
    curve[BINS] = curve[BINS - 1]


@compiled
def read_curve(curve: npt.NDArray[np.uint16], place: float) -> float:
    """The stored logarithm, between two edges: `place` as by `age_place`."""
    at = int(place)
    part = place - at
    return float(curve[at]) * (1.0 - part) + float(curve[at + 1]) * part
