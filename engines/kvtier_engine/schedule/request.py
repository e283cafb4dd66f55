"""What is asked of the engine and what it answers: values, checked when they are made.

Immutable, usable from any thread.
"""

from __future__ import annotations

import enum
import reprlib
from dataclasses import dataclass, field

from kvtier_engine.errors import InvalidRequest

__all__ = [
    "CachedTokens",
    "Completion",
    "Delta",
    "EndReason",
    "Request",
    "Sampling",
    "TokenLogprob",
]

STOPS_MAX = 4
LOGPROBS_MAX = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen. Raises InvalidRequest for values outside their range.

    `temperature` 0, or next to it, takes the likeliest. `top_k` 0 and `top_p` 1 leave nothing out.
    Equal `seed`s draw equal numbers; None draws anew. `max_tokens` None is as many as there is room
    for.
    `logprobs` is how many alternatives are reported beside the chosen token, None for none at all.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    ignore_end: bool = False

    def __post_init__(self) -> None:
        _in_range("temperature", self.temperature, 0.0, 100.0)
        _in_range("top_p", self.top_p, 1e-6, 1.0)
        _in_range("top_k", self.top_k, 0, 1 << 30)
        _in_range("max_tokens", 1 if self.max_tokens is None else self.max_tokens, 1, 1 << 30)
        _in_range("seed", self.seed or 0, -(1 << 63), (1 << 63) - 1)
        _in_range("logprobs", self.logprobs or 0, 0, LOGPROBS_MAX)
        if len(self.stop) > STOPS_MAX or not all(self.stop):
            raise InvalidRequest(
                f"stop is {reprlib.repr(self.stop)}",
                remedy=f"pass up to {STOPS_MAX} texts that are not empty",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt as token ids. `session` tells kvtier which conversation the pages belong to."""

    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    session: str = ""


class EndReason(enum.Enum):
    """The values are OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedTokens:
    """Prompt tokens that were not computed, by where their KV was found."""

    device: int = 0
    host: int = 0
    nvme: int = 0
    shared: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.nvme + self.shared


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Natural logarithms of probabilities, before temperature; `top` is (token, logprob) pairs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """One more token, and the text that became certain with it (often "")."""

    text: str
    token: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The end of a request that was served. `text` is all of it, without the stop text.

    `first_token_seconds` counts from `submit`.
    """

    text: str
    tokens: tuple[int, ...]
    reason: EndReason
    prompt_tokens: int
    cached: CachedTokens
    logprobs: tuple[TokenLogprob, ...] = ()
    first_token_seconds: float = 0.0
    preemptions: int = 0


def _in_range(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise InvalidRequest(f"{name} is {value!r}", remedy=f"pass a number in {low:g} .. {high:g}")
