"""The arena as clients map it, and only if nobody can cut it short under them.

A forked child does not get the memory. Functions without state.
"""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from kvtier.errors import DirectoryError
from kvtier.tiers.memfd import ARENA_SEALS, found_seals, map_shared
from kvtier.tiers.populate import populate_write

__all__ = ["map_arena", "make_present"]

_REMEDY = "use a client and daemon of the same version"


def map_arena(fd: int, arena_bytes: int, *, writable: bool) -> NDArray[np.uint8]:
    """The first `arena_bytes` of the memfd, which stays the caller's and may be closed. Unmapped
    when the last user of the array has let go of it.

    Raises DirectoryError for memory that could be cut short, is shorter, or cannot be mapped.
    """
    try:
        missing, size = ARENA_SEALS & ~found_seals(fd), os.fstat(fd).st_size
        if missing or not 0 < arena_bytes <= size:
            raise DirectoryError(
                f"the arena of {size} bytes lacks the seals {missing:#x}, or is shorter than its "
                f"{arena_bytes} bytes",
                remedy=_REMEDY,
            )
        pages = map_shared(fd, size, writable=writable)
    except OSError as error:
        raise DirectoryError(
            f"the arena of {arena_bytes} bytes cannot be mapped: {error.strerror}",
            remedy="raise the limit of address space or of open files (ulimit -v, -n), or use "
            'plane="grpc"',
        ) from error
    return np.frombuffer(pages, np.uint8, count=arena_bytes)


def make_present(arena: NDArray[np.uint8], begin: int, nbytes: int) -> None:
    """Enters a part of a writable map into this process's page tables in one call: the first write
    to it would do so for each 4 KiB by itself, at twice the time of the copy. `begin` and `nbytes`
    are multiples of 4096.
    """
    # What it cannot do (Linux before 5.14) the writes do.
    populate_write(int(arena.ctypes.data) + begin, nbytes)
