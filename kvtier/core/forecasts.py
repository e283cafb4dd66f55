"""What the policies that learn are told beside uses, and what they have learned.

A part of the store, under its lock. Every public method is safe from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Mapping
from typing import Final

from kvtier.core.page import Tier
from kvtier.core.policy.lru import Clock
from kvtier.core.queues import Learned
from kvtier.core.residents import Residents

__all__ = ["CLASSES_MAX", "Forecasts"]

#: Size classes whose models are kept.
CLASSES_MAX: Final = 64


class Forecasts:
    def __init__(
        self,
        lock: threading.Lock,
        residents: Residents,
        open_namespaces: Container[int],
        clock: Clock,
    ) -> None:
        self._lock = lock
        self._residents = residents
        self._open_namespaces = open_namespaces
        self._clock = clock

    def tell_time(self, now: float) -> None:
        """Monotonic seconds; what happens until the next call happens now."""
        with self._lock:
            self._clock.tell(now)

    def hint(self, namespace: int, key: bytes, returns_after_s: float, *, now: float) -> bool:
        """Somebody says when the conversation comes back that this page was the last one of;
        negative: it has ended. False: no policy here heeds that, or none has heard of the page."""
        with self._lock:
            if namespace not in self._open_namespaces:
                return False
            self._clock.tell(now)
            heard = [
                queue.hint(namespace, key, returns_after_s)
                for queue in self._residents.queues.forecasting().values()
            ]
            return any(heard)

    def take(self) -> Learned:
        """What was learned, by tier and size class: of CLASSES_MAX of these at most."""
        with self._lock:
            found = {
                key: policy.learned()
                for key, policy in self._residents.queues.forecasting().items()
            }
            found = {**self._residents.queues.learned, **found}
            return dict(list(found.items())[-CLASSES_MAX:])

    def put_back(self, learned: Mapping[tuple[Tier, int], bytes]) -> None:
        """What `take` gave an earlier store, before any page is here. Policies can take it."""
        with self._lock:
            self._residents.queues.learned.update(learned)
