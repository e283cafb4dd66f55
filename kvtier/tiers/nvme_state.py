"""What the checkpoint and the journal have in common: the head of the file, and how they fail.

Both begin with a head that is laid out alike in every version:

    offset size
         0    8 magic, names the kind of file
         8    4 version     u32le
        12    4 head bytes  u32le, this head
        16    - of the version
      last    8 xxh3-64 of the head before it, u64le

So a version is believed only under a right sum: a damaged version number is damage, and a whole
file of another version is refused by name. Each kind has a table of readers by version; a build
that writes version N has the reader of N - 1 in its table too.

Anything the file system refuses is a DirectoryError, and nothing is changed. Pure but for reading
files; safe from any thread.
"""

from __future__ import annotations

import asyncio
import errno
import os
import struct
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import xxhash

from kvtier.errors import DirectoryError
from kvtier.tiers.plain_file import known_remedy, read_plain

if TYPE_CHECKING:
    from aiofiles.threadpool.binary import AsyncFileIO
    from typing_extensions import Buffer

__all__ = [
    "DIRECTORY_ID_BYTES",
    "Head",
    "check_owner",
    "check_version",
    "open_private",
    "padded",
    "parse_head",
    "read_file",
    "sealed_head",
    "sync_directory",
    "to_the_end",
    "unreadable",
    "unwritable",
    "write_whole",
]

DIRECTORY_ID_BYTES: Final = 16

T = TypeVar("T")

_START: Final = struct.Struct("<8sII")
_SUM: Final = struct.Struct("<Q")
_HEAD_BYTES_MAX: Final = 4096


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a file whose head sum is right; `fields` is the head without its sum."""

    version: int
    fields: bytes

    @property
    def head_bytes(self) -> int:
        return len(self.fields) + _SUM.size


def sealed_head(magic: bytes, version: int, fields: bytes) -> bytes:
    """A whole head; `fields` is what the version puts after offset 16."""
    head_bytes = _START.size + len(fields) + _SUM.size
    head = _START.pack(magic, version, head_bytes) + fields
    return head + _SUM.pack(xxhash.xxh3_64_intdigest(head))


def parse_head(blob: bytes, magic: bytes) -> Head | str:
    """The head at the start of `blob`, or what is wrong with it."""
    if len(blob) < _START.size:
        return f"{len(blob)} bytes, too short for its head"
    found, version, head_bytes = _START.unpack_from(blob)
    if found != magic:
        return "it does not begin as a file of its kind does"
    if not _START.size + _SUM.size <= head_bytes <= min(_HEAD_BYTES_MAX, len(blob)):
        return f"its head of {head_bytes} bytes is cut off or damaged"
    fields = blob[: head_bytes - _SUM.size]
    if _SUM.unpack_from(blob, len(fields))[0] != xxhash.xxh3_64_intdigest(fields):
        return "the sum of its head does not match"
    return Head(version, fields)


def check_version(path: Path, version: int, known: Collection[int]) -> None:
    """Raises DirectoryError unless this build has a reader for `version`."""
    if version not in known:
        readable = " and ".join(map(str, sorted(known)))
        raise DirectoryError(
            f"{path} has version {version}; this build reads version {readable}",
            remedy="Start the version of kvtier that wrote it, or give up what is cached on NVMe "
            "with --discard-cache.",
        )


def check_owner(path: Path, found: bytes, directory_id: bytes) -> None:
    """Raises DirectoryError when the file was written in another daemon directory."""
    if found != directory_id:
        raise DirectoryError(
            f"{path} belongs to another daemon directory ({found.hex()}, not {directory_id.hex()})",
            remedy="Put back the file that was here, or give up what is cached on NVMe with "
            "--discard-cache.",
        )


def read_file(path: Path) -> bytes | None:
    """The bytes of `path`, None when there is no such file. Raises DirectoryError."""
    try:
        return read_plain(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> DirectoryError:
    """The DirectoryError for a read that the system refused."""
    return DirectoryError(
        f"{path} cannot be read: {error.strerror}",
        remedy=known_remedy(path, error)
        or "Check the disk (kernel log, SMART data) and start again; nothing was changed. "
        "If the file is gone for good, --discard-cache gives up what is cached on NVMe.",
    )


def unwritable(path: Path, error: OSError) -> DirectoryError:
    """The DirectoryError for a write that the system refused."""
    return DirectoryError(
        f"{path} cannot be written: {error.strerror}",
        remedy=known_remedy(path, error, is_writing=True)
        or f"Make room on the file system of {path.parent} and start again; nothing was lost.",
    )


async def write_whole(file: AsyncFileIO, data: Buffer, step_bytes: int = 4 << 20) -> None:
    """Writes all of `data` at the file's place, at most `step_bytes` a call. Raises OSError."""
    view = memoryview(data)
    done = 0
    while done < view.nbytes:
        written = await file.write(view[done : done + step_bytes])
        if not written:
            raise OSError(errno.EIO, "nothing was written")
        done += written


async def to_the_end(
    work: Coroutine[Any, Any, T], undo: Callable[[T], Awaitable[None]] | None = None
) -> T:
    """The result of `work`, which is not stopped when the caller is cancelled: the caller hears of
    that when it has ended and was undone.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled() and task.exception() is None and undo is not None:
            await undo(task.result())
        raise


def padded(length: int, align: int) -> int:
    """`length` rounded up to a multiple of `align`."""
    return -(-length // align) * align


def open_private(path: str, flags: int) -> int:
    """An opener for files that only the daemon's user may read."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)


def sync_directory(directory: Path) -> None:
    """Makes names in `directory` survive a power cut. Raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
