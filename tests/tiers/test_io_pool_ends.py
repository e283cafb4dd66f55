"""How jobs end: late, cancelled, dropped by a close; and all of it at random."""

from __future__ import annotations

import asyncio
import errno
import random
import threading
import time

import pytest
from pool_parts import SOON_S, run

from kvtier.errors import Busy, TierIOError
from kvtier.tiers.base import errno_of
from kvtier.tiers.io_pool import IoClass

GET, PUT, PREFETCH, DEMOTE, SCRUB = IoClass


# -- time-outs and late ends -----------------------------------------------------------------------


def test_a_wait_that_takes_too_long_gives_up_and_the_job_goes_on(new_pool, gates):
    pool, gate, told = new_pool(), gates(), []

    async def scenario():
        loop_thread = threading.current_thread()
        job = pool.submit(GET, gate)
        job.add_done(lambda: told.append(threading.current_thread() is loop_thread))
        with pytest.raises(TimeoutError):
            await job.wait(0.02)
        assert (job.done, told) == (False, [])
        assert job.cancel() is False, "it runs"
        assert 0 < job.running_s(time.monotonic()) < SOON_S
        assert pool.longest_s(time.monotonic()) > 0
        gate.let_go()
        assert await job.wait(SOON_S) == "went on"
        await asyncio.sleep(0)
        assert (job.done, told) == (True, [True])
        assert job.running_s(time.monotonic()) == pool.longest_s(time.monotonic()) == 0
        job.add_done(lambda: told.append("late"))
        await asyncio.sleep(0)
        assert told == [True, "late"]

    run(scenario)


def test_a_job_that_waits_does_not_run_yet(new_pool, gates):
    pool, gate = new_pool(), gates()

    async def scenario():
        pool.submit(GET, gate)
        waiting = pool.submit(GET, lambda: None)
        assert waiting.running_s(time.monotonic() + 100) == 0
        # Its time runs from its start: waiting for its turn is not the device's fault.
        waiter = asyncio.create_task(waiting.wait(0.05))
        await asyncio.sleep(0.2)
        assert not waiter.done()
        gate.let_go()
        await waiter

    run(scenario)


def test_a_cancelled_waiter_leaves_the_job_alone(new_pool, gates):
    pool, gate = new_pool(), gates()

    async def scenario():
        job = pool.submit(GET, gate)
        waiter = asyncio.create_task(job.wait(None))
        await asyncio.sleep(0.01)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        gate.let_go()
        assert await job.wait(None) == "went on"

    run(scenario)


def test_a_job_that_ends_after_its_loop_is_unheard(new_pool, gates):
    pool, gate = new_pool(), gates()

    async def scenario():
        return pool.submit(GET, gate)

    job = run(scenario)
    gate.let_go()
    assert pool.close(SOON_S)
    assert job.done


# -- cancel ----------------------------------------------------------------------------------------


def test_a_cancelled_job_never_starts(new_pool, gates):
    pool, gate, ran, told = new_pool(), gates(), [], []

    async def scenario():
        first = pool.submit(GET, gate)
        jobs = [pool.submit(GET, lambda n=number: ran.append(n)) for number in range(3)]
        jobs[1].add_done(lambda: told.append(1))
        assert jobs[1].cancel() is True
        assert jobs[1].cancel() is False, "it has ended"
        assert jobs[1].done
        with pytest.raises(TierIOError, match="cancelled") as caught:
            await jobs[1].wait(SOON_S)
        assert errno_of(caught.value) == errno.ECANCELED
        gate.let_go()
        await asyncio.gather(first.wait(SOON_S), jobs[0].wait(SOON_S), jobs[2].wait(SOON_S))
        assert jobs[0].cancel() is False

    run(scenario)
    assert (ran, told) == ([0, 2], [1])


def test_cancelled_jobs_make_room(new_pool, gates):
    pool, gate = new_pool(queue_max=1), gates()

    async def scenario():
        pool.submit(GET, gate)
        for _ in range(50):
            assert pool.submit(GET, lambda: None).cancel()

    run(scenario)
    assert pool.waiting == 0


# -- close -----------------------------------------------------------------------------------------


def test_close_drops_what_waits_and_waits_for_what_runs(new_pool, gates):
    pool, gate, told = new_pool(), gates(), []

    async def scenario():
        running = pool.submit(GET, gate)
        dropped = [pool.submit(kind, lambda: told.append("ran")) for kind in IoClass]
        for job in dropped:
            job.add_done(lambda: told.append("dropped"))
        threading.Timer(0.05, gate.let_go).start()
        assert await asyncio.to_thread(pool.close, SOON_S) is True
        assert await running.wait(SOON_S) == "went on"
        for job in dropped:
            with pytest.raises(TierIOError, match="closed") as caught:
                await job.wait(SOON_S)
            assert errno_of(caught.value) == errno.EBADF
        with pytest.raises(Busy, match="kvtier-test is closed"):
            pool.submit(GET, lambda: None)

    run(scenario)
    assert told == ["dropped"] * 5
    assert pool.close(0) is True


def test_close_with_a_job_that_hangs(new_pool, gates):
    pool, gate, told = new_pool(threads=2), gates(), []

    async def scenario():
        job = pool.submit(DEMOTE, gate)
        job.add_done(lambda: told.append(job.done))
        start = time.monotonic()
        assert pool.close(0.05) is False
        assert time.monotonic() - start < SOON_S / 2
        with pytest.raises(TimeoutError):
            await job.wait(0.01)
        gate.let_go()
        assert await job.wait(SOON_S) == "went on", "its late end is told"
        await asyncio.sleep(0)

    run(scenario)
    assert told == [True]
    assert pool.close(SOON_S) is True


def test_close_of_an_idle_pool(new_pool):
    pool = new_pool(threads=4)
    assert pool.close(SOON_S) is True
    assert pool.close(SOON_S) is True


# -- all together ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_job_ends_once(new_pool, seed):
    """Submits, cancels and waits at random; at most so many at once; all accounted for."""
    source, pool = random.Random(seed), new_pool(threads=3, queue_max=8)
    lock, now, most = threading.Lock(), dict.fromkeys(IoClass, 0), {"all": 0, "background": 0}

    def work(kind, number):
        with lock:
            now[kind] += 1
            most["all"] = max(most["all"], sum(now.values()))
            background = sum(count for each, count in now.items() if each >= PREFETCH)
            most["background"] = max(most["background"], background)
        time.sleep(source.random() * 0.0005)
        with lock:
            now[kind] -= 1
        return number

    async def scenario():
        ended, expected, cancelled, busy = [], [], 0, 0
        waits = []
        for number in range(600):
            kind = source.choice(list(IoClass))
            try:
                job = pool.submit(kind, lambda kind=kind, number=number: work(kind, number))
            except Busy:
                busy += 1
                await asyncio.sleep(0.001)
                continue
            job.add_done(lambda number=number: ended.append(number))
            expected.append(number)
            if source.random() < 0.2 and job.cancel():
                cancelled += 1
            else:
                waits.append((number, job))
        for number, job in waits:
            assert await job.wait(SOON_S) == number
        await asyncio.sleep(0)
        assert sorted(ended) == expected, f"seed {seed}"
        assert busy > 0 < cancelled, f"seed {seed}"

    run(scenario)
    assert most["all"] <= 3, f"seed {seed}"
    assert most["background"] <= 2, f"seed {seed}"
    assert (pool.waiting, pool.running) == (0, 0)
