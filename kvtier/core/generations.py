"""Allocation numbers: one 64-bit counter a daemon directory, never reused, also not after a crash.

Numbers are used only below a bound that was journalled before, in blocks of 2**20; a restart begins
at the journalled bound. A crash can skip numbers and can not repeat one. The caller holds the
store's lock.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["BLOCK", "Generations"]

BLOCK = 1 << 20


class Generations:
    """Counts up from `start`. `journal(bound)` must have made `bound` durable when it returns."""

    def __init__(self, start: int, journal: Callable[[int], None]) -> None:
        if start < 0:
            raise ValueError(f"a generation counter cannot start at {start}")
        self._last = start
        self._bound = start
        self._journal = journal

    @property
    def last(self) -> int:
        """The number handed out last."""
        return self._last

    def next(self, count: int = 1) -> int:
        """The first of `count` numbers in a row, higher than every number before. Errors of
        `journal` pass through, nothing used."""
        if self._last + count > self._bound:
            bound = self._last + count - 1 + BLOCK
            self._journal(bound)
            self._bound = bound
        self._last += count
        return self._last - count + 1
