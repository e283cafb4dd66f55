"""The text of one request as it grows: whole characters, stop texts, and when it is at its end.

Text that may be the beginning of a stop text is held back until it is not. One thread.
"""

from __future__ import annotations

from collections.abc import Collection

from kvtier_engine.model.tokens import TextStream
from kvtier_engine.schedule.request import EndReason, Sampling

__all__ = ["Output"]


class Output:
    """Takes the chosen tokens of one request. `tokens_max` is how many there is room for."""

    def __init__(
        self, stream: TextStream, sampling: Sampling, end_ids: Collection[int], tokens_max: int
    ) -> None:
        self._stream = stream
        self._stops = sampling.stop
        self._end_ids = frozenset() if sampling.ignore_end else frozenset(end_ids)
        self._tokens_max = tokens_max
        self._held = ""
        self.text = ""
        self.tokens: list[int] = []
        self.reason: EndReason | None = None

    def add(self, token: int) -> str:
        """The text that is certain now; `reason` is set when this was the last token."""
        self.tokens.append(token)
        if token in self._end_ids:
            self.reason = EndReason.STOP
            return self._let_go(self._held)
        self._held += self._stream.add(token)
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.reason = EndReason.STOP
            return self._let_go(self._held[: min(found)])
        if len(self.tokens) >= self._tokens_max:
            self.reason = EndReason.LENGTH
            return self._let_go(self._held)
        return self._let_go(self._held[: len(self._held) - self._maybe_stop()])

    def _let_go(self, text: str) -> str:
        self._held = self._held[len(text) :]
        self.text += text
        return text

    def _maybe_stop(self) -> int:
        """Characters at the end of what is held that may begin a stop text."""
        longest = 0
        for stop in self._stops:
            for count in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:count]):
                    longest = count
                    break
        return longest
