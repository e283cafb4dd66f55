"""The chance that a block is used within an age, given that it was not before: learned online.

A logistic model for each bin of age: the sum of one weight for each class that a run is in
(features are one-hot), each in a fine part of its own for the bin and a coarse part that six bins
share, so that rare classes learn from their neighbours. Steps are scaled by the root of the mean
square of past gradients (T. Tieleman and G. Hinton, RMSProp, 2012). Reuse is a label 1 for the bin
in which it comes; a run that outlives a bin is a label 0 for that bin, cached or not.
"""

from __future__ import annotations

from math import exp, sqrt
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtier.core.jit import compiled
from kvtier.core.policy.gittins.layout import (
    BINS,
    CLASSES,
    FEATURES,
    RUN_KIND,
)

__all__ = ["chances", "learn"]

_PRIOR: Final = -1.65  # log odds before anything is learned
_DECAY: Final = 0.998
_RATE_FINE: Final = 0.003
_RATE_COARSE: Final = 0.01
_PER_COARSE: Final = 6
_SMALL: Final = 1e-6


@compiled
def chances(
    slots: npt.NDArray[np.int32],
    fine: npt.NDArray[np.float32],
    coarse: npt.NDArray[np.float32],
    slot: int,
    run: int,
    out: npt.NDArray[np.float64],
) -> None:
    """Fills `out` (BINS,) with the chance of reuse in each bin of those that reach it.

    `slots`, `fine`, `coarse`: of a State. (Kernels take the arrays that they need where they run
    often: to hand over all costs more than what is done with them.)
    """
    out[:] = _PRIOR
    for feature in range(FEATURES):
        row = slots[slot, RUN_KIND + run if feature == 0 else CLASSES + feature - 1]
        for at in range(BINS):
            out[at] += fine[0, row, at] + coarse[0, row, at // _PER_COARSE]
    for at in range(BINS):
        out[at] = 1.0 / (1.0 + exp(-out[at]))


@compiled
def learn(
    slots: npt.NDArray[np.int32],
    fine: npt.NDArray[np.float32],
    coarse: npt.NDArray[np.float32],
    slot: int,
    run: int,
    at: int,
    label: float,
    weight: float,
) -> None:
    """One run was used (label 1.0) in bin `at`, or outlived it (0.0)."""
    group = at // _PER_COARSE
    odds = _PRIOR
    for feature in range(FEATURES):
        row = slots[slot, RUN_KIND + run if feature == 0 else CLASSES + feature - 1]
        odds += fine[0, row, at] + coarse[0, row, group]
    gradient = (1.0 / (1.0 + exp(-odds)) - label) * weight
    part = (1.0 - _DECAY) * gradient * gradient
    for feature in range(FEATURES):
        row = slots[slot, RUN_KIND + run if feature == 0 else CLASSES + feature - 1]
        square = _DECAY * fine[1, row, at] + part
        fine[1, row, at] = square
        fine[0, row, at] -= _RATE_FINE * gradient / (sqrt(square) + _SMALL)
        square = _DECAY * coarse[1, row, group] + part
        coarse[1, row, group] = square
        coarse[0, row, group] -= _RATE_COARSE * gradient / (sqrt(square) + _SMALL)
