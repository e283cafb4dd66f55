"""Turns: of those who want the same thing, one after the other. Event loop's thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager

__all__ = ["Turns"]


class Turns:
    """A lock for every name that somebody wants, and none for the others."""

    def __init__(self) -> None:
        self._taken: dict[Hashable, asyncio.Event] = {}

    @asynccontextmanager
    async def of(self, name: Hashable) -> AsyncIterator[None]:
        """While nobody else has the turn of this name."""
        while (before := self._taken.get(name)) is not None:
            await before.wait()
        ended = self._taken[name] = asyncio.Event()
        try:
            yield
        finally:
            del self._taken[name]
            ended.set()
