"""Shared memory without a name: memfds whose size nobody who receives them can change.

Promise: a descriptor from `create_sealed` or `create_read_only` has exactly the asked size and
seals, or TierIOError is raised and nothing is left behind. /dev/shm and its size limit play no
part, and a memfd dies with its last user.
Thread rule: functions without state.
Fork rule: a child does not get what `map_shared` mapped (MADV_DONTFORK); it must not touch it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from pathlib import Path

from kvtier.core.page import Tier
from kvtier.tiers.base import TierOperation, tier_io_error

__all__ = [
    "ARENA_SEALS",
    "HUGE_PAGE_BYTES",
    "READ_ONLY_SEALS",
    "create_read_only",
    "create_sealed",
    "found_seals",
    "free_huge_bytes",
    "map_shared",
]

HUGE_PAGE_BYTES = 2 << 20
_HUGE_POOL = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")

#: The receiver of the descriptor can neither cut it (SIGBUS for everybody else) nor let it grow.
#: F_SEAL_SEAL is applied in the same call, so it takes effect last: from then on no seal can be
#: added, F_SEAL_WRITE included.
ARENA_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

#: F_SEAL_FUTURE_WRITE (linux/fcntl.h, since 5.1): maps made from now on cannot be written, those
#: that are there can.
_F_SEAL_FUTURE_WRITE = 0x0010
READ_ONLY_SEALS = ARENA_SEALS | _F_SEAL_FUTURE_WRITE

#: linux/fcntl.h, since 6.3. Where vm.memfd_noexec is set the kernel adds it unasked.
_F_SEAL_EXEC = 0x0020


def create_sealed(
    name: str, size_bytes: int, *, tier: Tier, huge_pages: bool = False, seals: int = ARENA_SEALS
) -> int:
    """A new memfd of `size_bytes`, mode 0600, close-on-exec, with exactly `seals`; the caller's.

    With `huge_pages`, `size_bytes` must be a multiple of HUGE_PAGE_BYTES. No memory is taken yet.
    Raises TierIOError (open).
    """
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    if huge_pages:
        flags |= os.MFD_HUGETLB | os.MFD_HUGE_2MB
    try:
        fd = os.memfd_create(name, flags)
        try:
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
            _check(fd, size_bytes, seals)
        except OSError:
            os.close(fd)
            raise
    except OSError as error:
        raise tier_io_error(tier, TierOperation.OPEN, error) from error
    return fd


def create_read_only(name: str, size_bytes: int, *, tier: Tier) -> tuple[int, mmap.mmap]:
    """A new memfd with READ_ONLY_SEALS and the one map that can ever write it; both the caller's.

    No memory is taken yet. Raises TierIOError (open).
    """
    # Whoever gets the descriptor gets it sealed: until then it is in nobody's hands but ours.
    unsealed = ARENA_SEALS & ~fcntl.F_SEAL_SEAL
    fd = create_sealed(name, size_bytes, tier=tier, seals=unsealed)
    pages: mmap.mmap | None = None
    try:
        pages = map_shared(fd, size_bytes, writable=True)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, READ_ONLY_SEALS & ~unsealed)
        _check(fd, size_bytes, READ_ONLY_SEALS)
    except OSError as error:
        if pages is not None:
            pages.close()
        os.close(fd)
        raise tier_io_error(tier, TierOperation.OPEN, error) from error
    return fd, pages


def map_shared(fd: int, size_bytes: int, *, writable: bool) -> mmap.mmap:
    """A shared map that neither a child process nor a core file gets. Raises OSError."""
    rights = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    pages = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, rights)
    try:
        pages.madvise(mmap.MADV_DONTFORK)
        pages.madvise(mmap.MADV_DONTDUMP)
    except OSError:
        pages.close()
        raise
    _maps.add(pages)
    return pages


_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def _keep_maps_in_child() -> None:
    """After a fork: see to it that no map object is ever freed here.

    Freeing one unmaps its range; but the range is not mapped in the child, so by then
    other memory of the child may lie there.
    """
    for pages in list(_maps):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pages))


os.register_at_fork(after_in_child=_keep_maps_in_child)


def found_seals(fd: int) -> int:
    """The seals of a memfd, but for those that the kernel sets unasked. Raises OSError."""
    return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & ~_F_SEAL_EXEC


def _check(fd: int, size_bytes: int, seals: int) -> None:
    """Raise OSError unless the kernel did all it was asked to: a missing seal is a later SIGBUS."""
    size = os.fstat(fd).st_size
    if size != size_bytes:
        raise OSError(errno.EIO, f"asked for {size_bytes} bytes and got {size}")
    found = found_seals(fd)
    if found != seals:
        raise OSError(errno.EIO, f"asked for seals {seals:#x} and got {found:#x}")
    if os.get_inheritable(fd):
        raise OSError(errno.EIO, "the memfd is not close-on-exec")


def free_huge_bytes(pool: Path = _HUGE_POOL) -> int:
    """Bytes of 2 MiB pages that are free and promised to nobody; 0 where the system has none."""
    try:
        free = int((pool / "free_hugepages").read_text())
        promised = int((pool / "resv_hugepages").read_text())
    except (OSError, ValueError):
        return 0
    return max(0, free - promised) * HUGE_PAGE_BYTES
