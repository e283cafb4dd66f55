"""What jobs give, their order, the thread that is kept for gets, the bound of the queue."""

from __future__ import annotations

import asyncio
import errno
import threading

import pytest
from pool_parts import SOON_S, run

from kvtier.errors import Busy
from kvtier.tiers.io_pool import IoClass

GET, PUT, PREFETCH, DEMOTE, SCRUB = IoClass


# -- what a job gives ------------------------------------------------------------------------------


def test_a_job_gives_what_its_work_gives(new_pool):
    pool = new_pool(threads=2)

    async def scenario():
        jobs = [pool.submit(PUT, lambda number=number: number**2) for number in range(50)]
        assert await asyncio.gather(*(job.wait(SOON_S) for job in jobs)) == [
            number**2 for number in range(50)
        ]
        assert all(job.done for job in jobs)
        assert await jobs[3].wait(0) == 9, "again, and at once"

    run(scenario)
    assert (pool.waiting, pool.running) == (0, 0)


def test_work_runs_on_the_pools_own_daemon_threads(new_pool):
    pool = new_pool(threads=3)

    async def scenario():
        thread = await pool.submit(GET, threading.current_thread).wait(SOON_S)
        assert thread.daemon
        assert thread.name.startswith("kvtier-test-")

    run(scenario)


@pytest.mark.parametrize("error", [OSError(errno.EIO, "x"), KeyError("k"), SystemExit(3)])
def test_a_job_raises_what_its_work_raises_and_the_thread_goes_on(new_pool, error):
    pool = new_pool()

    def fail():
        raise error

    async def scenario():
        job = pool.submit(GET, fail)
        for _ in range(2):
            with pytest.raises(type(error)) as caught:
                await job.wait(SOON_S)
            assert caught.value is error
        assert await pool.submit(GET, lambda: 1).wait(SOON_S) == 1

    run(scenario)


def test_an_error_that_nobody_waits_for_is_no_noise(new_pool, caplog):
    pool = new_pool()

    async def scenario():
        pool.submit(GET, lambda: 1 / 0)
        await pool.submit(GET, lambda: None).wait(SOON_S)

    run(scenario)
    assert caplog.records == []


def test_a_job_does_not_keep_its_work(new_pool):
    """Else the buffers of the last job would stay for as long as the pool is idle."""
    pool = new_pool()

    class Buffer:
        def __del__(self):
            gone.set()

    gone, buffer = threading.Event(), Buffer()

    async def scenario():
        nonlocal buffer
        job = pool.submit(GET, lambda kept=buffer: None)
        del buffer
        await job.wait(SOON_S)
        assert gone.wait(SOON_S)

    run(scenario)


def test_an_idle_thread_does_not_keep_what_the_last_job_gave(new_pool):
    pool = new_pool()

    class Buffer:
        def __del__(self):
            gone.set()

    gone = threading.Event()

    async def scenario():
        await pool.submit(GET, Buffer).wait(SOON_S)
        assert await asyncio.to_thread(gone.wait, SOON_S)

    run(scenario)


# -- order -----------------------------------------------------------------------------------------


def order_of(pool, gates, classes):
    """The places in `classes` in the order in which a pool of one thread runs them."""

    async def scenario():
        gate, order = gates(), []
        first = pool.submit(GET, gate)
        jobs = [
            pool.submit(io_class, lambda place=place: order.append(place))
            for place, io_class in enumerate(classes)
        ]
        assert await asyncio.to_thread(gate.started.wait, SOON_S)
        gate.let_go()
        await first.wait(SOON_S)
        await asyncio.gather(*(job.wait(SOON_S) for job in jobs))
        return order

    return run(scenario)


def test_the_most_urgent_goes_first(new_pool, gates):
    # The gate was start 0; start 3 goes to the oldest.
    assert order_of(new_pool(), gates, [SCRUB, GET, PUT]) == [1, 2, 0]
    assert order_of(new_pool(), gates, [DEMOTE, PREFETCH, PUT, GET, GET]) == [3, 4, 0, 2, 1]


def test_among_equals_the_first_goes_first(new_pool, gates):
    assert order_of(new_pool(), gates, [GET] * 20) == list(range(20))


def test_every_fourth_start_is_the_oldest_so_nothing_starves(new_pool, gates):
    classes = [SCRUB, DEMOTE] + [GET] * 20
    order = order_of(new_pool(), gates, classes)
    assert order[:8] == [2, 3, 0, 4, 5, 6, 1, 7]


def test_a_stream_of_gets_does_not_starve_a_scrub(new_pool):
    pool = new_pool()

    async def scenario():
        scrub = None
        for turn in range(200):
            jobs = [pool.submit(GET, lambda: None) for _ in range(4)]
            if turn == 10:
                scrub = pool.submit(SCRUB, lambda: "done")
            for job in jobs:
                await job.wait(SOON_S)
            if scrub is not None and scrub.done:
                return turn
        return None

    assert run(scenario) in (10, 11, 12)


# -- the thread that is kept -----------------------------------------------------------------------


@pytest.mark.parametrize("threads", [2, 4])
@pytest.mark.parametrize("io_class", [PREFETCH, DEMOTE, SCRUB])
def test_hanging_background_jobs_leave_a_thread_for_gets(new_pool, gates, threads, io_class):
    pool = new_pool(threads=threads)

    async def scenario():
        hanging = [gates() for _ in range(threads + 2)]
        jobs = [pool.submit(io_class, gate) for gate in hanging]
        assert (pool.running, pool.waiting) == (threads - 1, 3)
        for _ in range(10):
            assert await pool.submit(GET, lambda: "got").wait(SOON_S) == "got"
        assert await pool.submit(PUT, lambda: "put").wait(SOON_S) == "put"
        assert [gate.started.is_set() for gate in hanging[threads - 1 :]] == [False] * 3
        for gate in hanging:
            gate.let_go()
        await asyncio.gather(*(job.wait(SOON_S) for job in jobs))

    run(scenario)


def test_with_one_thread_background_jobs_run_too(new_pool):
    pool = new_pool(threads=1)

    async def scenario():
        return [await pool.submit(kind, lambda: "ran").wait(SOON_S) for kind in IoClass]

    assert run(scenario) == ["ran"] * 5


def test_gets_may_use_all_threads(new_pool, gates):
    pool = new_pool(threads=3)

    async def scenario():
        doors = [gates() for _ in range(3)]
        jobs = [pool.submit(GET, gate) for gate in doors]
        for gate in doors:
            assert await asyncio.to_thread(gate.started.wait, SOON_S)
            gate.let_go()
        await asyncio.gather(*(job.wait(SOON_S) for job in jobs))

    run(scenario)


# -- the bound -------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_so_many_jobs_wait_and_then_it_is_busy(new_pool, gates, threads):
    pool = new_pool(threads=threads, queue_max=5)

    async def scenario():
        doors = [gates() for _ in range(threads)]
        running = [pool.submit(GET, gate) for gate in doors]
        waiting = [pool.submit(DEMOTE, lambda: None) for _ in range(5)]
        for kind in IoClass:
            with pytest.raises(Busy, match="5 jobs wait for kvtier-test"):
                pool.submit(kind, lambda: None)
        for gate in doors:
            gate.let_go()
        await asyncio.gather(*(job.wait(SOON_S) for job in running + waiting))
        await pool.submit(DEMOTE, lambda: None).wait(SOON_S)

    run(scenario)


def test_a_full_queue_of_demotions_does_not_refuse_a_get_that_can_start(new_pool, gates):
    pool = new_pool(threads=2, queue_max=2)

    async def scenario():
        gate = gates()
        pool.submit(DEMOTE, gate)
        for _ in range(2):
            pool.submit(DEMOTE, lambda: None)
        with pytest.raises(Busy):
            pool.submit(DEMOTE, lambda: None)
        assert await pool.submit(GET, lambda: "got").wait(SOON_S) == "got"
        gate.let_go()

    run(scenario)
