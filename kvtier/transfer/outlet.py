"""The pages of one Get: acquired, verified, given out one after another as views of the arena.

An Outlet does not block and belongs to one call; it must be closed, which ends every lease it
holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtier.core.handles import Reading
from kvtier.core.page import Codec, GetCode, Tier
from kvtier.core.store import Store
from kvtier.packing.record import RecordHeader
from kvtier.tiers.host import HostArena
from kvtier.transfer.place import Place, Verify, load

__all__ = ["Outgoing", "Outlet"]

#: An Outlet holds leases on so many bytes ahead at most, so that a slow reader cannot pin the
#: arena.
_WINDOW_BYTES = 64 << 20
_WINDOW_PAGES = 1024


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One page of a Get. With HIT, `payload` is a view of the arena that is good until the next
    page."""

    code: GetCode
    header: RecordHeader | None = None
    payload: memoryview | None = None
    tier: Tier | None = None


class Outlet:
    """The pages of one Get, in key order. Iterate, then `close` (also when not iterated to the
    end)."""

    def __init__(
        self,
        store: Store,
        arena: HostArena,
        place: Place,
        keys: npt.NDArray[np.uint8],
        *,
        accept: frozenset[Codec],
        lossy_ok: bool,
        verify: Verify,
        sample_one_in: int,
    ) -> None:
        self._store = store
        self._arena = arena
        self._place = place
        self._keys = keys
        self._accept = accept
        self._lossy_ok = lossy_ok
        self._verify = verify
        self._sample_one_in = sample_one_in
        self._held: deque[Reading | GetCode] = deque()
        self._current: Reading | None = None
        self.corrupt = 0

    def __iter__(self) -> Iterator[Outgoing]:
        window = max(1, min(_WINDOW_PAGES, _WINDOW_BYTES // self._place.layout.raw_bytes))
        for start in range(0, len(self._keys), window):
            keys = self._keys[start : start + window]
            self._held.extend(self._store.acquire(self._place.namespace, self._place.shard, keys))
            for key in keys:
                yield self._serve(self._held.popleft(), key.tobytes())
                self._let_go()

    def close(self) -> None:
        """Ends every lease that is still held."""
        self._let_go()
        for reading in self._held:
            if isinstance(reading, Reading):
                reading.release()
        self._held.clear()

    def _let_go(self) -> None:
        if self._current is not None:
            self._current.release()
            self._current = None

    def _serve(self, reading: Reading | GetCode, key: bytes) -> Outgoing:
        """The first copy that is whole and acceptable, from the best tier down.

        CORRUPT when there was a bad one and no good one.
        """
        seen_corrupt = False
        while isinstance(reading, Reading):
            self._current = reading
            if reading.codec in self._accept and (self._lossy_ok or not reading.lossy):
                checked = self._is_checked(reading)
                copy = load(self._arena, self._place, reading, key, check_payload=checked)
                if copy is not None:
                    return Outgoing(GetCode.HIT, copy.header, copy.payload, reading.ref.tier)
                seen_corrupt = True
                self.corrupt += 1
                self._store.condemn(reading.ref)
            ref = reading.ref
            self._let_go()
            reading = self._store.acquire_next(ref, self._place.namespace, self._place.shard, key)
        return Outgoing(GetCode.CORRUPT if seen_corrupt else reading)

    def _is_checked(self, reading: Reading) -> bool:
        if self._verify is Verify.ALWAYS:
            return True
        if self._verify is Verify.OFF:
            return False
        return reading.ref.generation % self._sample_one_in == 0
