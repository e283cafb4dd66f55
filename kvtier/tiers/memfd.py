"""Shared memory without a name: memfds whose size nobody who receives them can change.

Promise: a descriptor from `create_sealed` has exactly the asked size and seals, or TierIOError is
raised and nothing is left behind. /dev/shm and its size limit play no part, and a memfd dies with
its last user.
Thread rule: functions without state.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from kvtier.core.page import Tier
from kvtier.tiers.base import TierOperation, tier_io_error

__all__ = ["ARENA_SEALS", "HUGE_PAGE_BYTES", "create_sealed", "free_huge_bytes"]

HUGE_PAGE_BYTES = 2 << 20
_HUGE_POOL = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")

#: The receiver of the descriptor can neither cut it (SIGBUS for everybody else) nor let it grow.
#: F_SEAL_SEAL is applied in the same call, so it takes effect last: from then on no seal can be
#: added, F_SEAL_WRITE included.
ARENA_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

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


def _check(fd: int, size_bytes: int, seals: int) -> None:
    """Raise OSError unless the kernel did all it was asked to: a missing seal is a later SIGBUS."""
    size = os.fstat(fd).st_size
    if size != size_bytes:
        raise OSError(errno.EIO, f"asked for {size_bytes} bytes and got {size}")
    found = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & ~_F_SEAL_EXEC
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
