"""The cheapest tiers that reach a hit ratio, by replaying a trace at one size after another.

For each choice of tiers the smallest size of a tier is found by halving, from the fastest tier to
the slowest, as if its hits never fell when it grows (with LRU in one tier that is so; otherwise it
comes close, and what is found may not be the smallest). Sizes of upper tiers above their smallest
are tried too as long as they alone cost less than the best so far: each half as large again as the
one before, then between those wherever one per cent can be saved, if lower tiers need no more
beside a larger upper one. Every size that is named was replayed. One thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from kvtier.bench.prices import memory_cost
from kvtier.bench.replay import SimTier

__all__ = ["Advice", "Choice", "Search", "Wish", "advise"]

#: A size is not taken for the smallest before one that is this much smaller was too small.
_NEAR: Final = 1.02
#: How much larger the next size of an upper tier is that is tried.
_STEP: Final = 1.5
#: What could be cheaper by a smaller factor is not looked for.
_CLOSE: Final = 1.01
_ROUNDING: Final = 1e-12

Slots = dict[SimTier, int]
#: Hit ratio of each tier, in the order of the tiers.
Measure = Callable[[Slots], dict[SimTier, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """`targets`: by tier, the hit ratio of it and the tiers above it. `prices`: a GiB of each tier
    that can be bought; `have`: slots of those that are there, for nothing. `least` and `most`:
    slots of one that is bought. `slot_bytes`: of one slot. `guess`: a size that comes close to a
    hit ratio in one tier, where that is known; the search begins there."""

    targets: dict[SimTier, float]
    prices: dict[SimTier, float]
    have: Slots
    least: Slots
    most: Slots
    slot_bytes: int
    guess: Callable[[float], int] | None = None

    def cost(self, slots: Slots) -> float:
        """Of what has to be bought."""
        sizes = {tier: n * self.slot_bytes for tier, n in slots.items() if tier not in self.have}
        return memory_cost(self.prices, sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """`hits`: hit ratio by tier."""

    slots: Slots
    hits: dict[SimTier, float]
    cost: float

    @property
    def hit_ratio(self) -> float:
        return math.fsum(self.hits.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """`choices`: the cheapest of each choice of tiers, the cheapest first; `best`: the most that
    any replay has reached."""

    choices: list[Choice]
    best: Choice | None
    replays: int


def advise(wish: Wish, measure: Measure) -> Advice:
    """Searches all choices of tiers; each has nvme only below host, as the daemon has."""
    search = Search(wish, measure)
    found: list[Choice] = []
    for tiers in _tier_sets(wish):
        choice = search.cheapest(tiers, {})
        if choice is not None:
            found.append(choice)
    found.sort(key=lambda choice: choice.cost)
    return Advice(choices=found, best=search.best, replays=search.replays)


def _tier_sets(wish: Wish) -> Iterator[tuple[SimTier, ...]]:
    """From the simplest: all that is there, with some of what can be bought."""
    bought = [tier for tier in SimTier if tier in wish.prices and tier not in wish.have]
    for number in range(1 << len(bought)):
        chosen = {tier for bit, tier in enumerate(bought) if number >> bit & 1} | wish.have.keys()
        if chosen and not (SimTier.NVME in chosen and SimTier.HOST not in chosen):
            yield tuple(tier for tier in SimTier if tier in chosen)


class Search:
    """Remembers what was replayed."""

    def __init__(self, wish: Wish, measure: Measure) -> None:
        self._wish = wish
        self._measure = measure
        self._known: dict[tuple[tuple[SimTier, int], ...], Choice] = {}
        self.best: Choice | None = None

    @property
    def replays(self) -> int:
        return len(self._known)

    def cheapest(self, tiers: tuple[SimTier, ...], above: Slots) -> Choice | None:
        """The cheapest sizes of `tiers` below these that reach all targets; None: there are
        none."""
        tier, rest = tiers[0], tiers[1:]
        size = self._smallest(tier, above, is_last=not rest)
        if size is None:
            return None
        if not rest:
            return self._at({**above, tier: size})
        limit = math.inf
        found: dict[int, Choice | None] = {}
        for upper in self._sizes(tier, size):
            slots = {**above, tier: upper}
            found[upper] = below = self.cheapest(rest, slots)
            if below is not None:
                limit = min(limit, below.cost)
            if self._wish.cost(slots) >= limit:
                break
        self._refine(tiers, above, found)
        return min((one for one in found.values() if one), key=lambda one: one.cost, default=None)

    def _sizes(self, tier: SimTier, size: int) -> Iterator[int]:
        """Those of an upper tier to try."""
        yield size
        if tier in self._wish.have:
            return
        while size < self._wish.most[tier]:
            size = min(self._wish.most[tier], max(size + 1, int(size * _STEP)))
            yield size

    def _refine(
        self, tiers: tuple[SimTier, ...], above: Slots, found: dict[int, Choice | None]
    ) -> None:
        """Tries sizes of the first of `tiers` between those tried, wherever a cheaper choice can
        be: one between two sizes costs at least the smaller one, with what the tiers below need
        beside the larger one."""
        tier, rest = tiers[0], tiers[1:]
        while True:
            costs = [one.cost for one in found.values() if one is not None]
            gaps = []
            for low, high in pairwise(sorted(found)):
                above_it = found[high]
                if above_it is not None and high > max(low + 1, int(low * _NEAR)):
                    least = self._wish.cost({**above_it.slots, tier: low + 1})
                    gaps.append((least, low, high))
            if not gaps or min(gaps)[0] >= min(costs) / _CLOSE:
                return
            _, low, high = min(gaps)
            middle = min(high - 1, max(low + 1, round(math.sqrt(max(1, low) * high))))
            found[middle] = self.cheapest(rest, {**above, tier: middle})

    def _smallest(self, tier: SimTier, above: Slots, *, is_last: bool) -> int | None:
        """The smallest size of a tier that reaches its targets; None: the largest does not."""
        wish = self._wish
        if tier in wish.have:
            fits = self._reaches(above, tier, wish.have[tier], is_last=is_last)
            return wish.have[tier] if fits else None
        low, high = wish.least[tier], wish.most[tier]
        if low > high or not self._reaches(above, tier, high, is_last=is_last):
            return None
        if self._reaches(above, tier, low, is_last=is_last):
            return low
        # From here on `low` is too small, and `high` large enough.
        for near in self._near(tier, is_last=is_last):
            if low < near < high:
                if self._reaches(above, tier, near, is_last=is_last):
                    high = near
                else:
                    low = near
        while high > max(low + 1, int(low * _NEAR)):
            middle = min(high - 1, max(low + 1, round(math.sqrt(max(1, low) * high))))
            if self._reaches(above, tier, middle, is_last=is_last):
                high = middle
            else:
                low = middle
        return high

    def _near(self, tier: SimTier, *, is_last: bool) -> Iterator[int]:
        """Sizes to try first."""
        asked = self._asked(tier, is_last=is_last)
        if self._wish.guess is not None and asked:
            size = self._wish.guess(max(self._wish.targets[at] for at in asked))
            yield from (size, int(size / _NEAR), math.ceil(size * _NEAR))

    def _asked(self, tier: SimTier, *, is_last: bool) -> list[SimTier]:
        """What is asked of the tiers up to this one."""
        return [at for at in self._wish.targets if is_last or _order(at) <= _order(tier)]

    def _reaches(self, above: Slots, tier: SimTier, size: int, *, is_last: bool) -> bool:
        targets, asked = self._wish.targets, self._asked(tier, is_last=is_last)
        if not asked:
            return True
        choice = self._at({**above, tier: size})
        return all(
            math.fsum(hits for one, hits in choice.hits.items() if _order(one) <= _order(at))
            >= targets[at] - _ROUNDING
            for at in asked
        )

    def _at(self, slots: Slots) -> Choice:
        key = tuple(slots.items())
        found = self._known.get(key)
        if found is None:
            found = Choice(slots=slots, hits=self._measure(slots), cost=self._wish.cost(slots))
            self._known[key] = found
            if self.best is None or found.hit_ratio > self.best.hit_ratio:
                self.best = found
        return found


def _order(tier: SimTier) -> int:
    return list(SimTier).index(tier)
