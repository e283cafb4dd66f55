"""Which prefixes a pool can restore, against the rule written out as SGLang states it."""

from __future__ import annotations

import random

import pytest

from kvtier_sglang.prefixes import HitRule, restorable
from tests.seeds import seeds

ALL, TRAILING = HitRule.ALL_PAGES, HitRule.TRAILING_PAGES


def by_the_letter(there, rule, window):
    lengths = range(1, len(there) + 1)
    if rule is ALL:
        return [length for length in lengths if all(there[:length])]
    return [length for length in lengths if all(there[max(0, length - max(1, window)) : length])]


@pytest.mark.parametrize("seed", seeds(5, of=20))
def test_random_pages(seed):
    chance = random.Random(seed)
    there = [chance.random() < 0.7 for _ in range(chance.randrange(40))]
    for rule in HitRule:
        for window in range(6):
            assert restorable(there, rule, window) == by_the_letter(there, rule, window)


def test_a_window_that_is_longer_than_the_prompt():
    assert restorable([True] * 3, TRAILING, 100) == [1, 2, 3]
    assert restorable([False, True, True], TRAILING, 100) == []


def test_the_last_state_alone():
    assert restorable([False, True, False, True], TRAILING, 1) == [2, 4]
    assert restorable([False, True, False, True], ALL, 1) == []
    assert restorable([], TRAILING, 1) == []
