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

from kvtier.core.policy.gittins.jit import compiled
from kvtier.core.policy.gittins.layout import (
    BINS,
    CLASSES,
    FEATURES,
    RUN_KIND,
    State,
)

__all__ = ["chances", "learn"]

_PRIOR: Final = -1.65  # log odds before anything is learned
_DECAY: Final = np.float32(0.998)
_RATE_FINE: Final = 0.03
_RATE_COARSE: Final = 0.1
_PER_COARSE: Final = 6
_SMALL: Final = 1e-6


@compiled
def _log_odds(state: State, slot: int, run: int, at: int) -> float:
    group = at // _PER_COARSE
    row = state.slot[slot, RUN_KIND + run]
    total = _PRIOR + state.fine[0, row, at] + state.coarse[0, row, group]
    for feature in range(FEATURES - 1):
        row = state.slot[slot, CLASSES + feature]
        total += state.fine[0, row, at] + state.coarse[0, row, group]
    return total


@compiled
def chances(state: State, slot: int, run: int, out: npt.NDArray[np.float64]) -> None:
    """Fills `out` (BINS,) with the chance of reuse in each bin of those that reach it."""
    for at in range(BINS):
        out[at] = 1.0 / (1.0 + exp(-_log_odds(state, slot, run, at)))


@compiled
def learn(state: State, slot: int, run: int, at: int, label: float, weight: float) -> None:
    """One run was used (label 1.0) in bin `at`, or outlived it (0.0)."""
    chance = 1.0 / (1.0 + exp(-_log_odds(state, slot, run, at)))
    gradient = np.float32((chance - label) * weight)
    group = at // _PER_COARSE
    for feature in range(FEATURES):
        column = RUN_KIND + run if feature == 0 else CLASSES + feature - 1
        row = state.slot[slot, column]
        _step(state.fine, row, at, gradient, _RATE_FINE)
        _step(state.coarse, row, group, gradient, _RATE_COARSE)


@compiled
def _step(
    model: npt.NDArray[np.float32], row: int, at: int, gradient: float, rate: float
) -> None:
    square = _DECAY * model[1, row, at] + (np.float32(1) - _DECAY) * gradient * gradient
    model[1, row, at] = square
    model[0, row, at] -= np.float32(rate * gradient / (sqrt(square) + _SMALL))
