"""Whether the engine still makes steps, seen from outside by what it counts.

A step that does something changes a counter or a number of pages. One event loop calls `look`.
"""

from __future__ import annotations

import asyncio
import time

from kvtier_engine.engine import Engine

__all__ = ["Pulse"]

#: These change without a step: when somebody asks.
_NOT_STEPS = ("requests_refused", "requests_waiting")
#: So often in the time after which the engine counts as stalled.
_LOOKS = 20


class Pulse:
    """Of one engine. Stalled: it has work, and nothing has changed for `seconds_max`."""

    def __init__(self, engine: Engine, seconds_max: float) -> None:
        self._engine = engine
        self._seconds_max = seconds_max
        self._seen: dict[str, int] = {}
        self._changed = time.monotonic()

    def look(self) -> float:
        """Seconds since the last change that was seen, 0 without work."""
        now = time.monotonic()
        stats = self._engine.stats()
        seen = {name: value for name, value in stats.items() if name not in _NOT_STEPS}
        if seen != self._seen or not self._engine.has_work:
            self._seen, self._changed = seen, now
        return now - self._changed

    @property
    def is_stalled(self) -> bool:
        return self.look() >= self._seconds_max

    async def watch(self) -> None:
        """Looks again and again, until it is cancelled: a change that nobody saw has no time."""
        while True:
            self.look()
            await asyncio.sleep(min(1.0, self._seconds_max / _LOOKS))
