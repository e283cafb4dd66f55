"""One point in monotonic time that everything inside a call shares.

A deadline is made once, where the call begins, and passed down; nothing below makes a new one, so
retries, split calls and reopening cannot add up. Immutable: usable from any thread.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from kvtier.errors import DeadlineExceeded

__all__ = ["DEADLINE_S_MAX", "Deadline", "OwnDelay"]

#: No call waits longer, whatever it asks for: an engine must never hang on its cache.
DEADLINE_S_MAX: Final = 60.0


class OwnDelay(Exception):
    """The cause of a DeadlineExceeded when the time went by on this side: that says nothing of
    whether the daemon answers.
    """


@dataclass(frozen=True, slots=True)
class Deadline:
    """`at` is in seconds of time.monotonic()."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """The moment `seconds` from now, DEADLINE_S_MAX at most."""
        return cls(time.monotonic() + min(seconds, DEADLINE_S_MAX))

    @property
    def has_passed(self) -> bool:
        return time.monotonic() >= self.at

    def remaining(self) -> float:
        """Seconds that are left. Raises DeadlineExceeded when there are none."""
        left = self.at - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(
                "the deadline of the call has passed",
                remedy="compute the page; raise `deadline` if this happens often",
            ) from OwnDelay()
        return left
