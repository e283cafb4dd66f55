"""The way of a scrub through a tier: which pages come next, and the leases on them meanwhile.

Promise: a batch is small enough that its leases are short at the scrub's rate and leave most of the
tier evictable, and `Holding` lets go of every one of them when its block is left, however that is.
Event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeVar

from kvtier.core.handles import Reading
from kvtier.core.page import Tier
from kvtier.core.quarantine import Why
from kvtier.core.store import Store
from kvtier.daemon.scrub_protocol import PAGES_MAX, Batch, Item
from kvtier.errors import TierIOError
from kvtier.packing.record import record_bytes
from kvtier.tiers.base import SLOT_BYTES
from kvtier.tiers.direct_file import DirectMode
from kvtier.tiers.host import HostArena
from kvtier.tiers.nvme import NvmeTier
from kvtier.tiers.nvme_geometry import split_slab
from kvtier.tiers.nvme_segment import segment_name
from kvtier.transfer.place import Identity

__all__ = ["Held", "Holding", "NvmeFiles", "NvmeSegments", "ScrubCounts", "ScrubParts", "Walk"]

#: A batch is what is read in this time, so that its leases are short at any rate ...
_BATCH_S: Final = 0.1
#: ... and never more than this, or this share of the tier (one page is always a batch).
_BATCH_BYTES_MAX: Final = 64 << 20
_BATCH_SHARE: Final = 16

_T = TypeVar("_T")


class NvmeFiles(Protocol):
    """What a scrub has to know of the NVMe tier."""

    @property
    def segment_bytes(self) -> int: ...

    @property
    def direct(self) -> DirectMode: ...

    def segment_path(self, slab: int) -> Path:
        """The file of an existing segment. Raises TierIOError when it cannot be read now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeSegments:
    """The files of a tier, as they are now; read with `direct`, as the tier does."""

    tier: NvmeTier
    direct: DirectMode

    @property
    def segment_bytes(self) -> int:
        return self.tier.segment_bytes

    def segment_path(self, slab: int) -> Path:
        """See NvmeFiles."""
        _, local = split_slab(slab)
        return self.tier.device_of(slab).path / segment_name(local)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubParts:
    """What a scrub works on. `recheck` and `condemn` run while the reading is held.

    `identity_of(namespace number, shard)` is None for a number that has ended. `recheck(reading,
    identity, key)` reads the copy again and says whether it is whole; a TierIOError, Busy or
    TimeoutError from it counts the page as not read.
    `condemn` says whether that allocation was still there to be condemned. `confirm` returns when
    pages of NVMe that are gone with their files are misses. `lost(namespace number, shard, key)` is
    told of every copy on NVMe that was condemned: the page may be whole in host memory.
    """

    store: Store
    arena: HostArena
    identity_of: Callable[[int, int], Identity | None]
    recheck: Callable[[Reading, Identity, bytes], Awaitable[bool]]
    condemn: Callable[[Reading, Why], Awaitable[bool]]
    nvme: NvmeFiles | None = None
    confirm: Callable[[], Awaitable[None]] | None = None
    lost: Callable[[int, int, bytes], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubCounts:
    """How far a scrub is. Pages that have gone meanwhile are done; bytes are those of payloads."""

    pages_done: int = 0
    pages_total: int = 0
    bytes_done: int = 0
    pages_corrupt: int = 0
    io_errors: int = 0

    def plus(self, other: ScrubCounts) -> ScrubCounts:
        """The sums of each count."""
        return ScrubCounts(
            pages_done=self.pages_done + other.pages_done,
            pages_total=self.pages_total + other.pages_total,
            bytes_done=self.bytes_done + other.bytes_done,
            pages_corrupt=self.pages_corrupt + other.pages_corrupt,
            io_errors=self.io_errors + other.io_errors,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A page that a batch reads, whose slot cannot be reused meanwhile."""

    reading: Reading
    namespace: int
    identity: Identity
    key: bytes

    def item(self) -> Item:
        """The page as the scrub process is told of it."""
        reading, ref = self.reading, self.reading.ref
        return Item(
            tier=ref.tier,
            slot=ref.slot,
            record_bytes=record_bytes(reading.length),
            length=reading.length,
            generation=ref.generation,
            # A record on NVMe names the boot that wrote it, which may be an earlier one.
            boot_id=ref.boot_id if ref.tier is Tier.HOST else 0,
            key=self.key,
            fingerprint=self.identity.fingerprint,
            namespace_generation=self.identity.generation,
            shard=self.identity.shard,
            codec=reading.codec,
        )


class Holding:
    """The pages of one batch. Leaving the block lets go of them."""

    def __init__(self) -> None:
        self.pages: list[Held] = []
        self._late: dict[int, asyncio.Future[Any]] = {}

    async def finish(self, index: int, work: Awaitable[_T]) -> _T:
        """What `work` on page `index` gives. If the caller is cancelled meanwhile, the work goes on
        and the page is held until it has ended.
        """
        task = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                self._late[index] = task
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for index, held in enumerate(self.pages):
            if (task := self._late.get(index)) is not None:
                task.add_done_callback(partial(_release_late, held.reading))
            else:
                held.reading.release()


class Walk:
    """The pages that were sealed in `tier` when it began, in batches."""

    def __init__(self, parts: ScrubParts, tier: Tier, bytes_per_second: int) -> None:
        self.tier = tier
        self._parts = parts
        self._rows = parts.store.survey.sealed_rows(tier)
        self._at = 0
        self._number = 0
        capacity_bytes = parts.store.status()[tier].capacity_bytes
        self._batch_bytes_max = min(
            _BATCH_BYTES_MAX, int(bytes_per_second * _BATCH_S), capacity_bytes // _BATCH_SHARE
        )
        self.counts = ScrubCounts(pages_total=len(self._rows))

    def is_done(self) -> bool:
        """Nothing is left to read."""
        return self._at == len(self._rows)

    def count(self, counts: ScrubCounts) -> None:
        """Adds to `counts`."""
        self.counts = self.counts.plus(counts)

    def take(self, holding: Holding) -> tuple[Batch, ScrubCounts]:
        """The next batch, whose pages `holding` holds now, and what it counts for once it is read.

        It may be empty: pages go while a scrub is under way.
        """
        segments: dict[int, Path] = {}
        total = done = lost = 0
        for row in self._rows[self._at : self._at + PAGES_MAX].tolist():
            held = self._hold(row)
            if held is not None:
                size = record_bytes(held.reading.length)
                if holding.pages and total + size > self._batch_bytes_max:
                    held.reading.release()
                    break
                # From here on `holding` lets go of it.
                holding.pages.append(held)
                try:
                    segments |= self._segment_of(held)
                    total += size
                except TierIOError:
                    holding.pages.pop().reading.release()
                    lost += 1
            done += 1
        self._at += done
        self._number += 1
        # By place: fewer and longer ways for a disk.
        holding.pages.sort(key=lambda held: held.reading.ref.slot)
        items = tuple(held.item() for held in holding.pages)
        bytes_done = sum(item.length for item in items)
        return (
            Batch(number=self._number, items=items, segments=segments),
            ScrubCounts(pages_done=done, bytes_done=bytes_done, io_errors=lost),
        )

    def _hold(self, row: int) -> Held | None:
        """The page of a row, if it is still there and its namespace has not ended."""
        found = self._parts.store.survey.acquire_row(row)
        if found is None:
            return None
        reading, namespace, shard, key = found
        try:
            # A row can have been given up and be another page's since the walk began.
            if reading.ref.tier is self.tier:
                identity = self._parts.identity_of(namespace, shard)
                if identity is not None:
                    return Held(reading=reading, namespace=namespace, identity=identity, key=key)
        except BaseException:
            reading.release()
            raise
        reading.release()
        return None

    def _segment_of(self, held: Held) -> Mapping[int, Path]:
        """The segment file that the page lies in, by slab. Raises TierIOError."""
        nvme, slot = self._parts.nvme, held.reading.ref.slot
        if nvme is None or self.tier is not Tier.NVME:
            return {}
        slab = slot * SLOT_BYTES // nvme.segment_bytes
        return {slab: nvme.segment_path(slab)}


def _release_late(reading: Reading, task: asyncio.Future[Any]) -> None:
    reading.release()
    if not task.cancelled():
        task.exception()  # nobody waits for it any more
