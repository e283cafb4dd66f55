"""What was put through a connection and is not known to be durable, until a flush accounts for it.

Any thread.
"""

from __future__ import annotations

from collections import Counter, deque
from contextlib import suppress
from typing import Final

__all__ = ["Unflushed"]

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
