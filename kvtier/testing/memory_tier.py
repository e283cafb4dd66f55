"""A tier in a dictionary: the shipped fake of TierDevice. Sparse, so a terabyte of capacity costs
nothing.

Promise: behaves as `kvtier.tiers.base` says; bytes never written read as zero.
Thread rule: any thread; one lock around each call.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence

from kvtier.core.page import Tier
from kvtier.tiers.base import (
    SLOT_BYTES,
    Buffer,
    TierOperation,
    checked_start,
    flat_bytes,
    tier_io_error,
)

__all__ = ["MemoryTier"]


class MemoryTier:
    """See the module docstring. `tier` is what it claims to be in errors and refs."""

    def __init__(self, capacity_bytes: int, *, tier: Tier = Tier.NVME) -> None:
        assert capacity_bytes % SLOT_BYTES == 0, capacity_bytes
        self._tier = tier
        self._capacity_bytes = capacity_bytes
        self._blocks: dict[int, bytearray] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def tier(self) -> Tier:
        return self._tier

    @property
    def capacity_bytes(self) -> int:
        return self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of blocks that were ever written."""
        return len(self._blocks) * SLOT_BYTES

    def write(self, slot: int, parts: Sequence[Buffer], offset: int = 0) -> None:
        """See TierDevice."""
        data = memoryview(b"".join(flat_bytes(part) for part in parts))
        with self._lock:
            self._refuse_if_closed(TierOperation.WRITE, slot)
            at = checked_start(self, TierOperation.WRITE, slot, offset=offset, length=data.nbytes)
            while data:
                block, within = divmod(at, SLOT_BYTES)
                piece = data[: SLOT_BYTES - within]
                stored = self._blocks.setdefault(block, bytearray(SLOT_BYTES))
                stored[within : within + len(piece)] = piece
                data, at = data[len(piece) :], at + len(piece)

    def read(self, slot: int, offset: int, into: Buffer) -> None:
        """See TierDevice."""
        target = flat_bytes(into)
        with self._lock:
            self._refuse_if_closed(TierOperation.READ, slot)
            at = checked_start(self, TierOperation.READ, slot, offset=offset, length=target.nbytes)
            while target:
                block, within = divmod(at, SLOT_BYTES)
                count = min(SLOT_BYTES - within, len(target))
                stored = self._blocks.get(block) or bytes(SLOT_BYTES)
                target[:count] = stored[within : within + count]
                target, at = target[count:], at + count

    def sync(self) -> None:
        """Nothing is ever lost here: put a FaultyTier around it for power cuts."""
        self._refuse_if_closed(TierOperation.SYNC, None)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._blocks.clear()

    def _refuse_if_closed(self, operation: TierOperation, slot: int | None) -> None:
        if self._is_closed:
            cause = OSError(errno.EBADF, "the tier is closed")
            raise tier_io_error(self._tier, operation, cause, slot=slot)
