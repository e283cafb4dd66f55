"""Opening files that must be regular ones: something else of that name is an error, not a wait.

A fifo without a writer would hold up whoever opens it for ever, a device may do anything; a
directory in the place of a file is refused by name as they are. Symbolic links are followed.

Errors: OSError. Thread rule: any thread.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

__all__ = [
    "NOT_A_FILE",
    "check_plain",
    "known_remedy",
    "open_plain",
    "opened_plain",
    "read_plain",
]

_NO_RIGHTS = frozenset((errno.EACCES, errno.EPERM))
#: Something that is no regular file lies there, or a link that leads nowhere.
NOT_A_FILE = frozenset((errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENOTDIR))
#: A file that was there while it was written to.
_TAKEN_AWAY = frozenset((errno.ENOENT, errno.ESTALE))


def open_plain(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of the regular file; what O_CREAT makes has mode 0600. Raises OSError."""
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a fifo that nobody reads
            raise _not_plain(path) from error
        raise
    try:
        check_plain(fd, path)
    except OSError:
        os.close(fd)
        raise
    return fd


def check_plain(fd: int, path: Path) -> None:
    """Raises OSError (EINVAL) unless the descriptor is of a regular file."""
    mode = os.fstat(fd).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise _not_plain(path)


@contextmanager
def opened_plain(path: Path) -> Iterator[IO[bytes]]:
    """The regular file for reading."""
    with os.fdopen(open_plain(path), "rb") as file:
        yield file


def read_plain(path: Path) -> bytes:
    """All bytes of the regular file. Raises OSError."""
    with opened_plain(path) as file:
        return file.read()


def known_remedy(path: Path, error: OSError, *, is_writing: bool = False) -> str:
    """What to do where the error itself says it: rights are missing, what lies there is no file,
    or with `is_writing` it was taken away; "" for any other."""
    if error.errno in NOT_A_FILE:
        return f"Remove {path}, which is none of kvtier's files, and start again."
    if error.errno in _TAKEN_AWAY and is_writing:
        return (
            f"Leave the files in {path.parent} alone while the daemon runs: it writes them anew "
            "where it can."
        )
    if error.errno not in _NO_RIGHTS:
        return ""
    return (
        f"Give the daemon's user (uid {os.geteuid()}) the right to read and write {path} and to "
        f"make files in {path.parent} (chown, chmod) and start again; nothing was changed."
    )


def _not_plain(path: Path) -> OSError:
    return OSError(errno.EINVAL, "it is not a regular file", str(path))
