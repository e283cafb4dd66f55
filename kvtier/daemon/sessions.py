"""Client sessions and their namespace handles: who is there, and what each handle means for life.

Ids are random 64-bit numbers of this boot, so that an id of an earlier daemon is unknown and never
somebody else's. A session without a call for the configured time is closed by the reaper; a call
under way holds it open. Handles of what has ended (a namespace that was bumped or deleted) take no
place from those of what is there; the last of them go on to lead to what they were opened for, so
that their holder hears that it has ended. Used on the event loop's thread alone; time comes in from
the clock given.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Container, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvtier.errors import LimitExceeded, UnknownHandle

__all__ = ["Handle", "Session", "Sessions"]

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle(Generic[T]):
    """One opened namespace and shard. `bound` is what was opened; it never changes."""

    handle_id: int
    session_id: int
    bound: T


@dataclass(slots=True, kw_only=True)
class Session(Generic[T]):
    """One client. `handles` by their ids, `by_bound` by what they were opened for; `ended` are
    those of what had ended when their place was needed, the oldest first.
    """

    session_id: int
    client_name: str
    used_at: float
    calls: int = 0
    handles: dict[int, Handle[T]] = field(default_factory=dict)
    by_bound: dict[T, Handle[T]] = field(default_factory=dict)
    ended: dict[int, Handle[T]] = field(default_factory=dict)


class Sessions(Generic[T]):
    """All sessions. `on_end` is called once for each session that ends, after it is gone;
    `has_ended` says whether what a handle was opened for is gone for good.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        ttl_s: float,
        sessions_max: int,
        handles_per_session_max: int,
        on_end: Callable[[Session[T], str], None],
        has_ended: Callable[[T], bool],
    ) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._sessions_max = sessions_max
        self._handles_max = handles_per_session_max
        self._on_end = on_end
        self._has_ended = has_ended
        self._sessions: dict[int, Session[T]] = {}
        self._handles: dict[int, Handle[T]] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session[T]]:
        return iter(list(self._sessions.values()))

    @property
    def handle_count(self) -> int:
        return len(self._handles)

    def idle_s(self, session: Session[T]) -> float:
        return 0.0 if session.calls else self._clock() - session.used_at

    def begin(self, client_name: str) -> Session[T]:
        """A new session. Raises LimitExceeded when there are too many."""
        if len(self._sessions) >= self._sessions_max:
            raise LimitExceeded(
                f"the daemon has {self._sessions_max} sessions, its most (limits.sessions_max)",
                remedy="Close sessions that are not needed, or raise limits.sessions_max.",
            )
        session = Session[T](
            session_id=self._new_id(self._sessions),
            client_name=client_name,
            used_at=self._clock(),
        )
        self._sessions[session.session_id] = session
        return session

    def session(self, session_id: int) -> Session[T]:
        """A live session, now used. Raises UnknownHandle."""
        session = self._sessions.get(session_id)
        if session is None:
            raise UnknownHandle(
                f"session {session_id} is not known to this daemon",
                remedy="It ended or the daemon restarted: open the namespace again with session 0.",
            )
        session.used_at = self._clock()
        return session

    def open_handle(self, session: Session[T], bound: T) -> Handle[T]:
        """The session's handle of `bound`, made if there is none yet. Raises LimitExceeded."""
        known = session.by_bound.get(bound)
        if known is not None:
            return known
        if len(session.handles) >= self._handles_max:
            self._set_aside(session)
        if len(session.handles) >= self._handles_max:
            raise LimitExceeded(
                f"the session has {self._handles_max} handles, the most of one session "
                "(limits.handles_per_session_max)",
                remedy="Close sessions that are done, or raise limits.handles_per_session_max.",
            )
        handle = Handle(
            handle_id=self._new_id(self._handles), session_id=session.session_id, bound=bound
        )
        session.handles[handle.handle_id] = handle
        session.by_bound[bound] = handle
        self._handles[handle.handle_id] = handle
        return handle

    def handle(self, handle_id: int) -> Handle[T]:
        """A live handle; its session is now used. Raises UnknownHandle."""
        handle = self._handles.get(handle_id)
        if handle is None:
            raise UnknownHandle(
                f"handle {handle_id} is not known to this daemon",
                remedy="Its session ended or the daemon restarted: open the namespace again.",
            )
        self._sessions[handle.session_id].used_at = self._clock()
        return handle

    @contextmanager
    def in_use(self, handle_id: int) -> Iterator[Handle[T]]:
        """A handle for the length of a call; its session does not run out meanwhile."""
        handle = self.handle(handle_id)
        session = self._sessions[handle.session_id]
        session.calls += 1
        try:
            yield handle
        finally:
            session.calls -= 1
            session.used_at = self._clock()

    def end(self, session_id: int, why: str) -> bool:
        """Ends a session; False when there is none."""
        session = self._sessions.pop(session_id, None)
        if session is None:
            return False
        for handle_id in (*session.handles, *session.ended):
            del self._handles[handle_id]
        self._on_end(session, why)
        return True

    def reap(self) -> int:
        """Ends every session that was idle for too long; how many."""
        limit = self._clock() - self._ttl_s
        idle = [
            session.session_id
            for session in self._sessions.values()
            if not session.calls and session.used_at <= limit
        ]
        for session_id in idle:
            self.end(session_id, "idle")
        return len(idle)

    def _set_aside(self, session: Session[T]) -> None:
        """Makes room: handles of what has ended don't count, and the oldest of them go, so that
        there are never more of them than of those that count.
        """
        for handle in [one for one in session.handles.values() if self._has_ended(one.bound)]:
            del session.handles[handle.handle_id]
            del session.by_bound[handle.bound]
            session.ended[handle.handle_id] = handle
        while len(session.ended) > self._handles_max:
            oldest = next(iter(session.ended))
            del session.ended[oldest]
            del self._handles[oldest]

    def end_all(self) -> None:
        for session_id in list(self._sessions):
            self.end(session_id, "stopped")

    @staticmethod
    def _new_id(taken: Container[int]) -> int:
        while True:
            number = secrets.randbelow(2**64 - 1) + 1
            if number not in taken:
                return number
