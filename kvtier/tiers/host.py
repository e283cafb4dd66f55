"""The host tier's device: one sealed memfd, mapped once, cut into slabs that a thread populates.

Promise: every range is checked against the capacity and either whole inside it or a TierIOError;
the memory behind a range may be used once its slab was announced by `on_ready`. The descriptor is
fit to be passed to clients: they can write the arena (design: one trust domain) and cannot change
its size.

Thread rule: `read`, `write`, `view` and `bytes` from any thread; the store says who may touch which
slot. `close` ends the tier for everyone at once, but memory that a view or a running copy still
uses is unmapped only when the last of them is gone.
Fork rule: a child does not get the memory (MADV_DONTFORK) and any use there raises TierIOError
instead of crashing.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvtier.core.page import Tier
from kvtier.errors import InvalidConfigValue, TierIOError
from kvtier.tiers.base import (
    SLOT_BYTES,
    Buffer,
    TierOperation,
    checked_start,
    flat_bytes,
    tier_io_error,
)
from kvtier.tiers.memfd import HUGE_PAGE_BYTES, create_sealed, free_huge_bytes, map_shared
from kvtier.tiers.memory import RESERVE_BYTES, Headroom, read_headroom
from kvtier.tiers.populate import PopulateRange, Populator, SlabRange, populate_write

__all__ = ["POISON_BYTE", "SLAB_BYTES", "HostArena", "slab_layout"]

log = logging.getLogger(__name__)

#: The least bytes of a slab: 64 MiB and room for 64 record headers of 4 KiB. A page of 2^k bytes
#: makes a record of 2^k + 4 KiB, so a slab of a plain 64 MiB would hold one record less than it
#: should: 63 of 1 MiB, none of 64 MiB. With the extra 256 KiB it holds 64 of 1 MiB exactly, 32 of
#: 2 MiB, ..., 1 of 64 MiB.
#: Slabs are made a little longer than this (under twice as long) so that they fill the capacity.
SLAB_BYTES = (64 << 20) + (256 << 10)

#: What memory holds in test mode where no page was loaded; as fp8 or bfloat16 it is a small number,
#: so that only a look at the bytes tells.
POISON_BYTE = 0xA5


def slab_layout(capacity_bytes: int, slab_bytes: int = SLAB_BYTES) -> SlabRange:
    """As many slabs of at least `slab_bytes` as fit (one at the least), all as long as the capacity
    allows, in whole slots: less than one slot a slab stays unused.
    """
    assert slab_bytes % SLOT_BYTES == 0 < slab_bytes, slab_bytes
    if capacity_bytes < SLOT_BYTES:
        raise InvalidConfigValue(
            f"a host tier of {capacity_bytes} bytes holds nothing",
            remedy=f"set host.bytes to {SLOT_BYTES} or more",
        )
    count = max(1, capacity_bytes // slab_bytes)
    share = capacity_bytes // count
    return SlabRange(slab_bytes=share - share % SLOT_BYTES, count=count)


class HostArena:
    """A TierDevice in shared memory.

    Reserves address space only; `start_populating` makes the memory real. `huge_pages` uses 2 MiB
    pages if the system has enough of them free, `poison` fills slabs with POISON_BYTE. Raises
    TierIOError (open), InvalidConfigValue.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        slab_bytes: int = SLAB_BYTES,
        huge_pages: bool = True,
        poison: bool = False,
    ) -> None:
        self._slabs = slab_layout(capacity_bytes, slab_bytes)
        self._capacity_bytes = self._slabs.slab_bytes * self._slabs.count
        self._poison = POISON_BYTE if poison else None
        self._close_lock = threading.Lock()
        self._pid = os.getpid()
        self._fd, self._map, self._huge_pages = _open_map(
            self._capacity_bytes, huge_pages=huge_pages
        )
        self._file_bytes = len(self._map)
        # Every user takes this array (or a slice) first: while one lives, the memory stays mapped.
        self._bytes: NDArray[np.uint8] | None = np.frombuffer(
            self._map, dtype=np.uint8, count=self._capacity_bytes
        )
        self._populator: Populator | None = None
        log.info(
            "host.arena.created",
            extra={
                "bytes": self._capacity_bytes,
                "slabs": self._slabs.count,
                "huge_pages": self._huge_pages,
            },
        )

    @property
    def tier(self) -> Tier:
        return Tier.HOST

    @property
    def capacity_bytes(self) -> int:
        return self._capacity_bytes

    @property
    def slab_bytes(self) -> int:
        return self._slabs.slab_bytes

    @property
    def slab_count(self) -> int:
        return self._slabs.count

    @property
    def huge_pages(self) -> bool:
        """The arena lies in 2 MiB pages."""
        return self._huge_pages

    @property
    def fd(self) -> int:
        """The memfd, to pass to clients; the arena closes it. Raises TierIOError after close."""
        self._live(TierOperation.OPEN, None)
        return self._fd

    @property
    def file_bytes(self) -> int:
        """The memfd's size: `capacity_bytes`, or a little more with huge pages."""
        return self._file_bytes

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """(capacity_bytes,) uint8, writable, no copy. Keep it no longer than the arena is open."""
        return self._live(TierOperation.OPEN, None)

    def view(self, slot: int, offset: int, length: int) -> memoryview:
        """`length` bytes from `offset` after the slot's start, writable, no copy.

        Raises TierIOError.
        """
        pages = self._live(TierOperation.READ, slot)
        start = checked_start(self, TierOperation.READ, slot, offset=offset, length=length)
        return pages[start : start + length].data

    def write(self, slot: int, parts: Sequence[Buffer], offset: int = 0) -> None:
        """See TierDevice. Copies without the interpreter lock."""
        pages = self._live(TierOperation.WRITE, slot)
        sources = [flat_bytes(part) for part in parts]
        total = sum(source.nbytes for source in sources)
        start = checked_start(self, TierOperation.WRITE, slot, offset=offset, length=total)
        for source in sources:
            end = start + source.nbytes
            np.copyto(pages[start:end], np.frombuffer(source, dtype=np.uint8))
            start = end

    def read(self, slot: int, offset: int, into: Buffer) -> None:
        """See TierDevice. Copies without the interpreter lock."""
        pages = self._live(TierOperation.READ, slot)
        target = flat_bytes(into)
        start = checked_start(self, TierOperation.READ, slot, offset=offset, length=target.nbytes)
        np.copyto(np.frombuffer(target, dtype=np.uint8), pages[start : start + target.nbytes])

    def sync(self) -> None:
        """Nothing to do: host memory survives no power cut."""
        self._live(TierOperation.SYNC, None)

    def start_populating(
        self,
        on_ready: Callable[[int], None],
        *,
        headroom: Callable[[], Headroom] = read_headroom,
        reserve_bytes: int = RESERVE_BYTES,
        populate: PopulateRange = populate_write,
    ) -> None:
        """Populate the slabs that are not ready yet, in order, on a thread that calls `on_ready`.

        Stops with `degraded` set when a slab would leave less than `reserve_bytes` of `headroom`.
        Huge pages are not asked about: the map reserved them. See Populator.
        """
        pages = self._live(TierOperation.OPEN, None)
        assert self._populator is None or not self._populator.is_running, "already populating"
        self._populator = Populator(
            pages,
            self._slabs,
            populate=populate,
            poison=self._poison,
            ready_slabs=self.ready_slabs,
        )
        ask = None if self._huge_pages else headroom
        self._populator.start(on_ready, headroom=ask, reserve_bytes=reserve_bytes)

    def stop_populating(self) -> None:
        """Return when the populate thread has ended. Slabs that were announced stay ready."""
        if self._populator is not None:
            self._populator.stop()

    def wait_populated(self, timeout_s: float) -> bool:
        """Wait until the populate thread has ended; True if all slabs are ready."""
        return self._populator is not None and self._populator.wait(timeout_s)

    @property
    def ready_slabs(self) -> int:
        """How many slabs, from the first, are populated and announced."""
        return self._populator.ready_slabs if self._populator is not None else 0

    @property
    def degraded(self) -> str:
        """Why populating stopped early; empty if it did not."""
        return self._populator.degraded if self._populator is not None else ""

    def close(self) -> None:
        """Stop populating, close the memfd, unmap.

        A view that somebody still holds stays good, and its memory goes when it does.
        """
        with self._close_lock:
            if self._bytes is None:
                return
            self.stop_populating()
            self._bytes = None
            self._populator = None
            os.close(self._fd)
            if self._pid != os.getpid():
                return  # the memory is not here, see _keep_maps_in_child
            try:
                self._map.close()
            except BufferError:
                # mmap refuses while views are out. The map object goes with the last of them, so
                # drop ours.
                log.warning("host.arena.closed_with_views", extra={"bytes": self._capacity_bytes})
            del self._map

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _live(self, operation: TierOperation, slot: int | None) -> NDArray[np.uint8]:
        pages = self._bytes
        if pages is None:
            raise _closed(operation, slot, "the arena is closed")
        if self._pid != os.getpid():
            raise _closed(operation, slot, "the arena belongs to the parent process")
        return pages


def _closed(operation: TierOperation, slot: int | None, words: str) -> TierIOError:
    return tier_io_error(Tier.HOST, operation, OSError(errno.EBADF, words), slot=slot)


def _open_map(capacity_bytes: int, *, huge_pages: bool) -> tuple[int, mmap.mmap, bool]:
    """(memfd, its map, whether in huge pages). Raises TierIOError with nothing left open."""
    huge_bytes = capacity_bytes + -capacity_bytes % HUGE_PAGE_BYTES
    if huge_pages and free_huge_bytes() >= huge_bytes:
        try:
            # mmap reserves the pages: what is mapped cannot run out later.
            return (*_sealed_map(huge_bytes, huge_pages=True), True)
        except TierIOError as error:
            log.info("host.arena.no_huge_pages", extra={"reason": str(error)})
    return (*_sealed_map(capacity_bytes, huge_pages=False), False)


def _sealed_map(size_bytes: int, *, huge_pages: bool) -> tuple[int, mmap.mmap]:
    fd = create_sealed("kvtier-arena", size_bytes, tier=Tier.HOST, huge_pages=huge_pages)
    try:
        return fd, map_shared(fd, size_bytes, writable=True)
    except OSError as error:
        os.close(fd)
        raise tier_io_error(Tier.HOST, TierOperation.OPEN, error) from error
