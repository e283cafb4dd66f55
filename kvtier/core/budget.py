"""A budget of bytes written over time: a token bucket, full at first.

It fills at the rate of the budget up to its capacity: what an hour brings, but at least 256 MiB, so
that a small budget is spent on whole pages, and at most what a day brings. So no stretch of time
has more than its share and one capacity on top: a day no more than 1 + 1/24 of the budget (twice
the budget, if that is under 256 MiB). A restart fills it again.

Pure: time is an argument (monotonic seconds). Not locked: one thread, or the caller's lock.
"""

from __future__ import annotations

__all__ = ["WriteBudget"]

_DAY_S = 86_400.0
_HOURS_A_DAY = 24
_CAPACITY_BYTES_MIN = 256 << 20


class WriteBudget:
    """`bytes_per_day` 0 is no limit."""

    def __init__(self, bytes_per_day: int, now: float) -> None:
        if bytes_per_day < 0:
            raise ValueError(f"bytes_per_day must not be negative, as {bytes_per_day} is")
        self.bytes_per_day = bytes_per_day
        hour = bytes_per_day // _HOURS_A_DAY
        self.capacity_bytes = min(bytes_per_day, max(hour, _CAPACITY_BYTES_MIN))
        self._left = float(self.capacity_bytes)
        self._filled_at = now

    def take(self, nbytes: int, now: float) -> bool:
        """Takes `nbytes` if they are there, which more than the capacity never are; else False."""
        assert nbytes >= 0
        if self.bytes_per_day == 0:
            return True
        if nbytes > self.left_bytes(now):
            return False
        self._left -= nbytes
        return True

    def left_bytes(self, now: float) -> int:
        """What `take` would give; 0 without a limit, too."""
        # A time before the last one brings nothing, and is not waited for again.
        gained = max(0.0, now - self._filled_at) * self.bytes_per_day / _DAY_S
        self._left = min(float(self.capacity_bytes), self._left + gained)
        self._filled_at = max(self._filled_at, now)
        return int(self._left)
