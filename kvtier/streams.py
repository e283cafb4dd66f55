"""Files that a command was told to open: none of them may keep it for ever, or fill memory.

Promise: opening never waits for the other end of a named pipe; a read or write waits `silence_s` at
most for the next byte, then raises TimeoutError with what it waited for; no more than the given
number of bytes is held. A pipe that has no name (standard input, a shell's substitution) and a
terminal are as slow as whoever is behind them, and end with him: these are waited for.

Functions without state: usable from any thread.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

__all__ = [
    "TooLong",
    "is_regular",
    "opened_reader",
    "opened_writer",
    "read_bytes",
    "read_rest",
    "write_all",
]

_CHUNK_BYTES: Final = 1 << 20
_TRY_S: Final = 0.02


class TooLong(OSError):
    """More bytes than are read of such a file."""


def is_regular(fd: int) -> bool:
    return stat.S_ISREG(os.fstat(fd).st_mode)


@contextmanager
def opened_reader(path: Path) -> Iterator[int]:
    """A descriptor to read with `read_bytes`. Raises OSError, and for a directory at once."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        yield fd
    finally:
        os.close(fd)


@contextmanager
def opened_writer(path: Path, *, silence_s: float) -> Iterator[int]:
    """A descriptor of a pipe or device that is there, to write to with `write_all`. Raises OSError;
    TimeoutError when nobody reads a named pipe.
    """
    until = time.monotonic() + silence_s
    while True:
        try:
            fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
            break
        except OSError as error:
            # What a named pipe without a reader says.
            if error.errno != errno.ENXIO or not path.is_fifo():
                raise
        if time.monotonic() >= until:
            raise _late(path, f"nobody reads this pipe within {silence_s:g} s")
        time.sleep(_TRY_S)
    try:
        yield fd
    finally:
        os.close(fd)


def read_bytes(path: Path, *, bytes_max: int, silence_s: float) -> bytes:
    """The whole of `path`. Raises TooLong, TimeoutError, OSError."""
    with opened_reader(path) as fd:
        return read_rest(fd, path, bytes_max=bytes_max, silence_s=silence_s)


def read_rest(fd: int, path: Path, *, bytes_max: int, silence_s: float) -> bytes:
    """What is to come from the descriptor of `path`. Raises TooLong, TimeoutError, OSError."""
    patience_s = None if _has_no_name(fd) else silence_s
    found = bytearray()
    while True:
        if not is_regular(fd) and not _is_ready(fd, select.POLLIN, patience_s):
            raise _late(path, f"nobody writes to this pipe within {silence_s:g} s")
        try:
            piece = os.read(fd, _CHUNK_BYTES)
        except BlockingIOError:
            continue
        except OSError as error:
            raise _named(error, str(path)) from None
        if not piece:
            return bytes(found)
        found += piece
        if len(found) > bytes_max:
            raise TooLong(errno.EFBIG, f"more than {bytes_max} bytes", str(path))


def write_all(
    fd: int, content: bytes | bytearray | memoryview, *, name: str, silence_s: float | None
) -> None:
    """Every byte: a write to a pipe may take a part. Raises TimeoutError, OSError. None: waits as
    long as there is a reader.
    """
    rest = memoryview(content).cast("B")
    patience_s = None if silence_s is None or _has_no_name(fd) else silence_s
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:
            if not _is_ready(fd, select.POLLOUT, patience_s):
                why = f"its reader takes nothing for {silence_s:g} s"
                raise _late(Path(name), why) from None
        except OSError as error:
            raise _named(error, name) from None


def _is_ready(fd: int, event: int, patience_s: float | None) -> bool:
    poll = select.poll()
    poll.register(fd, event)
    return bool(poll.poll(None if patience_s is None else patience_s * 1000))


def _has_no_name(fd: int) -> bool:
    """True of a terminal and of a pipe that a process was given, not opened by its name."""
    shown = str(Path(f"/proc/self/fd/{fd}").readlink())
    return os.isatty(fd) or shown.startswith(("pipe:", "socket:"))


def _late(path: Path, why: str) -> TimeoutError:
    return TimeoutError(errno.ETIMEDOUT, why, str(path))


def _named(error: OSError, name: str) -> OSError:
    """The same error (of the same class) with the file's name in it."""
    return OSError(error.errno, error.strerror, name)
