"""Reports of puts by shared memory: there for who asks, and soon for everybody."""

from __future__ import annotations

import asyncio
import time

from kvtier.core.page import PutCode
from kvtier.daemon.put_reports import PutReport, PutReports


def report(number: int) -> PutReport:
    return PutReport(
        session_id=number,
        scope=(1, 0),
        keys=[bytes(32)],
        codes={PutCode.STORED: 1},
        payload_bytes=64,
    )


async def until(taken: list[PutReport], count: int) -> None:
    deadline = time.monotonic() + 5
    while len(taken) < count:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


def test_who_asks_sees_all_that_was_added_before() -> None:
    async def run() -> None:
        taken: list[PutReport] = []
        reports = PutReports(taken.append)
        every = [report(number) for number in range(3)]
        for put in every:
            reports.add(put)
        reports.take_in()
        assert taken == every
        reports.take_in()
        assert taken == every

    asyncio.run(run())


def test_the_loop_is_woken_once_for_several_and_again_for_the_next() -> None:
    async def run() -> None:
        taken: list[PutReport] = []
        reports, loop = PutReports(taken.append), asyncio.get_running_loop()
        wakes = []
        wake = loop.call_soon_threadsafe

        def counted(*given):  # type: ignore[no-untyped-def]
            wakes.append(given)
            return wake(*given)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign]

        def put(first: int) -> None:
            for number in range(first, first + 5):
                reports.add(report(number))
                reports.wake(loop)

        put(0)  # the loop does not run meanwhile
        assert (len(wakes), taken) == (1, [])
        await until(taken, 5)
        put(5)
        assert len(wakes) == 2
        reports.take_in()
        put(10)
        await until(taken, 15)
        assert [item.session_id for item in taken] == list(range(15))

    asyncio.run(run())


def test_reports_of_another_thread_come_all_and_in_order() -> None:
    async def run() -> None:
        taken: list[PutReport] = []
        reports, loop = PutReports(taken.append), asyncio.get_running_loop()

        def put() -> None:
            for number in range(3000):
                reports.add(report(number))
                reports.wake(loop)

        putting = asyncio.create_task(asyncio.to_thread(put))
        while not putting.done():
            reports.take_in()
            await asyncio.sleep(0)
        await until(taken, 3000)
        assert [item.session_id for item in taken] == list(range(3000))

    asyncio.run(run())
