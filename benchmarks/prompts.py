"""Random prompts, the same for everybody who decodes them. The standard library alone: engines in
environments of their own import it. Pure functions.
"""

from __future__ import annotations

import random

__all__ = ["PROMPT_TOKENS", "random_prompts"]

PROMPT_TOKENS = 32


def random_prompts(
    vocabulary: int, batch: int, seed: int, prompt_tokens: int = PROMPT_TOKENS
) -> list[list[int]]:
    """All of one length, so that nobody pads; without the special tokens below 100."""
    draw = random.Random(seed)
    return [[draw.randrange(100, vocabulary) for _ in range(prompt_tokens)] for _ in range(batch)]
