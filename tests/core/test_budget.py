"""The write budget: what may be written now, and how it comes back with time."""

from __future__ import annotations

import random

import pytest

from kvtier.core.budget import WriteBudget

DAY = 86_400.0
MIB = 1 << 20


def test_without_a_limit_everything_may_be_written() -> None:
    budget = WriteBudget(0, 0.0)
    assert all(budget.take(1 << 60, float(now)) for now in range(100))


def test_a_burst_is_an_hours_share_and_then_it_is_the_rate() -> None:
    rate = 1 << 20
    budget = WriteBudget(int(rate * DAY), 100.0)
    burst = int(rate * DAY) // 24
    assert budget.take(burst, 100.0)
    assert not budget.take(1, 100.0)
    assert budget.take(rate, 101.0)
    assert not budget.take(rate, 101.5)
    assert budget.take(rate // 2, 101.5)


def test_a_small_budget_still_takes_a_large_page_at_once() -> None:
    budget = WriteBudget(1 << 30, 0.0)
    assert budget.take(256 * MIB, 0.0)
    assert not budget.take(MIB, 1.0)
    assert budget.take(MIB, 1.0 + DAY / 1024 + 1e-3)


def test_what_is_refused_is_not_counted_and_idle_time_is_not_hoarded() -> None:
    budget = WriteBudget(1 << 30, 0.0)
    assert not budget.take(300 * MIB, 0.0)
    assert budget.take(256 * MIB, 0.0)
    assert not budget.take(257 * MIB, 100 * DAY)
    assert budget.take(256 * MIB, 100 * DAY)


@pytest.mark.parametrize("seed", range(3))
def test_over_a_week_it_is_kept(seed: int) -> None:
    rng = random.Random(seed)
    limit = 10 << 30
    budget, now, written = WriteBudget(limit, 0.0), 0.0, 0
    while now < 7 * DAY:
        now += rng.expovariate(1 / 30)
        size = rng.randint(1, 64 * MIB)
        written += size * budget.take(size, now)
    burst = max(limit / 24, 256 * MIB)
    assert 6.9 * limit <= written <= 7 * limit + burst + 64 * MIB, f"seed {seed}"
