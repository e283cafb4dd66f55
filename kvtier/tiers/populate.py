"""Makes an arena's memory real, slab after slab, on a thread of its own.

Promise: `on_ready(slab_index)` is called once a slab, in rising order, after every page of the slab
is backed by memory; a slab that was not announced may raise SIGBUS when touched. When memory runs
short the populator stops with a reason in `degraded` and the announced slabs stay good; another
populator can go on from there.

Thread rule: `start`, `stop` and `wait` are for one owner; `ready_slabs` and `degraded` may be read
by anyone. `on_ready` runs on the populator's thread and must not call `stop`.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvtier.tiers.memory import RESERVE_BYTES, Headroom, mib

__all__ = ["PopulateRange", "Populator", "SlabRange", "populate_write"]

log = logging.getLogger(__name__)

_MADV_POPULATE_WRITE = 23  # linux/mman.h, since 5.14; not in Python's mmap module
#: The kernel holds the process's memory map for one call: this keeps other threads' mmap calls
#: waiting a few ms at most.
_STEP_BYTES = 8 << 20

# ctypes releases the interpreter lock during the call; mmap.madvise keeps it (40 ms a slab).
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.restype = ctypes.c_int

#: (address, length in bytes), both page-aligned -> 0 or the errno.
PopulateRange: TypeAlias = Callable[[int, int], int]


def populate_write(address: int, length: int) -> int:
    """Back the range with memory and keep its bytes. Returns 0 or the errno."""
    if _libc.madvise(address, length, _MADV_POPULATE_WRITE) == 0:
        return 0
    return ctypes.get_errno()


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabRange:
    """How the map is cut: `count` slabs of `slab_bytes`, of which one is never ready in part."""

    slab_bytes: int
    count: int


class Populator:
    """See the module docstring. `poison` (0 to 255) fills every slab before it is announced."""

    def __init__(
        self,
        pages: NDArray[np.uint8],
        slabs: SlabRange,
        *,
        populate: PopulateRange = populate_write,
        poison: int | None = None,
        ready_slabs: int = 0,
    ) -> None:
        self._pages = pages
        self._slabs = slabs
        self._populate = populate
        self._poison = poison
        self._touching = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.ready_slabs = ready_slabs
        self.degraded = ""

    def start(
        self,
        on_ready: Callable[[int], None],
        *,
        headroom: Callable[[], Headroom] | None,
        reserve_bytes: int = RESERVE_BYTES,
    ) -> None:
        """Begin; once. Before each slab `headroom` must leave it and `reserve_bytes` free."""
        self._thread = threading.Thread(
            target=self._run,
            args=(on_ready, headroom, reserve_bytes),
            name="kvtier-populate",
            daemon=True,
        )
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def stop(self) -> None:
        """Return when the thread has ended; it gives up within one step (a few ms)."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the thread's end; True if every slab is ready then."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self.ready_slabs == self._slabs.count

    def _run(
        self,
        on_ready: Callable[[int], None],
        headroom: Callable[[], Headroom] | None,
        reserve_bytes: int,
    ) -> None:
        while self.ready_slabs < self._slabs.count and not self._stop.is_set():
            index = self.ready_slabs
            found = headroom() if headroom is not None else None
            needed = self._slabs.slab_bytes + reserve_bytes
            if found is not None and found.free_bytes < needed:
                self._degrade(
                    f"{found.limit} leaves {mib(found.free_bytes)}, "
                    f"a slab and the reserve need {mib(needed)}"
                )
                return
            error = self._populate_slab(index)
            if error:
                self._degrade(f"{os.strerror(error)} ({errno.errorcode.get(error, str(error))})")
                return
            if self._stop.is_set():
                return
            self.ready_slabs = index + 1
            on_ready(index)
        if self.ready_slabs == self._slabs.count:
            log.info("host.arena.populated", extra={"slabs": self.ready_slabs})

    def _populate_slab(self, index: int) -> int:
        """0 (also when stopped half-way), or the errno."""
        start = index * self._slabs.slab_bytes
        end = start + self._slabs.slab_bytes
        for step in range(start, end, _STEP_BYTES):
            if self._stop.is_set():
                return 0
            error = self._populate_step(step, min(end, step + _STEP_BYTES))
            if error:
                return error
        if self._poison is not None:
            self._pages[start:end] = self._poison
        return 0

    def _populate_step(self, start: int, end: int) -> int:
        base = self._pages.ctypes.data
        # A slab is a multiple of 4 KiB; where pages are larger its ends lie inside a page.
        low = start - start % mmap.PAGESIZE
        high = min(end + -end % mmap.PAGESIZE, self._pages.size)
        error = 0 if self._touching else self._populate(base + low, high - low)
        if error == errno.EINVAL:
            self._touching = True
            log.info("host.arena.populate_by_touch", extra={"reason": "no MADV_POPULATE_WRITE"})
            error = 0
        if self._touching:
            # Nobody was granted the slab yet, so writing a byte of each page destroys nothing.
            self._pages[start : end : mmap.PAGESIZE] = 0
        return error

    def _degrade(self, why: str) -> None:
        count = self._slabs.count
        self.degraded = f"{self.ready_slabs} of {count} slabs populated: {why}"
        log.warning("host.arena.degraded", extra={"reason": self.degraded})
