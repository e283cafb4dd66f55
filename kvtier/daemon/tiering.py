"""When pages move between host memory and NVMe, and how much of that is under way at once.

    back         a cleaner copies the coldest pages down, so that host memory always has pages that
                 may give way without being lost
    through      every page is copied down when it is stored
    selective    as back, but pages that were never used again are left to be dropped
    on demand    `durability` NVME, Flush, Demote, Prefetch

What is started for a caller who does not wait counts against `nvme.queue_pages_max`; over it, it is
BUSY or, for write-through, dropped and counted. The cleaner, Flush and durable puts start no more
than keep the devices busy, and wait. Host memory gives pages up that are nowhere else when copying
cannot keep pace.
Event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.config import NvmeConfig, WritePolicy
from kvtier.core.budget import WriteBudget
from kvtier.core.handles import Reading
from kvtier.core.page import KEY_BYTES, GetCode, Tier
from kvtier.core.store import Store
from kvtier.packing.record import record_bytes
from kvtier.tiers.io_pool import IoClass
from kvtier.transfer.mover import MoveCode, Mover, Subject

__all__ = ["Keys", "Scope", "Tiering"]

log = logging.getLogger(__name__)

Keys = npt.NDArray[np.uint8]
#: (namespace number, shard)
Scope = tuple[int, int]
#: What a namespace number, shard and key stand for; None once the namespace has ended.
SubjectOf = Callable[[int, int, bytes], "Subject | None"]

#: Pages that the cleaner copies between two looks at what is coldest.
_CLEAN_PAGES = 256
_REFUSED_MAX = 65_536


class Tiering:
    def __init__(
        self,
        store: Store,
        mover: Mover,
        config: NvmeConfig,
        *,
        subject_of: SubjectOf,
        budget: WriteBudget,
        streams: int,
        confirm: Callable[[], Awaitable[None]] | None = None,
        is_kept: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        """`streams` is how many pages the devices take at once; `confirm` returns when copies that
        are gone with their files are none any more; `is_kept` says whether a start would find what
        is on NVMe."""
        self._confirm = confirm
        self._is_kept = is_kept
        self._store = store
        self._mover = mover
        self._config = config
        self._subject_of = subject_of
        self._budget = budget
        self._tasks: set[asyncio.Task[Any]] = set()
        # Of those under way, as many hold a slot as keep the devices busy; the others only wait,
        # and what somebody waits for not behind what nobody does.
        self._writing = {
            is_background: asyncio.Semaphore(2 * streams) for is_background in (False, True)
        }
        # Pages on their way down, by name: who asks for one again waits for the same copy, but
        # does not wait in the background for it.
        self._going_down: dict[tuple[int, int, bytes, bool], asyncio.Future[MoveCode]] = {}
        self.dropped: Counter[str] = Counter()
        self._through_turn = asyncio.Semaphore(2 * streams)
        # Generations of copies that NVMe cannot take: the cleaner must not begin with them again.
        self._refused: dict[int, None] = {}

    @property
    def under_way(self) -> int:
        return len(self._tasks)

    # -- asked for by a call ---------------------------------------------------------------------

    async def make_durable(
        self, scope: Scope, keys: Keys, *, io_class: IoClass = IoClass.PUT
    ) -> npt.NDArray[np.bool_]:
        """Copies what is not on NVMe yet; which of `keys` are there then."""
        is_there = self._store.survey.in_tier(*scope, keys, Tier.NVME)
        if self._confirm is not None and is_there.any():
            # Nothing is written of these: whether their files are still there has to be asked.
            await self._confirm()
        todo = np.flatnonzero(~self._store.survey.in_tier(*scope, keys, Tier.NVME))
        queue = iter(todo.tolist())

        async def work() -> None:
            for i in queue:
                await self._down_by_key(scope, keys[i], io_class)

        # A put of thousands of pages is as few tasks as keep the devices busy.
        width = min(len(todo), 2 * self._config.io_threads)
        async with asyncio.TaskGroup() as group:
            for _ in range(width):
                group.create_task(work())
        is_durable = self._store.survey.in_tier(*scope, keys, Tier.NVME)
        if self._is_kept is not None and is_durable.any() and not await self._is_kept():
            is_durable[:] = False
        return is_durable

    def demote(self, scope: Scope, keys: Keys) -> npt.NDArray[np.uint8]:
        """Starts to copy pages down; what was found of each (GetCode)."""
        return self._start(scope, keys, Tier.NVME, self._down_by_key, IoClass.PUT)

    def prefetch(self, scope: Scope, keys: Keys) -> npt.NDArray[np.uint8]:
        """Starts to copy pages up; what was found of each."""
        return self._start(scope, keys, Tier.HOST, self._up_by_key, IoClass.PREFETCH)

    def stored(self, scope: Scope, keys: Sequence[bytes]) -> None:
        """Pages that a put has just stored: write-through copies them."""
        if self._config.write_policy is WritePolicy.THROUGH:
            for key in keys:
                if not self._spawn(self._through(scope, np.frombuffer(key, np.uint8))):
                    self.dropped["queue"] += 1

    async def _through(self, scope: Scope, key: Keys) -> MoveCode:
        # Until its turn it holds nothing: a page that waits may have to give way in host memory.
        async with self._through_turn:
            return await self._down_by_key(scope, key, IoClass.DEMOTE)

    # -- by itself -------------------------------------------------------------------------------

    async def clean(self) -> tuple[int, int]:
        """Copies some of the coldest pages of host memory down: (how many it tried, how many are
        there)."""
        tiers = self._store.status()
        counts = tiers[Tier.HOST]
        want = counts.capacity_bytes * self._config.clean_percent // 100 - counts.free_bytes
        # More than NVMe holds would go down in turns for ever, one copy giving way for the next.
        want = min(want, tiers[Tier.NVME].capacity_bytes // 2)
        if want <= 0:
            return 0, 0
        uses = 1 if self._config.write_policy is WritePolicy.SELECTIVE else 0
        rows = await asyncio.to_thread(
            self._store.survey.uncopied_rows,
            Tier.HOST,
            coldest_bytes=want,
            uses_min=uses,
            rows_max=_CLEAN_PAGES,
            but=self._refused_generations(),
        )
        codes = await self._down_rows(rows.tolist(), IoClass.DEMOTE)
        return codes.total(), codes[MoveCode.DONE]

    async def flush_all(self, until: float) -> int:
        """Copies every page that is in host memory alone down, the latest used first, as long as
        there is time (monotonic seconds) and room; how many are still in host memory alone then."""
        room = self._store.status()[Tier.NVME].capacity_bytes
        try:
            async with asyncio.timeout_at(until):
                # What is used less than all that fits would take the place of what is used more.
                while await self._flush_hottest(room - room // 8):
                    pass
        except TimeoutError:
            pass
        return len(self._store.survey.uncopied_rows(Tier.HOST))

    async def _flush_hottest(self, nbytes: int) -> bool:
        """Copies of the latest used so many bytes what is in host memory alone. True: some cannot
        be copied at all, and others may go in their place."""
        rows = self._store.survey.uncopied_rows(
            Tier.HOST, hottest_bytes=nbytes, but=self._refused_generations()
        )
        latest_first: list[int] = rows[::-1].tolist()
        refused = 0
        for at in range(0, len(latest_first), _CLEAN_PAGES):
            codes = await self._down_rows(latest_first[at : at + _CLEAN_PAGES], IoClass.PUT)
            if codes[MoveCode.BUSY] and not codes[MoveCode.DONE]:
                return False  # nothing goes down any more
            refused += codes[MoveCode.REFUSED]
        return refused > 0

    def _refused_generations(self) -> npt.NDArray[np.uint64]:
        return np.fromiter(self._refused, np.uint64, len(self._refused))

    async def settle(self, until: float) -> None:
        """Returns when no movement is under way, or at `until` (monotonic seconds)."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=max(0.0, until - time.monotonic()))

    async def close(self) -> None:
        """Ends what is under way."""
        for task in set(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        await self._mover.settle()

    # -- one page --------------------------------------------------------------------------------

    async def _down_rows(self, rows: list[int], io_class: IoClass) -> Counter[MoveCode]:
        """What came of those that were there, and have not been refused before."""
        queue = iter(rows)
        codes: Counter[MoveCode] = Counter()

        async def work() -> None:
            for row in queue:
                found = self._store.survey.acquire_row(row)
                if found is None:
                    continue
                if found[0].ref.generation in self._refused:
                    found[0].release()
                else:
                    codes[await self._down(*found, io_class)] += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(min(len(rows), 2 * self._config.io_threads)):
                group.create_task(work())
        return codes

    async def _down_by_key(self, scope: Scope, key: Keys, io_class: IoClass) -> MoveCode:
        (reading,) = self._store.acquire(*scope, key.reshape(1, KEY_BYTES), is_use=False)
        if not isinstance(reading, Reading):
            if io_class is IoClass.DEMOTE:
                self.dropped[MoveCode.GONE.value] += 1  # it had to give way before its turn came
            return MoveCode.GONE
        return await self._down(reading, *scope, key.tobytes(), io_class)

    async def _down(
        self, reading: Reading, namespace: int, shard: int, key: bytes, io_class: IoClass
    ) -> MoveCode:
        """Takes over `reading`."""
        page = self._subject_of(namespace, shard, key)
        if page is None or reading.ref.tier is not Tier.HOST:
            reading.release()
            return MoveCode.GONE if page is None else MoveCode.DONE
        place = (*page.name, io_class.is_background)
        under_way = self._going_down.get((*page.name, False)) or self._going_down.get(place)
        if under_way is not None:
            reading.release()
            return await asyncio.shield(under_way)
        code = MoveCode.BUSY  # what the others hear when this one is cancelled
        told = self._going_down[place] = asyncio.get_running_loop().create_future()
        try:
            with reading:
                code = await self._write_down(reading, page, io_class)
        finally:
            del self._going_down[place]
            told.set_result(code)
        return code

    async def _write_down(self, reading: Reading, page: Subject, io_class: IoClass) -> MoveCode:
        async with self._writing[io_class.is_background]:
            if not self._budget.take(record_bytes(reading.length), time.monotonic()):
                self.dropped["budget"] += 1
                return MoveCode.BUSY
            code = await self._mover.demote(reading.again(), page, io_class)
        if code is MoveCode.REFUSED:
            self._refused[reading.ref.generation] = None
            if len(self._refused) > _REFUSED_MAX:
                del self._refused[next(iter(self._refused))]
        if code is not MoveCode.DONE and io_class is IoClass.DEMOTE:
            self.dropped[code.value] += 1
        return code

    async def _up_by_key(self, scope: Scope, key: Keys, io_class: IoClass) -> MoveCode:
        (reading,) = self._store.acquire(*scope, key.reshape(1, KEY_BYTES), is_use=False)
        if not isinstance(reading, Reading):
            return MoveCode.GONE
        page = self._subject_of(*scope, key.tobytes())
        if page is None or reading.ref.tier is Tier.HOST:
            reading.release()
            return MoveCode.GONE if page is None else MoveCode.DONE
        return await self._mover.promote(reading, page, io_class)

    def _start(
        self,
        scope: Scope,
        keys: Keys,
        tier: Tier,
        move: Callable[[Scope, Keys, IoClass], Coroutine[Any, Any, MoveCode]],
        io_class: IoClass,
    ) -> npt.NDArray[np.uint8]:
        codes, _ = self._store.lookup(*scope, keys, is_counted=False)
        is_wanted = (codes == GetCode.HIT) & ~self._store.survey.in_tier(*scope, keys, tier)
        for i in np.flatnonzero(is_wanted).tolist():
            if not self._spawn(move(scope, keys[i].copy(), io_class)):
                codes[i] = GetCode.BUSY
        return codes

    def _spawn(self, work: Coroutine[Any, Any, MoveCode]) -> bool:
        """Starts it, unless too much is under way."""
        if len(self._tasks) >= self._config.queue_pages_max:
            work.close()
            return False
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return True

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("nvme.move_crashed", exc_info=error)
