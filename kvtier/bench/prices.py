"""What tokens and memory cost, from prices that somebody names. Pure functions.

A currency is never named: whatever the prices are in, the results are in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from kvtier.bench.capacity import split_tiers
from kvtier.bench.errors import BenchInput
from kvtier.bench.replay import SimTier

__all__ = ["TokenPrices", "memory_cost", "parse_memory_prices"]

_GIB: Final = 1 << 30
_PRICE_MAX: Final = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrices:
    """Of a million input tokens each: found in a cache, and computed."""

    cached: float
    uncached: float

    def __post_init__(self) -> None:
        for name, price in (("cached", self.cached), ("uncached", self.uncached)):
            if not _is_price(price):
                raise BenchInput(
                    f"the price of {name} tokens is {price:g}",
                    remedy="name what a million of them costs, 0 or more",
                )

    def per_million(self, hit_ratio: float) -> float:
        """Of a million input tokens of which this part is cached."""
        return hit_ratio * self.cached + (1 - hit_ratio) * self.uncached


def parse_memory_prices(text: str) -> dict[SimTier, float]:
    """`gpu=20,host=3,nvme=0.1`, each of a GiB. Raises BenchInput."""
    found: dict[SimTier, float] = {}
    for tier, amount in split_tiers(text).items():
        try:
            price = float(amount)
        except ValueError:
            price = math.nan
        if not _is_price(price):
            raise BenchInput(
                f"the price of {tier.value} is {amount[:40]!r}",
                remedy="write prices of a GiB as host=3,nvme=0.1",
            )
        found[tier] = price
    return found


def memory_cost(prices: dict[SimTier, float], sizes: dict[SimTier, int]) -> float:
    """Of these bytes; a tier without a price costs nothing."""
    return sum(prices.get(tier, 0.0) * size / _GIB for tier, size in sizes.items())


def _is_price(price: float) -> bool:
    return 0 <= price <= _PRICE_MAX
