"""The bytes of a file that is put, piece by piece, so that it may be larger than memory.

A regular file is read where it lies, twice: each piece is compared with what it was the first time,
so that a file that somebody writes to meanwhile is refused and never stored as a mixture. What can
be read once (a pipe, a device) is held in memory, up to STREAM_BYTES_MAX.

One thread.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvtier.errors import Busy
from kvtier.streams import is_regular, opened_reader, read_rest

__all__ = ["STREAM_BYTES_MAX", "Source", "opened_source"]

#: What is held in memory of a file that can be read only once, or given back to a pipe.
STREAM_BYTES_MAX: Final = 1 << 30


class Source:
    """Made by `opened_source`. `length` is in bytes."""

    def __init__(self, name: str, length: int, read: Callable[[int, int], bytes]) -> None:
        self.name = name
        self.length = length
        self._read = read
        self._sums: dict[tuple[int, int], bytes] = {}

    def digest(self, pieces: list[range]) -> bytes:
        """The SHA-256 of the whole; `pieces` are the ranges of bytes, one after another, that are
        asked for later. Raises Busy, OSError.
        """
        whole = hashlib.sha256()
        for piece in pieces:
            content = self._whole(piece)
            whole.update(content)
            self._sums[piece.start, piece.stop] = hashlib.sha256(content).digest()
        return whole.digest()

    def piece(self, wanted: range) -> bytes:
        """The bytes of one of the pieces, as they were. Raises Busy, OSError."""
        content = self._whole(wanted)
        if hashlib.sha256(content).digest() != self._sums[wanted.start, wanted.stop]:
            raise self._changed()
        return content

    def _whole(self, wanted: range) -> bytes:
        content = self._read(wanted.start, len(wanted))
        if len(content) != len(wanted):
            raise self._changed()
        return content

    def _changed(self) -> Busy:
        return Busy(
            f"{self.name} was changed while it was read",
            remedy="Put it again when nobody writes to it, or put a copy of it.",
        )


@contextmanager
def opened_source(path: Path, *, silence_s: float) -> Iterator[Source]:
    """The file at `path`. Raises TooLong, TimeoutError (see kvtier.streams), OSError."""
    with opened_reader(path) as fd:
        length = os.fstat(fd).st_size
        # Files of the kernel say that they are regular and empty.
        if is_regular(fd) and length:
            yield Source(str(path), length, lambda at, count: _pread(fd, at, count))
            return
        content = read_rest(fd, path, bytes_max=STREAM_BYTES_MAX, silence_s=silence_s)
    yield Source(str(path), len(content), lambda at, count: content[at : at + count])


def _pread(fd: int, at: int, count: int) -> bytes:
    """Up to `count` bytes: one call of the system gives no more than 2 GiB, and may give less."""
    parts = []
    while count and (part := os.pread(fd, count, at)):
        parts.append(part)
        at += len(part)
        count -= len(part)
    return b"".join(parts)
