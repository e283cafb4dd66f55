"""Paths of Unix sockets that one process serves at a time.

ZeroMQ unlinks a path that is there and binds it anew: whoever served it goes on without hearing of
it, to subscribers that will not come any more. So a path has a lock beside it, which ends with its
process however that ends, and one where somebody answers without a lock is taken, too.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["claimed", "owners_alone"]


def claimed(path: Path) -> int:
    """The descriptor of the lock: close it to let go. Raises OSError when the path is served."""
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _answers(path):
            raise FileExistsError("another process serves it")
    except BlockingIOError:
        os.close(lock)
        raise FileExistsError("another process serves it") from None
    except OSError:
        os.close(lock)
        raise
    return lock


@contextmanager
def owners_alone() -> Iterator[None]:
    """What is made meanwhile belongs to its owner alone, from the beginning. It holds for the whole
    process: keep it short. Owners may still enter what folders others make meanwhile.
    """
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        return True
