"""What was moved since somebody last asked, for SGLang's own metrics.

Asked for at every step of the scheduler: taking is one exchange of lists. Usable from any thread.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

__all__ = ["Meter", "Moved"]

#: Kept when nobody asks.
_BATCHES_MAX = 1024


@dataclass(slots=True, kw_only=True)
class Moved:
    """One entry a batch: pages, and 10**9 bytes a second."""

    pages: list[int] = field(default_factory=list)
    bandwidths: list[float] = field(default_factory=list)


class Meter:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._moved = Moved()

    def add(self, pages: int, nbytes: int, seconds: float) -> None:
        with self._lock:
            if pages and len(self._moved.pages) < _BATCHES_MAX:
                self._moved.pages.append(pages)
                self._moved.bandwidths.append(nbytes / max(seconds, 1e-9) / 1e9)

    def take(self) -> Moved:
        with self._lock:
            moved, self._moved = self._moved, Moved()
        return moved
