"""From logits to tokens: greedy, temperature, top-k, top-p, one generator a request.

A row's choice depends on that row and its request's generator alone, never on who shares the batch.
One thread.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from kvtier_engine.schedule.request import Sampling, TokenLogprob

__all__ = ["TEMPERATURE_MIN", "Chooser", "choose"]

log = logging.getLogger(__name__)

#: Below it the likeliest token is taken: all others have, in float32, next to no probability.
TEMPERATURE_MIN: Final = 1e-5


class Chooser:
    """The random state of one request."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def draw(self, logits: torch.Tensor) -> int:
        """A token from one row of float32 logits (vocab,) at this request's temperature, which is
        TEMPERATURE_MIN or more.
        """
        sampling = self.sampling
        logits = logits.cpu()
        # The greatest becomes 0: dividing makes nothing overflow that counts.
        logits = (logits - logits.max()) / sampling.temperature
        if 0 < sampling.top_k < len(logits):
            least = logits.topk(sampling.top_k).values[-1]
            logits = logits.masked_fill(logits < least, float("-inf"))
        probabilities = torch.softmax(logits, dim=-1)
        if sampling.top_p < 1.0:
            probabilities = _nucleus(probabilities, sampling.top_p)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """`token` is None where the logits are no numbers (NaN or infinite), or give no choice."""

    token: int | None
    logprob: TokenLogprob | None = None


def choose(logits: torch.Tensor, choosers: Sequence[Chooser]) -> list[Choice]:
    """One choice for each row of `logits` (rows, vocab) in float32."""
    likeliest: list[int] = logits.argmax(dim=-1).tolist()
    # A NaN anywhere in a row, or an infinity, makes this sum no number.
    finite: list[bool] = torch.isfinite(logits.sum(dim=-1)).tolist()
    chosen = []
    for row, chooser in enumerate(choosers):
        if not finite[row]:
            chosen.append(Choice(token=None))
            continue
        try:
            greedy = chooser.sampling.temperature < TEMPERATURE_MIN
            token = likeliest[row] if greedy else chooser.draw(logits[row])
            logprob = _logprob(logits[row], token, chooser.sampling)
        except RuntimeError:  # what torch raises: of this row alone
            log.exception("engine.choice_failed")
            chosen.append(Choice(token=None))
        else:
            chosen.append(Choice(token=token, logprob=logprob))
    return chosen


def _logprob(logits: torch.Tensor, token: int, sampling: Sampling) -> TokenLogprob | None:
    if sampling.logprobs is None:
        return None
    logprobs = torch.log_softmax(logits, dim=-1)
    values, ids = logprobs.topk(sampling.logprobs)
    return TokenLogprob(
        token=token,
        logprob=float(logprobs[token]),
        top=tuple(zip(ids.tolist(), values.tolist(), strict=True)),
    )


def _nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Zero but for the likeliest tokens that together reach `top_p`; at least one is left."""
    ordered, ids = probabilities.sort(descending=True)
    before = ordered.cumsum(dim=-1) - ordered
    ordered = ordered.masked_fill(before >= top_p, 0.0)
    return torch.zeros_like(probabilities).scatter_(0, ids, ordered)
