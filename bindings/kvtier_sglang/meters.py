"""What was moved since somebody last asked, for SGLang's metrics and our own.

Asked for at every step of the scheduler: taking is one exchange of objects. Usable from any thread.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

__all__ = ["Meter", "Moved"]

#: Kept when nobody asks.
_BATCHES_MAX = 1024


@dataclass(slots=True, kw_only=True)
class Moved:
    """`pages` has an entry for each batch that moved some, `bandwidths` (10**9 bytes a second) for
    each of which bytes were moved. `asked` is pages in all, `done` those of them that were got, or
    are in storage now; `already` were there before. `calls` and `late` ones, which used up their
    time.
    """

    pages: list[int] = field(default_factory=list)
    bandwidths: list[float] = field(default_factory=list)
    asked: int = 0
    done: int = 0
    already: int = 0
    calls: int = 0
    late: int = 0


class Meter:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._moved = Moved()

    def add(
        self, pages: int, nbytes: int, seconds: float, *, asked: int = 0, is_late: bool = False,
        already: int = 0,
    ) -> None:  # fmt: skip
        """One call that got or stored `pages` of the `asked`, and moved `nbytes` for it."""
        with self._lock:
            moved = self._moved
            moved.calls += 1
            moved.late += is_late
            moved.asked += asked
            moved.done += pages
            moved.already += already
            if pages and len(moved.pages) < _BATCHES_MAX:
                moved.pages.append(pages)
                if nbytes:
                    moved.bandwidths.append(nbytes / max(seconds, 1e-9) / 1e9)

    def take(self) -> Moved:
        with self._lock:
            moved, self._moved = self._moved, Moved()
        return moved
