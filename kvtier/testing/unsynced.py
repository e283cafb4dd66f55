"""The writes of a device that no sync has covered, and what a power cut leaves of them.

Promise: `lose` leaves, of every 4 KiB block, the bytes as of the last sync plus some of the later
writes to it in their order; blocks fare independently of each other, so writes tear and overtake.
Thread rule: any thread; the lock is held while the device inside is written, so that the order kept
here is the order there.
"""

from __future__ import annotations

import random
import threading

from kvtier.tiers.base import SLOT_BYTES, TierDevice, TierOperation, checked_start

__all__ = ["UnsyncedWrites"]


class UnsyncedWrites:
    """Writes through to `inner`, remembering how to undo."""

    def __init__(self, inner: TierDevice) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        # (byte offset in the tier, bytes before, bytes after), none across a block's end; oldest
        # first.
        self._pieces: list[tuple[int, bytes, bytes]] = []

    def write(self, slot: int, data: bytes, offset: int) -> None:
        """As TierDevice.write. One that fails is remembered too: its bytes may have landed."""
        with self._lock:
            at = checked_start(
                self._inner, TierOperation.WRITE, slot, offset=offset, length=len(data)
            )
            before = bytearray(len(data))
            self._inner.read(slot, offset, before)
            done = 0
            while done < len(data):
                count = min(SLOT_BYTES - (at + done) % SLOT_BYTES, len(data) - done)
                piece = slice(done, done + count)
                self._pieces.append((at + done, bytes(before[piece]), data[piece]))
                done += count
            self._inner.write(slot, [data], offset)

    def forget(self) -> None:
        """A sync returned: everything so far is safe."""
        with self._lock:
            self._pieces.clear()

    def lose(self, survival: float, source: random.Random) -> int:
        """Undo all writes since the last sync but those blocks drawn by `survival`; count them."""
        with self._lock:
            for at, before, _ in reversed(self._pieces):
                self._inner.write(at // SLOT_BYTES, [before], at % SLOT_BYTES)
            lost = 0
            for at, _, after in self._pieces:
                if source.random() < survival:
                    self._inner.write(at // SLOT_BYTES, [after], at % SLOT_BYTES)
                else:
                    lost += 1
            self._pieces.clear()
            return lost
