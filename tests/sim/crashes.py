"""What would go unseen in a run, or never end it: errors that the daemon only logs, because nobody
waits for the task that had them, and loops without a way out."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from tests.sim.oracle import Broken

__all__ = ["CrashLog", "no_longer_than"]

_LOGGER = logging.getLogger("kvtier")


@contextmanager
def no_longer_than(cpu_s: float, seed: int) -> Iterator[None]:
    """Raises Broken in the middle of whatever takes so much time of the processor. Main thread."""

    def stop(_number: int, frame: FrameType | None) -> None:
        where = f"{frame.f_code.co_qualname}:{frame.f_lineno}" if frame is not None else "somewhere"
        raise Broken(f"seed {seed}: it goes round in circles in {where}")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


class CrashLog(logging.Handler):
    """Use as a context; `is_ending` while tasks are thrown away with their boot."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.is_ending = False
        self._found: list[tuple[str, BaseException]] = []

    def __enter__(self) -> CrashLog:
        _LOGGER.addHandler(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _LOGGER.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self._add(record.getMessage(), record.exc_info[1])

    def in_loop(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The exception handler of a loop."""
        error = context.get("exception")
        if isinstance(error, BaseException):
            self._add(str(context["message"]), error)

    def raise_first(self, seed: int) -> None:
        if self._found:
            what, error = self._found[0]
            raise Broken(f"seed {seed}: {what}: {error!r}") from error

    def _add(self, what: str, error: BaseException) -> None:
        if not self.is_ending:
            self._found.append((what, error))
