"""Who wants the same thing goes one after the other, also when somebody gives up."""

from __future__ import annotations

import asyncio

import pytest

from kvtier.transfer.turns import Turns


async def take(turns: Turns, name: str, seen: list[str], what: str, gate: asyncio.Event) -> None:
    async with turns.of(name):
        seen.append(f"{what} in")
        await gate.wait()
        seen.append(f"{what} out")


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize("lost", ["nobody", "the first", "one who waits"])
def test_one_at_a_time_in_the_order_of_asking(lost: str) -> None:
    async def run() -> None:
        turns, gate, seen = Turns(), asyncio.Event(), list[str]()
        tasks = [asyncio.create_task(take(turns, "a", seen, str(i), gate)) for i in range(3)]
        await settle()
        assert seen == ["0 in"]
        left = [0, 1, 2]
        if lost != "nobody":
            number = 0 if lost == "the first" else 1
            tasks[number].cancel()
            left.remove(number)
            await settle()
        gate.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        expected = [f"{i} {way}" for i in left for way in ("in", "out")]
        assert [what for what in seen if int(what[0]) in left] == expected
        async with asyncio.timeout(1), turns.of("a"):
            pass

    asyncio.run(run())


def test_other_names_do_not_wait() -> None:
    async def run() -> None:
        turns = Turns()
        async with turns.of("a"), asyncio.timeout(1), turns.of("b"):
            pass

    asyncio.run(run())


def test_the_turn_of_one_who_fails_ends() -> None:
    async def run() -> None:
        turns = Turns()
        with pytest.raises(ZeroDivisionError):
            async with turns.of("a"):
                raise ZeroDivisionError
        async with asyncio.timeout(1), turns.of("a"):
            pass

    asyncio.run(run())
