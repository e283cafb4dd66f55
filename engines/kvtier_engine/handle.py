"""What the one who asked holds: the answer as it comes, or all of it, or why there is none.

Safe from any thread; one reader of `deltas` or `result`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

from kvtier.errors import DeadlineExceeded, KvtierError
from kvtier_engine.errors import InvalidRequest
from kvtier_engine.guard import attempted
from kvtier_engine.schedule.request import Completion, Delta

__all__ = ["Handle", "Outcome", "Sink"]

#: Deltas come first, then one end.
Outcome = Delta | Completion | KvtierError
Sink = Callable[[Outcome], None]


class Handle:
    """Made by `Engine.submit`. With a sink, outcomes go there, in the engine's thread."""

    def __init__(self, number: int, sink: Sink | None) -> None:
        self.number = number
        self.has_sink = sink is not None
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._sink: Sink = sink or self._outcomes.put
        #: Of an engine that hangs the one who closes it tells the end, too.
        self._lock = threading.Lock()
        self._end: Completion | KvtierError | None = None
        self._is_deaf = False

    def tell(self, outcome: Outcome) -> None:
        """For the engine. The first end counts, and is the last that is told. A sink that raises is
        told the end alone from then on; its error is logged.
        """
        with self._lock:
            if self._end is not None:
                return
            if not isinstance(outcome, Delta):
                self._end = outcome
            elif self._is_deaf:
                return
        told = attempted(lambda: self._sink(outcome), "sink")
        self._is_deaf |= isinstance(told, Exception)

    @property
    def end(self) -> Completion | KvtierError | None:
        """How it ended, None while it goes on."""
        return self._end

    def deltas(self, timeout_seconds: float | None = None) -> Iterator[Delta]:
        """Token by token, until the last; none of those that were taken before. Raises the
        request's error, DeadlineExceeded when nothing comes for `timeout_seconds`, and
        InvalidRequest where all of it goes to a sink.
        """
        while not isinstance(outcome := self._next(timeout_seconds), Completion):
            if isinstance(outcome, KvtierError):
                raise outcome
            yield outcome

    def result(self, timeout_seconds: float | None = None) -> Completion:
        """The whole answer; deltas that nobody took are skipped. Raises as `deltas`."""
        if self._end is None:
            for _ in self.deltas(timeout_seconds):
                pass
        if isinstance(self._end, KvtierError):
            raise self._end
        assert self._end is not None, "deltas ended without an end"
        return self._end

    def _next(self, timeout_seconds: float | None) -> Outcome:
        # The end is known before it is in the queue, and by then all that came before it is.
        if self._end is not None and self._outcomes.empty():
            return self._end
        if self.has_sink:
            raise InvalidRequest(
                "what comes of this request goes to its sink", remedy="submit it without one"
            )
        try:
            return self._outcomes.get(timeout=timeout_seconds)
        except queue.Empty:
            raise DeadlineExceeded(
                f"no token in {timeout_seconds} s", remedy="wait longer, or cancel the request"
            ) from None
