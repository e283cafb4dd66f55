"""Slots of one tier: slabs bound on demand to a size class, cut into slots of exactly that size.

A class is a record size, so a page wastes nothing; only the tail of a slab that no slot fits into
is lost. Slots are named by their offset in units of 4 KiB, whatever their class. A slab is used
only after `grant`; an empty one can be bound to another class. Pure bookkeeping: the bytes are
elsewhere. The caller holds the store's lock.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

__all__ = ["SLOT_UNIT", "SlabAllocator", "SlabCounts"]

SLOT_UNIT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabCounts:
    """Bytes of a tier by what the allocator did with them; they add up to the capacity."""

    ungranted: int
    unbound: int
    used: int
    free: int
    tails: int


class _SizeClass:
    """Free slots of one record size: those given back, then the fresh ones of the slab cut last."""

    __slots__ = ("fresh_at", "fresh_end", "given_back", "record_bytes", "slabs")

    def __init__(self, record_bytes: int) -> None:
        self.record_bytes = record_bytes
        self.given_back = array("Q")
        self.fresh_at = 0
        self.fresh_end = 0
        self.slabs: set[int] = set()


class SlabAllocator:
    """`capacity_bytes` cut into slabs of `slab_bytes`; a rest smaller than a slab is not used."""

    def __init__(self, *, capacity_bytes: int, slab_bytes: int) -> None:
        if slab_bytes <= 0 or slab_bytes % SLOT_UNIT:
            raise ValueError(f"slab_bytes must be a positive multiple of {SLOT_UNIT}")
        self.slab_bytes = slab_bytes
        self.slabs = capacity_bytes // slab_bytes
        if not self.slabs:
            raise ValueError(f"{capacity_bytes} bytes do not hold one slab of {slab_bytes}")
        self._units = slab_bytes // SLOT_UNIT
        self._class_of: list[int] = [0] * self.slabs  # record bytes, 0: unbound
        self._used: list[int] = [0] * self.slabs
        self._granted: list[bool] = [False] * self.slabs
        self._unbound: list[int] = []
        self._classes: dict[int, _SizeClass] = {}
        self.granted = 0

    @property
    def capacity_bytes(self) -> int:
        return self.slabs * self.slab_bytes

    def grant(self, slab: int) -> None:
        """From now on the slab may be used."""
        assert not self._granted[slab]
        self._granted[slab] = True
        self._unbound.append(slab)
        self.granted += 1

    def reserve(self, record_bytes: int) -> int | None:
        """A free slot of this size, binding an unbound or empty slab when there is none; None: no
        room."""
        assert 0 < record_bytes <= self.slab_bytes
        assert record_bytes % SLOT_UNIT == 0
        size = self._classes.get(record_bytes)
        if size is None:
            size = self._classes[record_bytes] = _SizeClass(record_bytes)
        slot = self._pop(size)
        if slot is None and self._bind(size):
            slot = self._pop(size)
        if slot is not None:
            self._used[self.slab_of(slot)] += 1
        return slot

    def free(self, slot: int) -> None:
        """Takes a slot back."""
        slab = self.slab_of(slot)
        assert self._used[slab] > 0
        self._used[slab] -= 1
        self._classes[self._class_of[slab]].given_back.append(slot)

    def slab_of(self, slot: int) -> int:
        return slot // self._units

    def slab_range(self, slab: int) -> tuple[int, int]:
        """First slot unit of a slab and the first one after it."""
        return slab * self._units, (slab + 1) * self._units

    def bound_slabs(self, record_bytes: int) -> list[int]:
        """Slabs that serve this record size."""
        size = self._classes.get(record_bytes)
        return sorted(size.slabs) if size else []

    def classes(self) -> list[int]:
        """Record sizes that have at least one slab."""
        return [record_bytes for record_bytes, size in self._classes.items() if size.slabs]

    def counts(self) -> SlabCounts:
        """Computed from the slots themselves, so that it can be held against the ledger."""
        ungranted = (self.slabs - self.granted) * self.slab_bytes
        used = free = tails = 0
        for record_bytes, size in self._classes.items():
            slots_used = sum(self._used[slab] for slab in size.slabs)
            fresh = (size.fresh_end - size.fresh_at) * SLOT_UNIT // record_bytes
            slots_free = len(size.given_back) + fresh
            used += slots_used * record_bytes
            free += slots_free * record_bytes
            tails += len(size.slabs) * (self.slab_bytes % record_bytes)
        unbound = len(self._unbound) * self.slab_bytes
        return SlabCounts(ungranted=ungranted, unbound=unbound, used=used, free=free, tails=tails)

    def _pop(self, size: _SizeClass) -> int | None:
        if size.given_back:
            return size.given_back.pop()
        if size.fresh_at < size.fresh_end:
            slot = size.fresh_at
            size.fresh_at += size.record_bytes // SLOT_UNIT
            return slot
        return None

    def _bind(self, size: _SizeClass) -> bool:
        slab = self._unbound.pop() if self._unbound else self._unbind_empty(size)
        if slab is None:
            return False
        self._class_of[slab] = size.record_bytes
        size.slabs.add(slab)
        size.fresh_at = slab * self._units
        slots = self.slab_bytes // size.record_bytes
        size.fresh_end = size.fresh_at + slots * (size.record_bytes // SLOT_UNIT)
        return True

    def _unbind_empty(self, taker: _SizeClass) -> int | None:
        """Takes an empty slab from another class."""
        for size in self._classes.values():
            if size is taker:
                continue
            for slab in size.slabs:
                if self._used[slab] == 0:
                    self._unbind(size, slab)
                    return slab
        return None

    def _unbind(self, size: _SizeClass, slab: int) -> None:
        low, high = self.slab_range(slab)
        slots = np.frombuffer(size.given_back, np.uint64)
        kept = slots[(slots < low) | (slots >= high)].tobytes()
        del slots  # array refuses to resize while a view of it is alive
        size.given_back = array("Q", kept)
        if low <= size.fresh_at < high:
            size.fresh_at = size.fresh_end = 0
        size.slabs.discard(slab)
        self._class_of[slab] = 0
