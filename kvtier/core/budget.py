"""The write budget of a device, for its endurance: a token bucket.

Time is an argument (monotonic seconds). The caller's thread.
"""

from __future__ import annotations

__all__ = ["WriteBudget"]

_DAY_S = 86_400.0
_BURST_BYTES_MIN = 256 << 20


class WriteBudget:
    """`bytes_per_day` on average; 0 is no limit.

    At once it gives one hour's share, or 256 MiB if that is more.
    """

    def __init__(self, bytes_per_day: int, now: float) -> None:
        self._rate = bytes_per_day / _DAY_S
        self._capacity = max(bytes_per_day / 24, float(_BURST_BYTES_MIN))
        self._left = self._capacity
        self._at = now

    def take(self, nbytes: int, now: float) -> bool:
        """Whether so many bytes may be written now; they are counted then."""
        if not self._rate:
            return True
        self._left = min(self._capacity, self._left + (now - self._at) * self._rate)
        self._at = now
        if nbytes > self._left:
            return False
        self._left -= nbytes
        return True
