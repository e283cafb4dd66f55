"""The side pools of a model as SGLang asks for them: several at once, next to the primary pool.

Promise: a prefix counts as there when every pool asked for can restore it, and only what was asked
and found in time does. Each pool is a store of its own; their calls share the time of the method. A
pool that is not known, or is asked for something that makes no sense, is a miss.

SGLang registers pools in the scheduler's thread; any thread may do the rest.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier import LayoutError
from kvtier.client import Connection
from kvtier_sglang.budget import Budget
from kvtier_sglang.options import Options
from kvtier_sglang.pools import page_places
from kvtier_sglang.prefixes import HitRule, restorable
from kvtier_sglang.side_pools import SidePool
from kvtier_sglang.store import PageStore

__all__ = ["PrefixHits", "SidePools"]

log = logging.getLogger(__name__)

_Move = Callable[[PageStore, Sequence[str], Sequence[int]], list[bool]]
_RULES = {rule.value: rule for rule in HitRule}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixHits:
    """`lengths` are the prefixes that can be restored, in pages, ascending. `by_pool` has the
    longest that each pool by itself can restore, where there is one.
    """

    lengths: list[int]
    by_pool: dict[Any, int]

    @property
    def longest(self) -> int:
        return self.lengths[-1] if self.lengths else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    store: PageStore
    page_slots: int


class SidePools:
    """`transfers` below are SGLang's PoolTransfer: `name`, `keys`, `host_indices`, `hit_policy`."""

    def __init__(self, connection: Connection, options: Options) -> None:
        self._connection = connection
        self._options = options
        #: Replaced as a whole, so that a call looks once.
        self._sides: Mapping[str, _Side] = {}

    @property
    def stores(self) -> list[PageStore]:
        return [side.store for side in self._sides.values()]

    def add(self, pool: SidePool) -> PageStore:
        """Raises LayoutError, NamespaceMismatch."""
        store = PageStore(self._connection, pool.parts, pool.rows, self._options)
        side = _Side(store=store, page_slots=pool.page_slots)
        self._sides = {**self._sides, pool.name: side}
        return store

    def drop(self) -> None:
        self._sides = {}

    def exists(
        self, primary: PageStore, keys: Sequence[str], transfers: Sequence[Any]
    ) -> PrefixHits:
        """What can be restored of the pages `keys`."""
        budget = Budget(self._options.exists_deadline)
        count = primary.exists(keys, budget)
        lengths = list(range(1, count + 1))
        by_pool: dict[Any, int] = {"kv": count} if count else {}
        for transfer in transfers:
            if not lengths:
                break
            own = self._restorable(transfer, keys[:count], budget)
            if own:
                by_pool[transfer.name] = own[-1]
            lengths = sorted(set(own).intersection(lengths))
        return PrefixHits(lengths=lengths, by_pool=by_pool)

    def get(self, transfers: Sequence[Any]) -> dict[Any, list[bool]]:
        """Pages to their slots, of each pool the first ones up to a miss."""
        budget = Budget(self._options.get_deadline)

        def got(store: PageStore, keys: Sequence[str], places: Sequence[int]) -> list[bool]:
            return store.get(keys, places, budget)

        return {transfer.name: self._moved(transfer, got) for transfer in transfers}

    def set(self, transfers: Sequence[Any], before: Sequence[str] = ()) -> dict[Any, list[bool]]:
        """Stores pages from their slots. `before` are the prompt's pages before the first of each
        transfer.
        """
        budget = Budget(self._options.set_deadline)

        def put(store: PageStore, keys: Sequence[str], places: Sequence[int]) -> list[bool]:
            return store.set(keys, places, before, budget)

        return {transfer.name: self._moved(transfer, put) for transfer in transfers}

    def _restorable(self, transfer: Any, keys: Sequence[str], budget: Budget) -> list[int]:
        side = self._sides.get(str(transfer.name))
        policy = getattr(transfer.hit_policy, "value", transfer.hit_policy)
        rule = _RULES.get(str(policy))
        if side is None or rule is None:
            log.warning("kvtier: pool %s with policy %s counts as absent", transfer.name, policy)
            return []
        if rule is HitRule.ALL_PAGES:
            return list(range(1, side.store.exists(keys, budget) + 1))
        return restorable(side.store.present(keys, budget), rule, len(transfer.keys or ()))

    def _moved(self, transfer: Any, move: _Move) -> list[bool]:
        side, keys = self._sides.get(str(transfer.name)), transfer.keys or ()
        if side is None or transfer.host_indices is None:
            log.warning("kvtier: pool %s is not known, or without slots", transfer.name)
            return [False] * len(keys)
        try:
            places = page_places(transfer.host_indices, side.page_slots, len(keys))
        except LayoutError as error:
            log.warning("kvtier: pool %s: %s", transfer.name, str(error))
            return [False] * len(keys)
        return move(side.store, keys, places)
