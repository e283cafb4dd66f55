"""The tasks of one boot: scripts of clients, which can be cancelled, and others, which go on."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from tests.sim.boot import Boot
from tests.sim.clients import Clients
from tests.sim.crashes import CrashLog
from tests.sim.oracle import Space

__all__ = ["Crew"]

#: Scripts under way at once.
_SCRIPTS = 6


class Crew:
    def __init__(self, boot: Boot, crashes: CrashLog) -> None:
        self._boot = boot
        self._crashes = crashes
        self.scripts: list[asyncio.Task[Any]] = []
        self.others: list[asyncio.Task[Any]] = []

    @property
    def everybody(self) -> list[asyncio.Task[Any]]:
        return [*self.scripts, *self.others]

    def begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Starts what no client can cancel."""
        task = self._boot.scheduler.loop.create_task(work)
        self.others.append(task)
        return task

    def top_up(self, clients: Clients, spaces: list[Space]) -> None:
        while len(self.scripts) < _SCRIPTS:
            work = clients.choose()(self._boot.rng.choice(spaces))
            self.scripts.append(self._boot.scheduler.loop.create_task(work))

    async def lose_one(self) -> None:
        """A client is gone, in the middle of anything, also of the loop's own work."""
        rng = self._boot.rng
        if rng.random() < 0.5:
            self._boot.scheduler.fire_one()
            for _ in range(rng.randrange(8)):
                await asyncio.sleep(0)
        if self.scripts:
            script = self.scripts.pop(rng.randrange(len(self.scripts)))
            script.cancel()
            self.others.append(script)

    def look(self) -> None:
        """Nothing may have failed unseen."""
        for tasks in (self.scripts, self.others):
            for task in [task for task in tasks if task.done()]:
                tasks.remove(task)
                if not task.cancelled():
                    task.result()
        self._crashes.raise_first(self._boot.oracle.seed)
