"""What a tier may use of its slabs: they come as memory and files are made, and go with a device.

A part of the store, under the store's lock.
"""

from __future__ import annotations

import threading

import numpy as np

from kvtier.core.lifecycle import State
from kvtier.core.page import Tier
from kvtier.core.residents import Residents

__all__ = ["Room"]


class Room:
    def __init__(self, lock: threading.Lock, residents: Residents) -> None:
        self._lock = lock
        self._residents = residents

    def grant(self, tier: Tier, slab: int) -> None:
        """The slab may be used from now on."""
        with self._lock:
            self._residents.allocators[tier].grant(slab)
            self._residents.changes += 1

    def has_free(self, tier: Tier, record_bytes: int) -> bool:
        """A record of this size has room without anything giving way."""
        with self._lock:
            return self._residents.allocators[tier].has_free(record_bytes)

    def can_grant(self, tier: Tier, slab: int) -> bool:
        """The slab is not in use, and nothing in it is still named from when it was."""
        with self._lock:
            return self._residents.allocators[tier].can_grant(slab)

    def withdraw(self, tier: Tier, slab: int) -> int:
        """Takes the slab away with every page in it; how many. What a lease names is unfindable at
        once and keeps its slot until the lease ends."""
        with self._lock:
            residents = self._residents
            allocator, table = residents.allocators[tier], residents.table
            if not allocator.is_granted(slab):
                return 0
            allocator.withdraw(slab)
            low, high = allocator.slab_range(slab)
            slots = table.live("slot")
            inside = (table.live("tier") == tier) & (table.live("state") == State.SEALED)
            rows = np.flatnonzero(inside & (slots >= low) & (slots < high))
            residents.retire_many(rows)
            return len(rows)
