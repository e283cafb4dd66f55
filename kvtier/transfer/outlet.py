"""The pages of one Get: acquired, verified, given out one after another.

Pages of host memory go out as views of the arena. Those that lie on NVMe alone are brought up
first, some ahead of the one that goes out; a page that the arena has no room for is read into
memory of its own. An Outlet belongs to one call and the event loop's thread; it must be closed,
which ends every lease it holds.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvtier.core.handles import Reading
from kvtier.core.page import KEY_BYTES, Codec, GetCode, PageRef, Tier
from kvtier.core.store import Store
from kvtier.packing.record import RecordHeader, record_bytes
from kvtier.tiers.host import HostArena
from kvtier.tiers.io_pool import IoClass
from kvtier.transfer.bounced import Bounced
from kvtier.transfer.mover import MoveCode, Mover, Subject
from kvtier.transfer.place import Copy, Place, Verify, Why, failed, load

__all__ = ["Outgoing", "Outlet"]

#: An Outlet holds leases on so many bytes ahead at most, so that a slow reader cannot pin the
#: arena; of pages that have to be brought up, on no more than this part of the arena.
_WINDOW_BYTES = 64 << 20
_WINDOW_PAGES = 1024
_PLACES_MAX = 8
_ARENA_PART = 8

_CODES = {
    MoveCode.BUSY: GetCode.BUSY,
    MoveCode.GONE: GetCode.MISS,
    MoveCode.CORRUPT: GetCode.CORRUPT,
    MoveCode.IO_ERROR: GetCode.IO_ERROR,
    MoveCode.TIMEOUT: GetCode.TIMEOUT,
    MoveCode.REFUSED: GetCode.REFUSED,
}


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One page of a Get. With HIT, `payload` is good until the next page; `tier` is where it
    lay."""

    code: GetCode
    header: RecordHeader | None = None
    payload: memoryview | None = None
    tier: Tier | None = None


@dataclass(frozen=True, slots=True)
class _Raised:
    """A page of NVMe that has been read: in host memory (held), or in memory of its own."""

    held: Reading | Bounced
    copy: Copy


_Held: TypeAlias = "Reading | GetCode | asyncio.Task[_Raised | GetCode]"


class Outlet:
    """The pages of one Get, in key order. Iterate, then `close` (also when not iterated to the
    end). Without a `mover` only host memory is looked at."""

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
        mover: Mover | None = None,
    ) -> None:
        self._store = store
        self._arena = arena
        self._place = place
        self._keys = keys
        self._accept = accept
        self._lossy_ok = lossy_ok
        self._verify = verify
        self._sample_one_in = sample_one_in
        self._mover = mover
        self._held: deque[_Held] = deque()
        self._current: Reading | Bounced | None = None
        self._pages: AsyncGenerator[Outgoing, None] | None = None
        self.corrupt: Counter[Tier] = Counter()  # pages that failed, by where they lay
        #: Of those on NVMe the first few copies, with their keys.
        self.corrupt_at: list[tuple[PageRef, bytes]] = []

    async def __aenter__(self) -> Outlet:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def __aiter__(self) -> AsyncGenerator[Outgoing, None]:
        assert self._pages is None, "an Outlet is read once"
        self._pages = self._serve_all()
        return self._pages

    async def _serve_all(self) -> AsyncGenerator[Outgoing, None]:
        for start, end in self._windows():
            keys = self._keys[start:end]
            readings = self._store.acquire(self._place.namespace, self._place.shard, keys)
            self._held.extend(self._begin(r, key) for r, key in zip(readings, keys, strict=True))
            for key in keys:
                yield await self._serve(key.tobytes())
                self._let_go()

    async def close(self) -> None:
        """Ends every lease that is still held."""
        if self._pages is not None:
            await self._pages.aclose()
        self._let_go()
        held, self._held = self._held, deque()
        tasks = [task for task in held if isinstance(task, asyncio.Task)]
        for task in tasks:
            # It gives back what it holds itself; what it has done, we do.
            task.add_done_callback(_give_back)
            task.cancel()
        for reading in held:
            if isinstance(reading, Reading):
                reading.release()
        if tasks:
            await asyncio.wait(tasks)

    def _windows(self) -> list[tuple[int, int]]:
        page = record_bytes(self._place.layout.raw_bytes)
        ahead = _WINDOW_BYTES
        if self._mover is not None:
            ahead = min(ahead, self._arena.capacity_bytes // _ARENA_PART)
        size = max(1, min(_WINDOW_PAGES, ahead // page))
        return [(at, at + size) for at in range(0, len(self._keys), size)]

    def _let_go(self) -> None:
        if self._current is not None:
            self._current.release()
            self._current = None

    def _begin(self, reading: Reading | GetCode, key: npt.NDArray[np.uint8]) -> _Held:
        """Starts to bring the page up, if it has to be."""
        if isinstance(reading, GetCode) or reading.ref.tier is Tier.HOST:
            return reading
        if self._mover is None or not self._is_acceptable(reading):
            return reading
        task = asyncio.create_task(self._raise(reading, key.tobytes(), self._mover))
        # However it ends: a task can be cancelled before its first step.
        task.add_done_callback(lambda _: reading.release())
        ref = reading.ref
        task.add_done_callback(lambda ended: self._note_place(ended, ref, key.tobytes()))
        return task

    def _note_place(self, ended: asyncio.Task[Any], ref: PageRef, key: bytes) -> None:
        is_bad = not ended.cancelled() and not ended.exception()
        if is_bad and ended.result() is GetCode.CORRUPT and len(self.corrupt_at) < _PLACES_MAX:
            self.corrupt_at.append((ref, key))

    async def _serve(self, key: bytes) -> Outgoing:
        """The first copy that is whole and acceptable, from the best tier down.

        CORRUPT when there was a bad one and no good one. What is held for the page stays in
        `_held` until then, so that `close` finds it there whenever the call is cancelled.
        """
        seen_corrupt = False
        while not isinstance(held := self._held[0], GetCode):
            if isinstance(held, asyncio.Task):
                raised = await held
                if isinstance(raised, _Raised):
                    self._held.popleft()
                    self._current = raised.held
                    copy = raised.copy
                    return Outgoing(GetCode.HIT, copy.header, copy.payload, Tier.NVME)
                self._held[0] = raised
                if raised is GetCode.CORRUPT:
                    self.corrupt[Tier.NVME] += 1
                continue
            if held.ref.tier is Tier.HOST and self._is_acceptable(held):
                checked = self._is_checked(held)
                whole = load(self._arena, self._place, held, key, check_payload=checked)
                if whole is not None:
                    self._held.popleft()
                    self._current = held
                    return Outgoing(GetCode.HIT, whole.header, whole.payload, Tier.HOST)
                seen_corrupt = True
                self.corrupt[Tier.HOST] += 1
                self._store.condemn(held.ref, failed(Why.GET))
            held.release()
            following = self._store.acquire_next(
                held.ref, self._place.namespace, self._place.shard, key
            )
            self._held[0] = self._begin(following, np.frombuffer(key, np.uint8))
        self._held.popleft()
        return Outgoing(GetCode.CORRUPT if seen_corrupt and held is GetCode.MISS else held)

    async def _raise(self, reading: Reading, key: bytes, mover: Mover) -> _Raised | GetCode:
        """Brings one page up from NVMe."""
        page = self.subject(key)
        code = await mover.promote(reading.again(), page, IoClass.GET)
        if code is MoveCode.DONE:
            keys = np.frombuffer(key, np.uint8).reshape(1, KEY_BYTES)
            (above,) = self._store.acquire(page.namespace, page.shard, keys, is_use=False)
            if isinstance(above, Reading):
                copy = None
                if above.ref.tier is Tier.HOST and self._is_acceptable(above):
                    copy = load(self._arena, self._place, above, key, check_payload=False)
                if copy is not None:
                    return _Raised(above, copy)
                above.release()
            # It has had to give way again already.
            code = MoveCode.BUSY
        if code is MoveCode.BUSY:
            outcome = await mover.read_through(reading, page)
            if isinstance(outcome, Bounced) and outcome.copy is not None:
                return _Raised(outcome, outcome.copy)
            assert isinstance(outcome, MoveCode)
            code = outcome
        return _CODES[code]

    def subject(self, key: bytes) -> Subject:
        place = self._place
        return Subject(namespace=place.namespace, key=key, identity=place, layout=place.layout)

    def _is_acceptable(self, reading: Reading) -> bool:
        return reading.codec in self._accept and (self._lossy_ok or not reading.lossy)

    def _is_checked(self, reading: Reading) -> bool:
        if self._verify is Verify.ALWAYS:
            return True
        if self._verify is Verify.OFF:
            return False
        return reading.ref.generation % self._sample_one_in == 0


def _give_back(task: asyncio.Task[_Raised | GetCode]) -> None:
    """Nobody takes the page that it has brought up."""
    if not task.cancelled() and task.exception() is None:
        raised = task.result()
        if isinstance(raised, _Raised):
            raised.held.release()
