"""A clock that moves only when told, with the same face as `time.monotonic` and `time.sleep`.

Promise: callbacks run in order of their time, each at exactly its time; callbacks of the same time
run in an order drawn from the seed, so a test that depends on it fails for some seed. The same seed
gives the same run.

Thread rule: any thread may call anything. Callbacks run in the thread that moves the clock, one at
a time; a `sleep` moves it (there is no waiting for somebody else to).
"""

from __future__ import annotations

import heapq
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["SimClock", "Timer"]

_NS = 1_000_000_000


@dataclass(order=True, slots=True)
class Timer:
    """A callback to come. `cancel` may be called at any time."""

    at_ns: int
    tie: float
    number: int
    callback: Callable[[], object] = field(compare=False)
    is_cancelled: bool = field(default=False, compare=False)

    def cancel(self) -> None:
        self.is_cancelled = True


class SimClock:
    """Seconds as floats outside, whole nanoseconds inside, so that long runs do not drift."""

    def __init__(self, *, seed: int, start_s: float = 1000.0) -> None:
        self.seed = seed
        self._random = random.Random(seed)
        self._now_ns = round(start_s * _NS)
        self._timers: list[Timer] = []
        self._count = 0
        self._lock = threading.RLock()

    def monotonic(self) -> float:
        return self._now_ns / _NS

    def sleep(self, seconds: float) -> None:
        """Advance by `seconds`, as the only sleeper."""
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Move on by `seconds`; run all callbacks due on the way, also those that they add."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock does not go back: {seconds}")
        with self._lock:
            self._run_to(self._now_ns + round(seconds * _NS))

    def call_at(self, when_s: float, callback: Callable[[], object]) -> Timer:
        """Run `callback()` when the clock reads `when_s`; at the next move if that is past."""
        with self._lock:
            self._count += 1
            timer = Timer(round(when_s * _NS), self._random.random(), self._count, callback)
            heapq.heappush(self._timers, timer)
            return timer

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Timer:
        with self._lock:
            return self.call_at(self.monotonic() + delay_s, callback)

    def run_until_idle(self, limit_s: float = 3600.0) -> None:
        """Advance from callback to callback until none is left; TimeoutError past `limit_s`."""
        with self._lock:
            end_ns = self._now_ns + round(limit_s * _NS)
            while self.pending:
                if self._timers[0].at_ns > end_ns:
                    raise TimeoutError(
                        f"{self.pending} timers left after {limit_s} s (seed {self.seed})"
                    )
                self._run_to(max(self._now_ns, self._timers[0].at_ns))

    @property
    def pending(self) -> int:
        """How many callbacks are to come."""
        with self._lock:
            self._timers = [timer for timer in self._timers if not timer.is_cancelled]
            heapq.heapify(self._timers)
            return len(self._timers)

    def _run_to(self, end_ns: int) -> None:
        while self._timers and self._timers[0].at_ns <= end_ns:
            timer = heapq.heappop(self._timers)
            if timer.is_cancelled:
                continue
            self._now_ns = max(self._now_ns, timer.at_ns)
            timer.callback()
        # A callback may have slept beyond the end.
        self._now_ns = max(self._now_ns, end_ns)
