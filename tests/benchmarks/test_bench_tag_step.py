"""The statistics of steps made in pairs, and the step that they are of."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from benchmarks import tag_step
from benchmarks.rows import Reached


def pairs(count: int, longer_by: float, spread: float, seed: int) -> list[tuple[float, float]]:
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        step = 0.1 * (1 + spread * draw.random())
        made.append((step * (1 + longer_by + spread * draw.gauss(0, 1) / 10), step))
    return made


def test_a_difference_larger_than_the_noise_is_found() -> None:
    found, low, high = tag_step.longer(pairs(60, 0.05, 0.1, seed=2))
    assert 3.0 < low < found < high
    assert low < 5.0 < high


def test_noise_alone_makes_nothing_longer() -> None:
    """The mean of such quotients is above one."""
    draw = random.Random(4)
    noisy = [(math.exp(draw.gauss(0, 0.3)), math.exp(draw.gauss(0, 0.3))) for _ in range(4000)]
    assert statistics.fmean(ours / theirs - 1 for ours, theirs in noisy) > 0.05
    _, low, high = tag_step.longer(noisy)
    assert low < 0 < high < 5.0


def test_no_difference_is_within_the_bound() -> None:
    inside = sum(
        low < 0 < high
        for low, high in (tag_step.longer(pairs(60, 0.0, 0.1, seed=n))[1:] for n in range(100))
    )
    assert 88 <= inside <= 100


def test_the_bound_of_a_percentile_holds_what_was_seen() -> None:
    found, low, high = tag_step.later(pairs(60, 0.05, 0.05, seed=3), seed=1)
    assert low <= found <= high
    assert low < 5.0 < high
    assert tag_step.later(pairs(60, 0.05, 0.05, seed=3), seed=1) == (found, low, high)


@pytest.mark.parametrize(
    ("count", "outside"), [(1, 0), (5, 0), (6, 0), (9, 1), (60, 21), (1000, 468)]
)
def test_the_bound_is_that_of_the_sign_test(count: int, outside: int) -> None:
    """Tables of the binomial distribution: of 60 values the 22nd and the 39th."""
    assert tag_step.outside_the_bound(count) == outside
    some = pairs(count, 0.05, 0.1, seed=count)
    parts = sorted(100 * (ours / theirs - 1) for ours, theirs in some)
    found, low, high = tag_step.longer(some)
    assert (low, high) == (parts[outside], parts[count - 1 - outside])
    assert found == statistics.median(parts)


def test_a_row_says_whether_the_upper_end_is_within_the_target() -> None:
    rows = [
        tag_step.bounded("tags/x", "x", (mean, mean - 1, mean + 1), 0.5, 30)
        for mean in (-0.6, -0.5, -0.4, 0.4)
    ]
    assert [row.reached for row in rows] == [Reached.YES, Reached.YES, Reached.NO, Reached.NO]
