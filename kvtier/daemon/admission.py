"""How much is under way, and the answer Busy when it is enough.

Short calls and streams are counted apart, so that hanging streams never keep a lookup out. The
bytes of a Put count from their announcement to the end of the call, those of a Get until they are
sent. Event loop's thread alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvtier.config import LimitsConfig
from kvtier.errors import Busy

__all__ = ["Admission", "ByteBudget"]


@dataclass(slots=True)
class ByteBudget:
    """What one call has taken of the bytes that may be under way."""

    taken: int = 0


class Admission:
    def __init__(self, limits: LimitsConfig) -> None:
        self._limits = limits
        self.calls = 0
        self.streams = 0
        self.bytes = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_idle(self, until: float) -> bool:
        """Returns when nothing is under way (True) or at `until`, in the loop's time (False)."""
        try:
            async with asyncio.timeout_at(until):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    @contextmanager
    def call(self) -> Iterator[None]:
        """Counts a short call. Raises Busy."""
        if self.calls >= self._limits.rpcs_max:
            raise _busy(f"{self.calls} calls are under way", "limits.rpcs_max")
        self.calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.calls -= 1
            self._set_if_idle()

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Counts a stream. Raises Busy."""
        if self.streams >= self._limits.streams_max:
            raise _busy(f"{self.streams} streams are under way", "limits.streams_max")
        self.streams += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.streams -= 1
            self._set_if_idle()

    @contextmanager
    def budget(self) -> Iterator[ByteBudget]:
        """A budget to fill with `take`; what it still has is given back at the end."""
        budget = ByteBudget()
        try:
            yield budget
        finally:
            self.give(budget, budget.taken)

    def take(self, budget: ByteBudget, count: int) -> None:
        """Counts `count` payload bytes to this call. Raises Busy and counts nothing."""
        if self.bytes + count > self._limits.bytes_under_way_max:
            raise _busy(
                f"{self.bytes} bytes are under way, {count} more are asked for",
                "limits.bytes_under_way_max",
            )
        self.bytes += count
        budget.taken += count

    def give(self, budget: ByteBudget, count: int) -> None:
        """These bytes are no longer under way."""
        assert count <= budget.taken
        self.bytes -= count
        budget.taken -= count

    def _set_if_idle(self) -> None:
        if self.calls == 0 and self.streams == 0:
            self._idle.set()


def _busy(what: str, key: str) -> Busy:
    return Busy(
        f"the daemon is at its limit: {what} ({key})",
        remedy=f"Try again shortly, or raise {key}.",
    )
