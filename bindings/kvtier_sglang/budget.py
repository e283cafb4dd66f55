"""The seconds that a method has, over all the calls it makes. Usable from any thread."""

from __future__ import annotations

import time

__all__ = ["Budget"]


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
