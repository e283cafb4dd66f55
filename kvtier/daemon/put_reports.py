"""What puts by shared memory came to, on the way from the local plane's thread to the event loop.

Promise: a put whose writer has been answered is seen by every `take_in` from then on, so that a
Flush knows of it. Nobody else waits for the reports: the loop is woken for the first of several, a
moment later, and not in the middle of every put.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvtier.core.page import PutCode

__all__ = ["PutReport", "PutReports"]

_WAIT_S: Final = 0.005


@dataclass(slots=True, kw_only=True)
class PutReport:
    """What one WRITE came to, for those who keep count on the event loop."""

    session_id: int
    scope: tuple[int, int]  # namespace number and shard
    #: Of the pages that are in the cache now: those stored, and those that were there.
    keys: Sequence[bytes]
    codes: Mapping[PutCode, int]
    payload_bytes: int


class PutReports:
    """`take` is called on the event loop, for one report after the other."""

    def __init__(self, take: Callable[[PutReport], None]) -> None:
        self._take = take
        self._waiting: deque[PutReport] = deque()
        self._is_coming = False  # a `take_in` that has not begun

    def add(self, put: PutReport) -> None:
        """Before the answer goes out. Any thread."""
        self._waiting.append(put)

    def wake(self, loop: asyncio.AbstractEventLoop) -> None:
        """Has the loop take in what was added: after the answer. One thread."""
        if self._waiting and not self._is_coming:
            self._is_coming = True
            loop.call_soon_threadsafe(loop.call_later, _WAIT_S, self.take_in)

    def take_in(self) -> None:
        """On the event loop."""
        self._is_coming = False  # first: who adds from here on wakes the loop again
        while self._waiting:
            self._take(self._waiting.popleft())
