"""The eviction queues of a store: one for each size class of each tier. The caller holds the
store's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvtier.core.page import TIERS, Tier
from kvtier.core.policy.base import Policy
from kvtier.core.policy.forecasting import Forecasting
from kvtier.core.table import CopyTable

__all__ = ["Learned", "Queues"]

#: What a policy has learned, by tier and size class.
Learned = dict[tuple[Tier, int], bytes]


class Queues:
    def __init__(
        self, table: CopyTable, make_policy: Mapping[Tier, Callable[[CopyTable], Policy]]
    ) -> None:
        self._table = table
        self._make_policy = make_policy
        self._queues: dict[tuple[int, int], Policy] = {}
        #: For queues that are not there yet.
        self.learned: Learned = {}

    def of(self, tier: int, record_bytes: int) -> Policy:
        """That of one size class of one tier."""
        queue = self._queues.get((tier, record_bytes))  # one without pages may be false
        return self._make(TIERS[tier], record_bytes) if queue is None else queue

    def forecasting(self) -> dict[tuple[Tier, int], Forecasting]:
        """Those that learn."""
        return {
            (TIERS[tier], record_bytes): queue
            for (tier, record_bytes), queue in self._queues.items()
            if isinstance(queue, Forecasting)
        }

    def _make(self, tier: Tier, record_bytes: int) -> Policy:
        queue = self._queues[tier, record_bytes] = self._make_policy[tier](self._table)
        learned = self.learned.pop((tier, record_bytes), None)
        if learned is not None and isinstance(queue, Forecasting):
            queue.learn_from(learned)
        return queue
