"""How far apart two sets of logits over the same tokens are. Pure functions of float32 tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

__all__ = ["Divergence", "Likelihood", "divergence", "likelihood"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Over `tokens` places. `kl` is in nats, of the changed distribution from the reference."""

    tokens: int
    kl_sum: float
    kl_max: float
    same_choice: int

    @property
    def kl_mean(self) -> float:
        return self.kl_sum / max(1, self.tokens)

    @property
    def agreement(self) -> float:
        """The part of the places where both prefer the same token."""
        return self.same_choice / max(1, self.tokens)

    @classmethod
    def of_all(cls, parts: Iterable[Divergence]) -> Divergence:
        every = list(parts)
        return cls(
            tokens=sum(part.tokens for part in every),
            kl_sum=math.fsum(part.kl_sum for part in every),
            kl_max=max((part.kl_max for part in every), default=0.0),
            same_choice=sum(part.same_choice for part in every),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Likelihood:
    """`nats` is the sum of -log p over `tokens` tokens."""

    tokens: int
    nats: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats / max(1, self.tokens))

    @classmethod
    def of_all(cls, parts: Iterable[Likelihood]) -> Likelihood:
        every = list(parts)
        return cls(
            tokens=sum(part.tokens for part in every), nats=math.fsum(part.nats for part in every)
        )


def divergence(reference: torch.Tensor, changed: torch.Tensor) -> Divergence:
    """KL(reference || changed) and how often both choose the same; both (tokens, vocab) logits."""
    expected = torch.log_softmax(reference.double(), dim=-1)
    actual = torch.log_softmax(changed.double(), dim=-1)
    # Rounding can make it a little less than 0.
    kl = (expected.exp() * (expected - actual)).sum(dim=-1).clamp_(min=0.0)
    return Divergence(
        tokens=len(kl),
        kl_sum=float(kl.sum()),
        kl_max=float(kl.max()) if len(kl) else 0.0,
        same_choice=int((reference.argmax(dim=-1) == changed.argmax(dim=-1)).sum()),
    )


def likelihood(logits: torch.Tensor, tokens: torch.Tensor) -> Likelihood:
    """Of `tokens` (n,), each given the logits (n, vocab) at its place."""
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    chosen = logprobs.gather(1, tokens[:, None])
    return Likelihood(tokens=len(tokens), nats=-float(chosen.sum()))
