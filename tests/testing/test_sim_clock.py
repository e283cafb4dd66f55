"""The virtual clock: time moves only when told, and callbacks run in order."""

from __future__ import annotations

import threading

import pytest

from kvtier.testing.sim_clock import SimClock


@pytest.fixture
def clock():
    return SimClock(seed=1, start_s=100.0)


def test_time_stands_still(clock):
    assert [clock.monotonic() for _ in range(3)] == [100.0] * 3
    clock.sleep(0.25)
    clock.advance(0)
    assert clock.monotonic() == 100.25


def test_long_runs_do_not_drift(clock):
    for _ in range(100_000):
        clock.advance(0.001)
    assert clock.monotonic() == 200.0


def test_it_does_not_go_back(clock):
    with pytest.raises(ValueError, match="does not go back: -1"):
        clock.advance(-1)


def test_callbacks_run_in_order_at_their_time(clock):
    seen = []
    for when in (103.0, 101.5, 102.0):
        clock.call_at(when, lambda: seen.append(clock.monotonic()))
    clock.call_later(1.0, lambda: seen.append(clock.monotonic()))
    clock.advance(2.0)
    assert seen == [101.0, 101.5, 102.0]
    assert (clock.pending, clock.monotonic()) == (1, 102.0)


def test_the_past_is_due_at_the_next_move(clock):
    seen = []
    clock.call_at(5.0, lambda: seen.append(clock.monotonic()))
    assert seen == []
    clock.advance(0)
    assert seen == [100.0]


def test_callbacks_may_add_sleep_and_cancel(clock):
    seen = []
    later = clock.call_at(104.0, lambda: seen.append("cancelled"))

    def first():
        clock.call_later(0.5, lambda: seen.append(clock.monotonic()))
        clock.sleep(2.0)
        later.cancel()

    clock.call_at(101.0, first)
    clock.advance(1.0)
    assert seen == [101.5]
    assert clock.monotonic() == 103.0
    clock.advance(10)
    assert seen == [101.5]


def order_of(seed):
    clock, seen = SimClock(seed=seed), []
    for number in range(8):
        clock.call_at(2000.0, lambda number=number: seen.append(number))
    clock.run_until_idle()
    return tuple(seen)


def test_ties_are_drawn_from_the_seed():
    orders = {seed: order_of(seed) for seed in range(10)}
    assert all(order_of(seed) == order for seed, order in orders.items())
    assert len(set(orders.values())) == 10


def test_run_until_idle(clock):
    seen = []

    def again():
        seen.append(clock.monotonic())
        if len(seen) < 3:
            clock.call_later(10.0, again)

    clock.call_later(10.0, again)
    clock.run_until_idle()
    assert seen == [110.0, 120.0, 130.0]
    assert (clock.pending, clock.monotonic()) == (0, 130.0)


def test_a_timer_without_end_is_reported(clock):
    def again():
        clock.call_later(1.0, again)

    again()
    with pytest.raises(TimeoutError, match=r"1 timers left after 60.0 s \(seed 1\)"):
        clock.run_until_idle(60.0)


def test_threads_share_it(clock):
    seen = []
    clock.call_at(104.0, lambda: seen.append(1))
    threads = [threading.Thread(target=clock.sleep, args=(0.5,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (clock.monotonic(), seen) == (104.0, [1])
