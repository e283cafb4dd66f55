"""What every tier's device does: put bytes at a slot, read them back, say why it could not.

Promise: a call either moves all its bytes or raises TierIOError; it never touches a byte outside
`[slot * SLOT_BYTES + offset, + length)` rounded out to the medium's write unit, and it never wraps.
After a failed write the bytes of that range are undefined, all others are as before.

Thread rule: any number of threads may call `read` and `write` at once on ranges that do not
overlap. Who may touch a range is decided by the store (one writer a slot, readers hold a pin), not
here.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from enum import StrEnum
from operator import index
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvtier.core.page import Tier
from kvtier.errors import TierIOError

__all__ = [
    "NO_NEW_FILES",
    "SHORTAGE",
    "SLOT_BYTES",
    "Buffer",
    "TierDevice",
    "TierOperation",
    "checked_start",
    "errno_of",
    "flat_bytes",
    "tier_io_error",
]

#: A slot is named by its offset in its tier in these units.
SLOT_BYTES = 4096

#: Anything with C-contiguous bytes; an array may have any shape and dtype.
Buffer: TypeAlias = bytes | bytearray | memoryview | NDArray[Any]


class TierOperation(StrEnum):
    OPEN = "open"
    READ = "read"
    WRITE = "write"
    SYNC = "sync"


class TierDevice(Protocol):
    """A flat range of bytes, addressed by slot; the module docstring says what holds of all."""

    @property
    def tier(self) -> Tier: ...

    @property
    def capacity_bytes(self) -> int:
        """The bytes that slots may name; a multiple of SLOT_BYTES."""

    def write(self, slot: int, parts: Sequence[Buffer], offset: int = 0) -> None:
        """Write `parts` one after another, from `offset` bytes after the slot's start.

        Raises TierIOError.
        """

    def read(self, slot: int, offset: int, into: Buffer) -> None:
        """Fill all of the writable buffer `into`.

        Raises TierIOError, and then `into` may hold garbage.
        """

    def sync(self) -> None:
        """Return when all writes that returned before survive a power cut, if they ever can."""

    def close(self) -> None:
        """Release everything; again does nothing. All other calls raise TierIOError after it."""


#: No new file can be made, for want of room or of rights to the directory: those that exist can be
#: read and, but on a read-only file system, written all the same.
NO_NEW_FILES: Final = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)
)
#: What this process, or the system, is short of says nothing of a device.
SHORTAGE: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM))

_REMEDIES = {
    errno.EACCES: "give the daemon's user the right to read and write there (chown, chmod)",
    errno.EPERM: "give the daemon's user the right to read and write there (chown, chattr)",
    errno.EROFS: "mount the file system writable again",
    errno.ENOENT: "mount the device, or put its directory back",
    errno.ENOSPC: "free space on the tier's file system, or lower the tier's byte cap",
    errno.EDQUOT: "raise the disk quota of the daemon's user, or lower the tier's byte cap",
    errno.EIO: "check the device (kernel log, SMART data); the page counts as a miss meanwhile",
    errno.EBADF: "the tier was closed: nothing may use it after close()",
    errno.ERANGE: "this is a mistake in the caller: the slot does not exist in this tier",
    errno.ENOMEM: "lower host.bytes, or give the daemon more memory",
    errno.ETIMEDOUT: "check the device's latency; the page counts as a miss meanwhile",
}


def tier_io_error(
    tier: Tier, operation: TierOperation, cause: OSError, *, slot: int | None = None
) -> TierIOError:
    """The TierIOError for `cause`, naming tier, slot, operation and the system's words.

    `cause` becomes its `__cause__`, so that `errno_of` can tell a full disk from a broken one.
    """
    number = cause.errno or 0
    place = "" if slot is None else f" at slot {slot}"
    words = cause.strerror or os.strerror(number)
    name = errno.errorcode.get(number, str(number))
    error = TierIOError(
        f"{tier.name.lower()} tier: {operation} failed{place}: {words} ({name})",
        remedy=_REMEDIES.get(
            number, "see the system's error text; the page counts as a miss meanwhile"
        ),
    )
    error.__cause__ = cause
    return error


def errno_of(error: TierIOError) -> int:
    """The errno behind a TierIOError; 0 if there is none."""
    cause = error.__cause__
    return (cause.errno or 0) if isinstance(cause, OSError) else 0


def flat_bytes(buffer: Buffer) -> memoryview:
    """`buffer` as a flat view of its bytes, no copy. Raises TypeError unless C-contiguous."""
    if isinstance(buffer, np.ndarray):
        if not buffer.flags.c_contiguous:
            raise TypeError(f"an array of strides {buffer.strides} is not one run of bytes")
        # Through uint8, because the buffer protocol has no name for dtypes such as bfloat16.
        return buffer.reshape(-1).view(np.uint8).data
    view = memoryview(buffer)
    # cast() refuses a zero in the shape
    return view.cast("B") if view.nbytes else memoryview(b"")


def checked_start(
    device: TierDevice, operation: TierOperation, slot: int, *, offset: int, length: int
) -> int:
    """The byte where the range starts. Raises TierIOError (ERANGE) unless it is all in the tier."""
    # As Python integers, which have no width: a numpy slot number would wrap at 2 or 4 GiB.
    slot, offset, length = index(slot), index(offset), index(length)
    start = slot * SLOT_BYTES + offset
    if slot < 0 or offset < 0 or length < 0 or start + length > device.capacity_bytes:
        words = f"bytes {start} to {start + length} are outside the tier's {device.capacity_bytes}"
        raise tier_io_error(device.tier, operation, OSError(errno.ERANGE, words), slot=slot)
    return start
