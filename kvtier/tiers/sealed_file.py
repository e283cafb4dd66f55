"""Small state files that are either the old or the new version, whole, or an error.

    magic 8 | kind 8 | payload length u64le | xxh3-128 of everything else 16 | payload

A file is replaced by writing `NAME.tmp`, syncing it, renaming it and syncing the directory: when
`write_sealed` returns, the new version survives a power cut. No locks; one writer a directory.
"""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path

import xxhash

from kvtier.errors import DirectoryError
from kvtier.tiers.plain_file import known_remedy, open_plain, read_plain

__all__ = [
    "DISCARD",
    "LOST_STATE",
    "TEMPORARY_SUFFIX",
    "Signature",
    "read_sealed",
    "signature_of",
    "write_sealed",
]

TEMPORARY_SUFFIX = ".tmp"
#: The remedy for state that cannot be read any more.
DISCARD = "start once with `kvtier serve --discard-cache` (every cached page is then a miss)"
#: And for state without which nobody knows which pages were deleted or bumped since.
LOST_STATE = (
    "Start once with `kvtier serve --discard-cache` (every cached page is then a miss). Do not put"
    " an older copy in its place: pages that were deleted or bumped since would be back."
)

_MAGIC = b"KVTSEAL\x01"
_HEAD = struct.Struct("<8s8sQ16s")


def write_sealed(path: Path, kind: bytes, payload: bytes) -> None:
    """Durably replaces the file. Raises DirectoryError when the file system refuses."""
    blob = _HEAD.pack(_MAGIC, kind, len(payload), _sum(kind, payload)) + payload
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        temporary.unlink(missing_ok=True)
        fd = open_plain(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            written = 0
            while written < len(blob):
                written += os.write(fd, blob[written:])
            os.fsync(fd)
        finally:
            os.close(fd)
        temporary.replace(path)
        _sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise DirectoryError(
            f"{path} cannot be written: {error.strerror}",
            remedy=known_remedy(path, error, is_writing=True)
            or f"Make room on the file system of {path.parent}.",
        ) from error


#: Device, inode, length and time of change of a file: what tells whether it was touched.
Signature = tuple[int, int, int, int]


def signature_of(path: Path) -> Signature | None:
    """None when nothing of that name can be looked at."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def read_sealed(path: Path, kind: bytes) -> bytes | None:
    """The payload, or None when there is no such file. Raises DirectoryError for anything amiss."""
    try:
        blob = read_plain(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DirectoryError(
            f"{path} cannot be read: {error.strerror}",
            remedy=known_remedy(path, error)
            or "Check the disk (kernel log, SMART data); nothing was changed. If the file is gone "
            f"for good, {DISCARD}.",
        ) from error
    if len(blob) < _HEAD.size:
        raise _corrupt(path, f"{len(blob)} bytes, too short for its header")
    magic, found_kind, length, total = _HEAD.unpack_from(blob)
    payload = blob[_HEAD.size :]
    if magic != _MAGIC or found_kind.rstrip(b"\0") != kind:
        raise _corrupt(path, "not a file of this kind")
    if length != len(payload):
        raise _corrupt(path, f"{len(payload)} bytes of payload where {length} belong")
    if total != _sum(kind, payload):
        raise _corrupt(path, "its checksum does not match")
    return payload


def _sum(kind: bytes, payload: bytes) -> bytes:
    return xxhash.xxh3_128_digest(kind.ljust(8, b"\0") + struct.pack("<Q", len(payload)) + payload)


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _corrupt(path: Path, what: str) -> DirectoryError:
    return DirectoryError(
        f"{path} is damaged: {what}",
        remedy=LOST_STATE,
    )
