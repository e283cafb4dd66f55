"""A bar on standard error with rate and remaining time, when that is a terminal. One thread."""

from __future__ import annotations

import sys
import time
from typing import TextIO

__all__ = ["ProgressBar"]

_WIDTH = 24
_PERIOD_S = 0.2


class ProgressBar:
    """`total` steps of something; `at` is called with how many are done."""

    def __init__(self, what: str, total: int, *, unit: str, out: TextIO | None = None) -> None:
        self._out = sys.stderr if out is None else out
        self._what, self._total, self._unit = what, max(1, total), unit
        self._is_shown = self._out.isatty()
        self._start = time.monotonic()
        self._next = self._start

    def at(self, done: int) -> None:
        if not self._is_shown:
            return
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _PERIOD_S
        part = min(1.0, done / self._total)
        rate = done / max(1e-9, now - self._start)
        left = (self._total - done) / rate if rate > 0 else 0.0
        bar = "#" * int(part * _WIDTH)
        self._out.write(
            f"\r{self._what} [{bar:<{_WIDTH}}] {100 * part:3.0f} % "
            f"{rate:,.0f} {self._unit}/s, {left:.0f} s left\x1b[K"
        )
        self._out.flush()

    def end(self) -> None:
        """Leaves the line empty."""
        if self._is_shown:
            self._out.write("\r\x1b[K")
            self._out.flush()
