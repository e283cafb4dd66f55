"""Ages, gaps and lengths as classes. Pure functions, compiled."""

from __future__ import annotations

from math import log2
from typing import Final

import numpy as np

from kvtier.core.jit import compiled
from kvtier.core.policy.gittins.layout import BINS

__all__ = ["EDGES", "age_place", "gap_class", "half_octave", "octave"]

#: Seconds: bin b is from edge b to edge b + 1.
EDGES: Final = np.array([0.0] + [0.5 * 2 ** (b / 2) for b in range(BINS)])


@compiled
def age_place(age: float) -> float:
    """Where an age lies on the scale of bins: its bin, and how far it is in it, logarithmically."""
    if age < 0.5:
        return max(0.0, age * 2.0)
    return min(1.0 + 2.0 * log2(age * 2.0), BINS - 1e-9)


@compiled
def gap_class(gap: float) -> int:
    """1 .. 18: below half a second to over a day, by octaves."""
    if gap < 0.5:
        return 1
    return min(18, 3 + int(log2(gap)) if gap >= 1.0 else 2)


@compiled
def octave(n: int, top: int) -> int:
    """0 for nothing, else 1 + the whole logarithm, up to `top`."""
    return 0 if n <= 0 else min(top, 1 + int(log2(float(n)) + 1e-9))


@compiled
def half_octave(n: int, top: int) -> int:
    return 0 if n <= 0 else min(top, 1 + int(2.0 * log2(float(n)) + 1e-9))
