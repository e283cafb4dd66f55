"""When sessions begin, for traces that hold times inside a session only.

Starts are drawn evenly over some hours, and idle gaps are clipped. This model is part of every
result, so it is written beside it. The same seed gives the same starts on every machine.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["Arrivals", "SessionClock"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    hours: float = 8.0
    gap_max_s: float = 3600.0
    seed: int = 1

    def __str__(self) -> str:
        return (
            f"session starts drawn over {self.hours:g} h (seed {self.seed}), "
            f"idle gaps clipped to {self.gap_max_s:g} s"
        )


class SessionClock:
    """Times of one session after another."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._random = random.Random(arrivals.seed)
        self._start = self._last = self._passed = 0.0

    def begin(self, first_s: float) -> None:
        """A session begins whose own time of its first request is this."""
        self._start = self._random.uniform(0, self._arrivals.hours * 3600)
        self._last, self._passed = first_s, 0.0

    def at(self, own_s: float) -> float:
        """The arrival of the next request, from the session's own time of it."""
        self._passed += min(max(0.0, own_s - self._last), self._arrivals.gap_max_s)
        self._last = own_s
        return self._start + self._passed
