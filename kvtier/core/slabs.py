"""Slots of one tier: slabs bound on demand to a size class, cut into slots of exactly that size.

A class is a record size, so a page wastes nothing; only the tail of a slab that no slot fits into
is lost. Slots are named by their offset in units of 4 KiB, whatever their class: a slab's number
times its units, and on from there. Numbers need not follow each other (on NVMe they name a device
and a file of it). A slab is used only after `grant`, and no more after `withdraw`; an empty one can
be bound to another class. Pure bookkeeping: the bytes are elsewhere. The caller holds the store's
lock.

A frozen slab keeps what is in it and gives out nothing: its files can be read and not written.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["SLOT_UNIT", "SlabAllocator", "SlabCounts", "record_bytes_of"]

SLOT_UNIT = 4096


def record_bytes_of(length: int) -> int:
    """Bytes of the slot of a page of `length` payload bytes: a header block and the padded
    payload."""
    return SLOT_UNIT + -(-length // SLOT_UNIT) * SLOT_UNIT


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


@dataclass(slots=True)
class _Slab:
    record_bytes: int = 0  # of its class; 0: unbound
    used: int = 0  # slots
    granted: bool = False


class SlabAllocator:
    """Hands out slots of the slabs `numbers`, each of `slab_bytes`."""

    def __init__(self, *, slab_bytes: int, numbers: Iterable[int]) -> None:
        if slab_bytes <= 0 or slab_bytes % SLOT_UNIT:
            raise ValueError(f"slab_bytes must be a positive multiple of {SLOT_UNIT}")
        self.slab_bytes = slab_bytes
        self._slabs = {number: _Slab() for number in numbers}
        if not self._slabs:
            raise ValueError("a tier needs at least one slab")
        self._units = slab_bytes // SLOT_UNIT
        self._unbound: list[int] = []
        self._classes: dict[int, _SizeClass] = {}
        self.granted = 0
        #: Slabs that were withdrawn and have slots in use still.
        self.closed: set[int] = set()
        #: Slabs that are frozen, with their free slots.
        self.frozen: dict[int, list[int]] = {}

    @property
    def slabs(self) -> int:
        return len(self._slabs)

    @property
    def capacity_bytes(self) -> int:
        return len(self._slabs) * self.slab_bytes

    @property
    def slab_units(self) -> int:
        """Slot units of one slab."""
        return self._units

    def is_granted(self, slab: int) -> bool:
        return self._slabs[slab].granted

    def can_grant(self, slab: int) -> bool:
        """Not granted, and no slot of it is still in use from before."""
        state = self._slabs[slab]
        return not state.granted and state.used == 0

    def grant(self, slab: int) -> None:
        """From now on the slab may be used."""
        state = self._slabs[slab]
        assert not state.granted
        assert state.used == 0
        state.granted = True
        state.record_bytes = 0
        self._unbound.append(slab)
        self.granted += 1

    def withdraw(self, slab: int) -> None:
        """From now on no slot of it is handed out. Slots in use are still given back, by
        `free_many`."""
        state = self._slabs[slab]
        assert state.granted
        self.thaw(slab)
        state.granted = False
        self.granted -= 1
        if state.used:
            self.closed.add(slab)
        if state.record_bytes:
            self._unbind(self._classes[state.record_bytes], slab)
        else:
            self._unbound.remove(slab)

    def freeze(self, slab: int) -> None:
        """From now on no slot of the granted slab is handed out; what is in it stays."""
        state = self._slabs[slab]
        assert state.granted
        if slab in self.frozen:
            return
        if not state.record_bytes:
            self._unbound.remove(slab)
            self.frozen[slab] = []
            return
        size, units = self._classes[state.record_bytes], self._units
        free = [slot for slot in size.given_back if slot // units == slab]
        if size.fresh_at // units == slab:
            free += range(size.fresh_at, size.fresh_end, size.record_bytes // SLOT_UNIT)
        self._unbind(size, slab)
        size.slabs.add(slab)  # it keeps its class
        self.frozen[slab] = free

    def thaw(self, slab: int) -> None:
        """Its slots are handed out again."""
        free = self.frozen.pop(slab, None)
        if free is None:
            return
        state = self._slabs[slab]
        if state.record_bytes:
            self._classes[state.record_bytes].given_back.extend(free)
        else:
            self._unbound.append(slab)

    def reserve_many(self, record_bytes: int, count: int) -> list[int]:
        """Up to `count` free slots of this size, binding unbound or empty slabs when there are
        none; fewer: there is no more room."""
        assert 0 < record_bytes <= self.slab_bytes
        assert record_bytes % SLOT_UNIT == 0
        size, slabs, units = self._class(record_bytes), self._slabs, self._units
        slots: list[int] = []
        while len(slots) < count:
            slot = self._pop(size)
            if slot is not None:
                slots.append(slot)
                slabs[slot // units].used += 1
            elif not self._bind(size):
                break
        return slots

    def free_many(self, slots: Iterable[int]) -> None:
        """Takes slots back."""
        slabs, classes, units = self._slabs, self._classes, self._units
        for slot in slots:
            slab = slot // units
            state = slabs[slab]
            assert state.used > 0
            state.used -= 1
            if slab in self.frozen:
                self.frozen[slab].append(slot)
            elif state.granted:
                classes[state.record_bytes].given_back.append(slot)
            elif not state.used:
                self.closed.discard(slab)

    def has_free(self, record_bytes: int) -> bool:
        """`reserve_many` would find a slot without taking a slab from another class."""
        size = self._class(record_bytes)
        return bool(size.given_back) or size.fresh_at < size.fresh_end or bool(self._unbound)

    def restore(self, slab: int, record_bytes: int, slots: npt.NDArray[np.uint64]) -> None:
        """Binds a granted, unbound slab to a class, with these of its slots in use."""
        state = self._slabs[slab]
        assert state.granted
        self._unbound.remove(slab)
        size = self._class(record_bytes)
        state.record_bytes = record_bytes
        state.used = len(slots)
        size.slabs.add(slab)
        units = record_bytes // SLOT_UNIT
        count = self.slab_bytes // record_bytes
        every = np.arange(count, dtype=np.uint64) * np.uint64(units) + np.uint64(slab * self._units)
        free = np.setdiff1d(every, slots, assume_unique=True)
        assert len(free) == count - len(slots), "a slot that the class does not have"
        size.given_back.frombytes(np.flip(free).tobytes())

    def slab_of(self, slot: int) -> int:
        return slot // self._units

    def slab_range(self, slab: int) -> tuple[int, int]:
        """First slot unit of a slab and the first one after it."""
        return slab * self._units, (slab + 1) * self._units

    def bound_slabs(self, record_bytes: int) -> list[int]:
        """Slabs that serve this record size."""
        size = self._classes.get(record_bytes)
        return sorted(size.slabs) if size else []

    def bindings(self) -> dict[int, int]:
        """Record size of every slab that is bound to one."""
        return {slab: size.record_bytes for size in self._classes.values() for slab in size.slabs}

    def classes(self) -> list[int]:
        """Record sizes that have at least one slab."""
        return [record_bytes for record_bytes, size in self._classes.items() if size.slabs]

    def counts(self) -> SlabCounts:
        """Computed from the slots themselves, so that it can be held against the ledger."""
        used = free = tails = withdrawn_used = 0
        for state in self._slabs.values():
            if not state.granted and state.used:
                withdrawn_used += state.used * state.record_bytes
        unbound = len(self._unbound)
        for slab, slots in self.frozen.items():
            free += len(slots) * self._slabs[slab].record_bytes
            unbound += not self._slabs[slab].record_bytes
        for record_bytes, size in self._classes.items():
            slots_used = sum(self._slabs[slab].used for slab in size.slabs)
            fresh = (size.fresh_end - size.fresh_at) * SLOT_UNIT // record_bytes
            slots_free = len(size.given_back) + fresh
            used += slots_used * record_bytes
            free += slots_free * record_bytes
            tails += len(size.slabs) * (self.slab_bytes % record_bytes)
        return SlabCounts(
            ungranted=(len(self._slabs) - self.granted) * self.slab_bytes - withdrawn_used,
            unbound=unbound * self.slab_bytes,
            used=used + withdrawn_used,
            free=free,
            tails=tails,
        )

    def _class(self, record_bytes: int) -> _SizeClass:
        size = self._classes.get(record_bytes)
        if size is None:
            size = self._classes[record_bytes] = _SizeClass(record_bytes)
        return size

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
        self._slabs[slab].record_bytes = size.record_bytes
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
                if self._slabs[slab].used == 0 and slab not in self.frozen:
                    self._unbind(size, slab)
                    self._slabs[slab].record_bytes = 0
                    return slab
        return None

    def _unbind(self, size: _SizeClass, slab: int) -> None:
        """Takes a slab's free slots out of its class. Its own entry still names the class."""
        low, high = self.slab_range(slab)
        slots = np.frombuffer(size.given_back, np.uint64)
        kept = slots[(slots < low) | (slots >= high)].tobytes()
        del slots  # array refuses to resize while a view of it is alive
        size.given_back = array("Q", kept)
        if low <= size.fresh_at < high:
            size.fresh_at = size.fresh_end = 0
        size.slabs.discard(slab)
