"""Flush: what was put through this connection survives the daemon now, or is counted as lost.

Promise: every page that was stored is in the answer of one flush. A daemon forgets what a session
put when the session ends (by a restart, or after a long silence); the pages of such a session are
counted as lost, unless their put said that they are durable: they may be, but nobody can say so.

Belongs to the event loop of its connection.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvtier.errors import UnknownHandle
from kvtier.transfer.planes.deadline import Deadline
from kvtier.transfer.planes.values import FlushResult

if TYPE_CHECKING:
    from kvtier.client.link import Link

__all__ = ["Unflushed", "flush"]


class Unflushed:
    """Counts pages that were stored and are not known to be durable: those of the present session,
    which the daemon counts too, and those of sessions that have ended. It has no keys: a page that
    was put twice counts twice here. Any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a handler of a signal may put in the middle of a put
        self._pages = 0
        self._strays = 0

    def stored(self, pages: int, *, is_present: bool) -> None:
        """A put of the present session, or of one that has ended meanwhile."""
        with self._lock:
            if is_present:
                self._pages += pages
            else:
                self._strays += pages

    def session_ended(self) -> None:
        with self._lock:
            self._strays += self._pages
            self._pages = 0

    def take(self) -> tuple[int, int]:
        """(pages of the present session, pages of ended ones), for a flush to account for."""
        with self._lock:
            taken = self._pages, self._strays
            self._pages = self._strays = 0
            return taken

    def give_back(self, taken: tuple[int, int], *, is_present: bool) -> None:
        """The flush has failed. Whether the session that it began in is still the present one."""
        self.stored(taken[0], is_present=is_present)
        self.stored(taken[1], is_present=False)


async def flush(link: Link, deadline: Deadline) -> FlushResult:
    """Raises DaemonUnavailable, DeadlineExceeded, NotImplementedYet; then the next flush covers the
    same pages and those put meanwhile.
    """
    session_id = link.session_id
    taken = link.unflushed.take()
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
        link.unflushed.give_back(taken, is_present=session_id == link.session_id)
        raise
    return FlushResult(pages=found.pages, pages_lost=found.pages_lost + strays)
