"""Deterministic asyncio: one thread, no timers, and a seed that says what happens next.

Whatever takes time in the world outside (a pause of a client, a piece of I/O, work on a thread) is
an event. The loop runs until nothing in it can go on; then one event, chosen by the seeded random,
happens; and so on. An event that is late happens rarely, but always before the world stands still.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from kvtier.errors import KvtierError

__all__ = ["Event", "Scheduler", "SimLoop"]

T = TypeVar("T")

#: How often a late event comes although others could.
_LATE = 0.02
#: A loop that is not quiet after so many rounds is never quiet.
_ROUNDS_MAX = 10_000


class Event:
    """Something that will happen: `fire` is called once, on the loop's thread."""

    __slots__ = ("fire", "is_late")

    def __init__(self, fire: Callable[[], None], *, late: bool) -> None:
        self.fire = fire
        self.is_late = late


class Scheduler:
    """The events of one loop. All calls on its thread."""

    def __init__(self, rng: random.Random) -> None:
        self.loop = SimLoop(self)
        self._rng = rng
        self._prompt: list[Event] = []
        self._late: list[Event] = []
        #: Tells one sequence of events from another.
        self.trace = 0
        #: The process has ended: what its tasks do when they are thrown away is of no account.
        self.is_over = False

    @property
    def has_prompt(self) -> bool:
        return bool(self._prompt)

    def add(self, fire: Callable[[], None], *, late: bool = False) -> Event:
        event = Event(fire, late=late)
        (self._late if late else self._prompt).append(event)
        return event

    def discard(self, event: Event) -> None:
        """It does not happen; nothing when it has happened already."""
        events = self._late if event.is_late else self._prompt
        if event in events:
            events.remove(event)

    def fire_one(self) -> bool:
        """One event happens; False when there is none."""
        events = self._prompt
        if self._late and (not events or self._rng.random() < _LATE):
            events = self._late
        if not events:
            return False
        at = self._rng.randrange(len(events))
        self.trace = hash((self.trace, len(self._prompt), len(self._late), at))
        self.fire(events[at])
        return True

    def fire_prompt(self) -> None:
        """One event happens that is not late."""
        self.fire(self._prompt[self._rng.randrange(len(self._prompt))])

    def fire(self, event: Event) -> None:
        self.discard(event)
        event.fire()

    async def pause(self) -> None:
        """Returns when its turn has come."""
        turn = self.loop.create_future()
        event = self.add(partial(_settle, turn))
        try:
            await turn
        finally:
            self.discard(event)

    def on_a_thread(self, work: Callable[[], T]) -> asyncio.Future[T]:
        """`work` is done by one event, and its result is told by another."""
        future: asyncio.Future[T] = self.loop.create_future()

        def run() -> None:
            try:
                value = work()
            except KvtierError as error:
                self.add(partial(_fail, future, error))
            else:
                self.add(partial(_settle, future, value))

        self.add(run)
        return future

    async def quiesce(self) -> None:
        """Returns when nothing in the loop can go on without an event."""
        for _ in range(_ROUNDS_MAX):
            before = self.loop.calls
            await asyncio.sleep(0)
            if self.loop.calls == before + 1:  # that of this task alone
                return
        raise AssertionError("the loop never comes to rest")


class SimLoop(asyncio.SelectorEventLoop):
    """A loop whose executor is the scheduler, and which refuses timers."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler
        self.calls = 0
        self.tasks = 0
        self.set_task_factory(_NumberedTask)

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> Any:
        self.calls += 1
        return super().call_soon(callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        assert when == float("inf"), f"a timer in the simulation: {callback}"
        return asyncio.TimerHandle(when, callback, args, self, context)  # of what never comes

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> Any:
        return self._scheduler.on_a_thread(partial(func, *args))


class _NumberedTask(asyncio.Task[Any]):
    """Has the same place in a set whenever the same run is repeated: a TaskGroup cancels its tasks
    in the order of a set."""

    def __init__(self, loop: SimLoop, work: Any, **how: Any) -> None:
        loop.tasks += 1
        self._number = loop.tasks
        super().__init__(work, loop=loop, **how)

    def __hash__(self) -> int:
        return self._number


def _settle(future: asyncio.Future[Any], value: Any = None) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
