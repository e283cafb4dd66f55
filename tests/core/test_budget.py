"""The write budget: what may be written, in any stretch of time."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.core.budget import WriteBudget

MIB = 1 << 20
DAY = 86_400
#: A MiB a second.
RATE = DAY * MIB


def test_without_a_limit_everything_may_be_written() -> None:
    budget = WriteBudget(0, now=5.0)
    assert all(budget.take(1 << 60, now=5.0) for _ in range(10))


@pytest.mark.parametrize(
    ("bytes_per_day", "capacity"),
    [
        (24 * 1024 * MIB, 1024 * MIB),
        (24 * 256 * MIB, 256 * MIB),
        (24 * 256 * MIB - 24, 256 * MIB),
        (256 * MIB, 256 * MIB),
        (100 * MIB, 100 * MIB),
        (1, 1),
    ],
)
def test_the_capacity_is_an_hour_or_256_mib_or_a_day(bytes_per_day: int, capacity: int) -> None:
    budget = WriteBudget(bytes_per_day, now=0.0)
    assert budget.capacity_bytes == capacity
    assert not budget.take(capacity + 1, now=0.0)
    assert budget.take(capacity, now=0.0)
    assert not budget.take(1, now=0.0)
    assert budget.take(0, now=0.0)
    assert budget.left_bytes(now=1e9) == capacity, "never more, however long nothing is written"


def test_it_fills_with_time() -> None:
    budget = WriteBudget(RATE, now=100.0)
    assert budget.take(3600 * MIB, now=100.0)
    assert not budget.take(MIB, now=100.5)
    assert not budget.take(MIB, now=100.875)
    assert budget.take(MIB, now=101.0), "what was refused was not taken"
    assert budget.left_bytes(now=101.0) == 0
    assert budget.left_bytes(now=161.0) == 60 * MIB


def test_time_that_goes_back_brings_nothing() -> None:
    budget = WriteBudget(RATE, now=50.0)
    assert budget.take(3600 * MIB, now=50.0)
    assert budget.take(MIB, now=51.0)
    assert not budget.take(1, now=20.0)
    assert not budget.take(1, now=51.0)
    assert budget.take(MIB, now=52.0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("bytes_per_day", [10 * MIB, 5_000 * MIB, RATE])
def test_no_stretch_of_time_has_more_than_its_share(bytes_per_day: int, seed: int) -> None:
    """Asked at every turn for more than there is: the sums stay within rate x time + capacity."""
    rng = np.random.default_rng(seed)
    budget = WriteBudget(bytes_per_day, now=0.0)
    now, taken, times, sums = 0.0, 0, [0.0], [0]
    for _ in range(2000):
        now += float(rng.exponential(200.0))
        nbytes = int(rng.integers(1, max(2, bytes_per_day // 200)))
        while budget.take(nbytes, now):
            taken += nbytes
        times.append(now)
        sums.append(taken)
    at, total = np.array(times), np.array(sums)
    for start in range(0, 2000, 100):
        allowed = (at[start + 1 :] - at[start]) * bytes_per_day / DAY + budget.capacity_bytes
        assert bool((total[start + 1 :] - total[start] <= allowed + 1).all()), f"seed {seed}"
    assert taken > 0.95 * now * bytes_per_day / DAY, "and what may be written can be"


def test_less_than_nothing_is_no_budget() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        WriteBudget(-1, now=0.0)
