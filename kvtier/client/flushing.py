"""Flush: what was put through this connection survives the daemon now, or is counted as lost.

Promise: every page that was stored is in the answer of one flush. A daemon forgets what a session
put when the session ends (by a restart, or after a long silence); the pages of such a session are
counted as lost, unless their put said that they are durable: they may be, but nobody can say so.

`flush` belongs to the event loop of its connection.
"""

from __future__ import annotations

from kvtier.client.link import Link
from kvtier.errors import UnknownHandle
from kvtier.transfer.planes.deadline import Deadline
from kvtier.transfer.planes.values import FlushResult

__all__ = ["flush"]


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
