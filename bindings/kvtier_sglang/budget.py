"""The seconds that a method has, over all the calls it makes. Usable from any thread."""

from __future__ import annotations

import time
from typing import Final

__all__ = ["Budget"]

#: What a call that begins is given at least: with less even a daemon that is well could not answer.
_LEAST_S: Final = 0.01


class Budget:
    def __init__(self, seconds: float) -> None:
        self.began = time.monotonic()
        self._ends = self.began + seconds

    @property
    def left(self) -> float:
        return self._ends - time.monotonic()

    @property
    def spent(self) -> float:
        return time.monotonic() - self.began

    def at_most(self, seconds: float) -> float:
        """For one of the calls, what is left if that is less."""
        return max(_LEAST_S, min(seconds, self.left))
