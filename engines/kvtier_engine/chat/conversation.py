"""The conversation: lines in, answers out as they come, and after each where its prompt came from.

Promise: what the server does wrong ends one answer, never the conversation; Ctrl-C ends the answer
that is coming, or the conversation where none is. What the server says cannot steer the terminal.
One thread, the main one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

from kvtier.errors import KvtierError
from kvtier_engine.chat.client import Answer, Asking, ChatServer
from kvtier_engine.chat.harmless import harmless, whole

__all__ = ["Conversation"]

_HELP = "/reset forgets what was said, /quit ends; Ctrl-C stops an answer"
_TIERS = {"device": "the device", "host": "host memory", "nvme": "NVMe", "shared": "other hosts"}


class Conversation:
    """With one server. Answers go to `out`, errors to `errors`."""

    def __init__(self, server: ChatServer, asking: Asking, out: TextIO, errors: TextIO) -> None:
        self._server = server
        self._asking = asking
        self._out = out
        self._errors = errors
        self._messages: list[dict[str, str]] = []
        #: Answers that ended with an error.
        self.failures = 0

    def hold(self, lines: Iterable[str]) -> None:
        """Until the lines end, or one is /quit."""
        for line in lines:
            word = line.strip()
            if word == "/quit":
                return
            if word == "/reset":
                self._messages.clear()
                self._say("[forgotten]\n")
            elif word.startswith("/"):
                self._say(f"[{_HELP}]\n")
            elif word:
                self._turn(word)

    def _turn(self, said: str) -> None:
        self._messages.append({"role": "user", "content": whole(said)})
        told, timing = Answer(), _Timing(time.monotonic())
        try:
            text = self._spoken(told, timing)
        except KvtierError as error:
            # As if it had not been said: the next turn begins where this one did.
            self._messages.pop()
            self.failures += 1
            self._say("\n" if timing.pieces else "")
            self._errors.write(f"error: {error}\nremedy: {error.remedy}\n")
            self._errors.flush()
            return
        self._messages.append({"role": "assistant", "content": text})
        self._say(f"\n[{_account(told, timing)}]\n")

    def _spoken(self, told: Answer, timing: _Timing) -> str:
        """The answer, or as much of it as came before Ctrl-C. Raises KvtierError."""
        pieces: list[str] = []
        try:
            with contextlib.closing(
                self._server.answer(self._asking, self._messages, told)
            ) as coming:
                for piece in coming:
                    timing.note()
                    pieces.append(piece)
                    self._say(harmless(piece))
        except KeyboardInterrupt:
            told.reason = "stopped"
        timing.end()
        return whole("".join(pieces))  # it is sent again: half a character would be refused

    def _say(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


@dataclass(slots=True)
class _Timing:
    """Of one answer, by the monotonic clock."""

    begun: float
    first: float | None = None
    ended: float = 0.0
    pieces: int = 0

    def note(self) -> None:
        self.pieces += 1
        if self.first is None:
            self.first = time.monotonic()

    def end(self) -> None:
        self.ended = time.monotonic()


def _account(told: Answer, timing: _Timing) -> str:
    """Where the prompt came from, and how long it took."""
    parts = []
    if told.usage:
        parts.append(_origin(told.usage))
    if timing.first is not None:
        parts.append(f"first token after {timing.first - timing.begun:.2f} s")
    count = _number(told.usage, "completion_tokens") or timing.pieces
    parts.append(f"{count} tokens in {timing.ended - timing.begun:.2f} s")
    if told.reason in ("stopped", "length"):
        parts.append("stopped" if told.reason == "stopped" else "cut off (--max-tokens)")
    return "; ".join(parts)


def _origin(usage: Mapping[str, Any]) -> str:
    prompt = _number(usage, "prompt_tokens")
    details = usage.get("prompt_tokens_details")
    details = details if isinstance(details, dict) else {}
    by_tier = details.get("cached_tokens_by_tier")
    found = {}
    if isinstance(by_tier, dict):
        found = {name: _number(by_tier, tier) for tier, name in _TIERS.items()}
    elif cached := _number(details, "cached_tokens"):  # another server's
        found = {"a cache": cached}
    computed = prompt - sum(found.values())
    from_where = [f"{count} from {name}" for name, count in found.items() if count]
    return f"{prompt} prompt tokens: {', '.join([*from_where, f'{computed} computed'])}"


def _number(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    return value if isinstance(value, int) else 0
