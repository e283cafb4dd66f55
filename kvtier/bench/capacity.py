"""Sizes of tiers as people write them: bytes, tokens or a part of the working set.

    gpu=30GiB,host=1.5TB,nvme=15TB      bytes, for a model whose bytes a token are known
    host=3Mtok                          tokens
    host=25%                            of the blocks that the trace has in all

Pure functions.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from kvtier.bench.errors import BenchInput
from kvtier.bench.replay import SimTier
from kvtier.bench.trace import Trace

__all__ = ["Sizes", "parse_amount", "parse_tiers", "split_tiers"]

_AMOUNT: Final = re.compile(r"(\d+(?:\.\d*)?(?:e\d+)?)\s*([a-zA-Z%]+)")
_POWERS: Final[dict[str, int]] = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
#: Of one tier; more than any trace has blocks.
_SLOTS_MAX: Final = 1 << 48
_GRAMMAR: Final = (
    "write tiers as gpu=30GiB,host=1.5TB,nvme=15TB: bytes (GiB, TB, ...), tokens (3Mtok) or a part "
    "of the working set (25%)"
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What amounts are counted in. `token_bytes` None: no model was named."""

    trace: Trace
    token_bytes: int | None

    def bytes_of(self, slots: int) -> int | None:
        if self.token_bytes is None:
            return None
        return slots * self.trace.block_tokens * self.token_bytes


def parse_tiers(text: str, sizes: Sizes) -> dict[SimTier, int]:
    """Slots of each tier, the fastest first. Raises BenchInput."""
    return {tier: parse_amount(amount, sizes) for tier, amount in split_tiers(text).items()}


def split_tiers(text: str) -> dict[SimTier, str]:
    """What is written for each tier, the fastest first. Raises BenchInput."""
    found: dict[SimTier, str] = {}
    for part in text.split(","):
        name, equals, amount = part.partition("=")
        try:
            tier = SimTier(name.strip())
        except ValueError:
            tiers = ", ".join(SimTier)
            raise BenchInput(f"tiers: {name!r} is none of {tiers}", remedy=_GRAMMAR) from None
        if not equals or tier in found:
            what = "is named twice" if tier in found else "has no size"
            raise BenchInput(f"tiers: {tier.value} {what}", remedy=_GRAMMAR)
        found[tier] = amount.strip()
    return {tier: found[tier] for tier in SimTier if tier in found}


def parse_amount(text: str, sizes: Sizes) -> int:
    """Whole slots of one block in this amount. Raises BenchInput."""
    match = _AMOUNT.fullmatch(text)
    if match is None:
        raise BenchInput(f"size {text!r} is no number with a unit", remedy=_GRAMMAR)
    number, unit = float(match[1]), match[2].lower()
    trace = sizes.trace
    if unit == "%":
        return _slots(text, trace.blocks_seen * number / 100, 1)
    if unit.endswith("tok") and unit[:-3] in _POWERS:
        return _slots(text, number * float(1000 ** _POWERS[unit[:-3]]), trace.block_tokens)
    kind = re.fullmatch(r"([kmgtp]?)(i?)b", unit)
    if kind is None or (kind[2] and not kind[1]):
        raise BenchInput(f"size {text!r} has an unknown unit {match[2]!r}", remedy=_GRAMMAR)
    if sizes.token_bytes is None:
        raise BenchInput(
            f"size {text!r} is in bytes, and no model says how many a token has",
            remedy="name one with --model or --bytes-per-token, or give tokens (3Mtok)",
        )
    total = number * float((1024 if kind[2] else 1000) ** _POWERS[kind[1]])
    return _slots(text, total, sizes.token_bytes * trace.block_tokens)


def _slots(text: str, total: float, each: int) -> int:
    """How many slots of `each` there are in all of it."""
    slots = round(total) // each if math.isfinite(total) else _SLOTS_MAX
    if slots >= _SLOTS_MAX:
        raise BenchInput(
            f"size {_short(text)} is more than {_SLOTS_MAX} blocks", remedy="name a smaller one"
        )
    return slots


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
