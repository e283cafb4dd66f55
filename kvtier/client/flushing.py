"""Flush: what was put through this connection survives the daemon now, or is counted as lost.

Promise: every page that was stored is in the answer of one flush. A daemon forgets what a session
put when the session ends (by a restart, or after a long silence); the pages of such a session are
counted as lost, unless their put said that they are durable: they may be, but nobody can say so.

`flush` belongs to the event loop of its connection.
"""

from __future__ import annotations

from collections import Counter, deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kvtier.errors import UnknownHandle
from kvtier.transfer.planes.deadline import Deadline
from kvtier.transfer.planes.values import FlushResult

if TYPE_CHECKING:
    from kvtier.client.link import Link

__all__ = ["Unflushed", "flush"]

_COUNTS_MAX: Final = 64
#: No session has this number.
_ENDED: Final = 0


class Unflushed:
    """Counts pages that were stored and are not known to be durable, by session: of the present one
    the daemon counts too. It has no keys: a page that was put twice counts twice here.

    Any thread, and without a lock: a handler of a signal may put in the middle of a put, and its
    put is counted by another thread, which must not wait for the one that was interrupted.
    """

    def __init__(self) -> None:
        #: (session, pages). What a thread has taken out and not put back yet is in the next answer.
        self._counts: deque[tuple[int, int]] = deque()

    def stored(self, pages: int, session_id: int) -> None:
        """A put of that session."""
        self._counts.append((session_id, pages))
        if len(self._counts) > _COUNTS_MAX:
            self._counts.extend(self._taken().items())

    def take(self, session_id: int) -> tuple[int, int]:
        """(pages of this session, pages of all others), for a flush to account for."""
        taken = self._taken()
        pages = taken.pop(session_id, 0)
        return pages, sum(taken.values())

    def give_back(self, taken: tuple[int, int], session_id: int) -> None:
        """The flush, for which they were taken, has failed."""
        self._counts.extend([(session_id, taken[0]), (_ENDED, taken[1])])

    def _taken(self) -> Counter[int]:
        taken: Counter[int] = Counter()
        with suppress(IndexError):
            while True:
                session_id, pages = self._counts.popleft()
                taken[session_id] += pages
        return taken


async def flush(link: Link, deadline: Deadline) -> FlushResult:
    """Raises DaemonUnavailable, DeadlineExceeded, NotImplementedYet; then the next flush covers the
    same pages and those put meanwhile.
    """
    session_id = link.session_id
    taken = link.unflushed.take(session_id)
    pages, strays = taken
    if not session_id:
        return FlushResult(pages=0, pages_lost=pages + strays)
    try:
        # A flush that takes long says nothing against the daemon.
        with link.guarded(counts_silence=False):
            found = await link.plane.flush(session_id, deadline)
    except UnknownHandle:
        return FlushResult(pages=0, pages_lost=pages + strays)
    except BaseException:
        link.unflushed.give_back(taken, session_id)
        raise
    return FlushResult(pages=found.pages, pages_lost=found.pages_lost + strays)
