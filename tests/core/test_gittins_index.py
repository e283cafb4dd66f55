"""The index of the Gittins policy against values known by hand and by looking at every horizon."""

from __future__ import annotations

import numpy as np
import pytest

from tests.core.gittins_support import buckets, index, layout
from tests.seeds import seeds

BINS, EDGES = layout.BINS, buckets.EDGES
age_place, fill_curve, read_curve = buckets.age_place, index.fill_curve, index.read_curve


def curve_of(chance: np.ndarray) -> np.ndarray:
    curve = np.zeros(BINS + 1, np.uint16)
    fill_curve(chance, curve)
    return curve


def hits_a_second(stored: float) -> float:
    return 2 ** (stored / 1024 - 40)


def by_every_horizon(chance: np.ndarray, begin: int) -> float:
    best, alive, hit, held = 0.0, 1.0, 0.0, 0.0
    for at in range(begin, BINS):
        hit += alive * chance[at]
        held += alive * (EDGES[at + 1] - EDGES[at]) * (1 - chance[at] / 2)
        alive *= 1 - chance[at]
        best = max(best, hit / held)
    return best


def test_a_page_that_is_used_in_the_first_half_second_or_never() -> None:
    chance = np.zeros(BINS)
    chance[0] = 0.5
    curve = curve_of(chance)
    # Half a hit for half a second, of which half the pages need only the half.
    assert hits_a_second(curve[0]) == pytest.approx(0.5 / (0.5 * 0.75), rel=1e-3)
    assert (curve[1:] < 200).all()


def test_a_page_that_is_surely_used_in_a_later_bin_is_worth_more_as_it_comes_near() -> None:
    chance = np.zeros(BINS)
    chance[10] = 1.0
    curve = curve_of(chance)
    for begin in range(11):
        wait = EDGES[10] - EDGES[begin] + (EDGES[11] - EDGES[10]) / 2
        assert hits_a_second(curve[begin]) == pytest.approx(1 / wait, rel=1e-3)
    assert (np.diff(curve[:11].astype(int)) > 0).all()


def test_equal_chances_in_every_bin_are_worth_less_with_age() -> None:
    curve = curve_of(np.full(BINS, 0.3))
    for begin in range(BINS):
        width = EDGES[begin + 1] - EDGES[begin]
        # The next bin is the best horizon, because all later ones are wider.
        if EDGES[min(begin + 2, BINS)] - EDGES[begin + 1] >= width:
            assert hits_a_second(curve[begin]) == pytest.approx(0.3 / (width * 0.85), rel=1e-3)


@pytest.mark.parametrize("seed", seeds(5, of=20))
def test_any_chances_have_the_index_of_the_best_horizon(seed: int) -> None:
    rng = np.random.default_rng(seed)
    chance = rng.beta(0.3, 2.0, BINS)
    chance[rng.random(BINS) < 0.4] = 0.0
    curve = curve_of(chance)
    for begin in range(BINS):
        expected = max(by_every_horizon(chance, begin), 1e-12)
        assert hits_a_second(curve[begin]) == pytest.approx(expected, rel=1e-3), begin


def test_between_two_ages_the_logarithm_is_between() -> None:
    curve = curve_of(np.full(BINS, 0.3))
    age = float(np.sqrt(EDGES[7] * EDGES[8]))
    assert age_place(age) == pytest.approx(7.5)
    middle = (float(curve[7]) + float(curve[8])) / 2
    assert read_curve(curve, age_place(age)) == pytest.approx(middle)


@pytest.mark.parametrize("at", range(BINS))
def test_an_age_is_in_the_bin_between_its_edges(at: int) -> None:
    middle = (EDGES[at] + EDGES[at + 1]) / 2
    assert int(age_place(float(middle))) == at
