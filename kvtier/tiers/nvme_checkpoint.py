"""The checkpoint: the whole index of the NVMe tier in one file, and the one before it beside it.

    head, 128 bytes (all numbers little-endian; see nvme_state for the rule of heads)
         0    8 magic 89 4b 56 54 43 4b 50 0a ("\\x89KVTCKP\\n")
         8    4 version         u32, 2
        12    4 head bytes      u32, 128
        16   16 directory id
        32    8 number          u64, also of the journal that goes on from here
        40    8 last generation u64
        48    8 pages           u64, n
        56    8 table bytes     u64
        64    8 file bytes      u64
        72   16 body sum        xxh3-128 of everything after the head, canonical
        88    8 absent pages    u64, k
        96   24 zero
       120    8 head sum
    table: msgpack of {"families": [[fingerprint, generation], ...], "classes": [[slab, record
    bytes], ...], "in_flight": [generation, ...]}; and "waits": [[device, pages], ...] where
    devices were not there
    n of each column of PAGE_COLUMNS in its order, of the keys n + k: those of the pages, then those
    of pages that are not there and that some of these come after. `parent` is a place in the keys,
    or -1. Table and columns each begin at a multiple of 64.

Version 1 had no absent pages: there k is 0.

Promise: `checkpoint` is replaced only by a whole and synced file, and a whole one is kept beside it
as `checkpoint.old`; at every moment of a write at least one of them is whole. One that lacks the
pages of a device that was away is never `checkpoint.old`: the one from before that device went
stays, with all journals since, until a start has found the device's pages. Order for the writer:
journal n is created, then the snapshot is taken, then checkpoint n is written, then `remove_old`
with `oldest_number`. A crash in between leaves a journal more than needed, never one too few.

Encoding and system calls run outside the event loop; one writer a directory. Reading is
synchronous, from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path
from typing import Any, Final

import aiofiles
import msgpack
import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtier.tiers.crash_points import crash_point
from kvtier.tiers.nvme_snapshot import (
    FINGERPRINT_BYTES,
    NO_PAGE,
    PAGE_COLUMNS,
    Pages,
    Snapshot,
)
from kvtier.tiers.nvme_state import (
    DIRECTORY_ID_BYTES,
    Head,
    check_owner,
    check_version,
    open_private,
    padded,
    parse_head,
    read_file,
    sealed_head,
    sync_directory,
    to_the_end,
    unreadable,
    unwritable,
    write_whole,
)
from kvtier.tiers.plain_file import opened_plain

__all__ = [
    "CHECKPOINT",
    "CHECKPOINT_MAGIC",
    "CHECKPOINT_OLD",
    "CHECKPOINT_VERSION",
    "CheckpointFile",
    "CheckpointState",
    "encode_checkpoint",
    "oldest_number",
    "read_checkpoint",
    "write_checkpoint",
]

CHECKPOINT: Final = "checkpoint"
CHECKPOINT_OLD: Final = "checkpoint.old"
CHECKPOINT_TEMPORARY: Final = "checkpoint.tmp"
CHECKPOINT_MAGIC: Final = b"\x89KVTCKP\n"
CHECKPOINT_VERSION: Final = 2

_FIELDS: Final = struct.Struct("<16s5Q16sQ24x")
_FIELDS_OFFSET: Final = 16
_ALIGN: Final = 64
_READ_BYTES: Final = 1 << 20
#: Keys of absent pages that are written: so many, and one more for so many pages. So the file stays
#: within CHECKPOINT_BYTES_PER_PAGE and what the plan of the tier leaves for small files.
_ABSENT_MIN: Final = 1024
_PAGES_PER_ABSENT: Final = 16


class CheckpointState(Enum):
    MISSING = auto()
    GOOD = auto()
    BAD = auto()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckpointFile:
    """One file as it was found. `reason` says what is wrong with a BAD one, which has no snapshot;
    its `number` is 0 when not even the head can be believed.
    """

    path: Path
    state: CheckpointState
    reason: str = ""
    number: int = 0
    directory_id: bytes = b""
    snapshot: Snapshot | None = None


async def write_checkpoint(
    directory: Path,
    snapshot: Snapshot,
    *,
    number: int,
    directory_id: bytes,
    around: AbstractContextManager[None] | None = None,
) -> int:
    """Durably makes `snapshot` the newest checkpoint; the bytes of its file. `around` is entered,
    in a thread, while names change.

    A caller that is cancelled does not stop it. Raises DirectoryError, and then the checkpoints are
    as they were.
    """
    return await to_the_end(
        _write(directory, snapshot, number, directory_id, around or contextlib.nullcontext())
    )


async def _write(
    directory: Path,
    snapshot: Snapshot,
    number: int,
    directory_id: bytes,
    around: AbstractContextManager[None],
) -> int:
    parts = await asyncio.to_thread(
        encode_checkpoint, snapshot, number=number, directory_id=directory_id
    )
    temporary = directory / CHECKPOINT_TEMPORARY
    try:
        await _write_synced(temporary, parts)
        crash_point("checkpoint.written")
        await asyncio.to_thread(_publish, directory, directory_id, around)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise unwritable(directory / CHECKPOINT, error) from error
    return sum(part.nbytes for part in parts)


async def _write_synced(path: Path, parts: list[memoryview]) -> None:
    async with aiofiles.open(path, "wb", buffering=0, opener=open_private) as file:
        for part in parts:
            await write_whole(file, part)
        await asyncio.to_thread(os.fsync, file.fileno())


def _publish(directory: Path, directory_id: bytes, around: AbstractContextManager[None]) -> None:
    newest = directory / CHECKPOINT
    old = directory / CHECKPOINT_OLD
    # A damaged one must not take the place of the last that is whole; nor one that lacks devices
    # that of the last which has their pages.
    found = _whole(newest, directory_id)
    is_next_old = found is not None and not (found.waits and _whole(old, directory_id) is not None)
    with around:
        if is_next_old:
            newest.replace(old)
        (directory / CHECKPOINT_TEMPORARY).replace(newest)
        sync_directory(directory)


def oldest_number(directory: Path) -> int:
    """The number of the oldest checkpoint that a start could need; 0 when there is none.

    Journals from this number on are needed too. Raises DirectoryError when a file cannot be read.
    """
    numbers = []
    for name in (CHECKPOINT, CHECKPOINT_OLD):
        try:
            with opened_plain(directory / name) as file:
                head = parse_head(file.read(4096), CHECKPOINT_MAGIC)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise unreadable(directory / name, error) from error
        if isinstance(head, Head) and head.version in _READERS:
            numbers.append(_Fields.of(head).number)
    return min(numbers, default=0)


def read_checkpoint(path: Path, directory_id: bytes | None = None) -> CheckpointFile:
    """What is in the file at `path`; with `directory_id` it must be of that daemon directory.

    Damage is told in the answer. Raises DirectoryError when the file cannot be read, is of a
    version that this build does not know, or of another directory.
    """
    blob = read_file(path)
    if blob is None:
        return CheckpointFile(path=path, state=CheckpointState.MISSING)
    head = parse_head(blob, CHECKPOINT_MAGIC)
    if not isinstance(head, Head):
        return CheckpointFile(path=path, state=CheckpointState.BAD, reason=head)
    check_version(path, head.version, _READERS)
    fields = _Fields.of(head)
    if directory_id is not None:
        check_owner(path, fields.directory_id, directory_id)
    found = _READERS[head.version](blob, head.head_bytes, fields)
    return CheckpointFile(
        path=path,
        state=CheckpointState.BAD if isinstance(found, str) else CheckpointState.GOOD,
        reason=found if isinstance(found, str) else "",
        number=fields.number,
        directory_id=fields.directory_id,
        snapshot=None if isinstance(found, str) else found,
    )


def encode_checkpoint(snapshot: Snapshot, *, number: int, directory_id: bytes) -> list[memoryview]:
    """The file, in pieces; columns are not copied. Of many absent pages only those are in it that
    the hottest pages come after."""
    assert len(directory_id) == DIRECTORY_ID_BYTES, directory_id
    table = _table(snapshot)
    pages = snapshot.pages.with_absent_max(_ABSENT_MIN + len(snapshot.pages) // _PAGES_PER_ABSENT)
    body = [memoryview(table)]
    for (name, kind, _), (_, column) in zip(PAGE_COLUMNS, pages.columns(), strict=True):
        plain = np.ascontiguousarray(column, np.dtype(kind))
        assert np.array_equal(plain, column), f"{name} does not fit {kind}"
        body.append(plain.reshape(-1).view(np.uint8).data)
    pieces = [piece for part in body for piece in (part, memoryview(_padding(part.nbytes)))]
    total = xxhash.xxh3_128()
    for piece in pieces:
        total.update(piece)
    body_bytes = sum(piece.nbytes for piece in pieces)
    fields = _FIELDS.pack(
        directory_id,
        number,
        snapshot.last_generation,
        len(pages),
        len(table),
        _HEAD_BYTES + body_bytes,
        total.digest(),
        pages.absent,
    )
    return [memoryview(sealed_head(CHECKPOINT_MAGIC, CHECKPOINT_VERSION, fields)), *pieces]


def _table(snapshot: Snapshot) -> bytes:
    table: dict[str, Any] = {
        "families": [[fingerprint, number] for fingerprint, number in snapshot.families],
        "classes": sorted([slab, size] for slab, size in snapshot.classes.items()),
        "in_flight": list(snapshot.in_flight),
    }
    if snapshot.waits:
        table["waits"] = sorted([device, pages] for device, pages in snapshot.waits.items())
    packed: bytes = msgpack.packb(table, use_bin_type=True)
    return packed


def _padding(length: int) -> bytes:
    return bytes(padded(length, _ALIGN) - length)


@dataclass(frozen=True, slots=True)
class _Fields:
    """The head, from version 1 on; what a version does not know is zero there."""

    directory_id: bytes
    number: int
    last_generation: int
    pages: int
    table_bytes: int
    file_bytes: int
    body_sum: bytes
    absent: int

    @classmethod
    def of(cls, head: Head) -> _Fields:
        return cls(*_FIELDS.unpack_from(head.fields, _FIELDS_OFFSET))


_HEAD_BYTES: Final = len(sealed_head(CHECKPOINT_MAGIC, CHECKPOINT_VERSION, bytes(_FIELDS.size)))


def _read_version_1(blob: bytes, start: int, fields: _Fields) -> Snapshot | str:
    return _read(blob, start, replace(fields, absent=0))


def _read(blob: bytes, start: int, fields: _Fields) -> Snapshot | str:
    """The snapshot, or what is wrong."""
    if len(blob) != fields.file_bytes:
        return f"{len(blob)} bytes where {fields.file_bytes} belong"
    if xxhash.xxh3_128_digest(memoryview(blob)[start:]) != fields.body_sum:
        return "the sum of its body does not match"
    # From here on only a faulty writer can have made it wrong.
    try:
        table = msgpack.unpackb(blob[start : start + fields.table_bytes], raw=False)
        snapshot = Snapshot(
            last_generation=fields.last_generation,
            classes={int(slab): int(size) for slab, size in table["classes"]},
            families=tuple((bytes(name), int(number)) for name, number in table["families"]),
            pages=_pages(blob, start + padded(fields.table_bytes, _ALIGN), fields),
            in_flight=tuple(int(generation) for generation in table["in_flight"]),
            waits={int(device): int(count) for device, count in table.get("waits", ())},
        )
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        return f"its content makes no sense: {error}"
    return snapshot if _is_consistent(snapshot) else "its content contradicts itself"


_READERS: Final[dict[int, Callable[[bytes, int, _Fields], Snapshot | str]]] = {
    1: _read_version_1,
    2: _read,
}


def _pages(blob: bytes, start: int, fields: _Fields) -> Pages:
    columns: dict[str, NDArray[Any]] = {}
    for name, kind, width in PAGE_COLUMNS:
        count = fields.pages + (fields.absent if name == "key" else 0)
        column = np.frombuffer(blob, kind, count * width, start)
        columns[name] = column.reshape(count, width) if width > 1 else column
        start += padded(column.nbytes, _ALIGN)
    return Pages(**columns)


def _is_consistent(snapshot: Snapshot) -> bool:
    pages = snapshot.pages
    return (
        all(len(fingerprint) == FINGERPRINT_BYTES for fingerprint, _ in snapshot.families)
        and bool((pages.family < len(snapshot.families)).all())
        and bool(((pages.parent >= NO_PAGE) & (pages.parent < len(pages.key))).all())
        and bool((pages.generation <= snapshot.last_generation).all())
        and all(0 <= generation < 1 << 64 for generation in snapshot.in_flight)
    )


@dataclass(frozen=True, slots=True)
class _Whole:
    """A file that passes its sums. `waits`: it lacks the pages of devices."""

    waits: bool


def _whole(path: Path, directory_id: bytes) -> _Whole | None:
    """None unless head and body pass their sums. Does not keep the file in memory."""
    total = xxhash.xxh3_128()
    size = 0
    table = bytearray()
    try:
        with opened_plain(path) as file:
            head = parse_head(file.read(_HEAD_BYTES), CHECKPOINT_MAGIC)
            if not isinstance(head, Head) or head.version not in _READERS:
                return None
            fields = _Fields.of(head)
            for block in _blocks(file.read):
                total.update(block)
                table += block[: max(0, fields.table_bytes - size)]
                size += len(block)
    except OSError:
        return None
    is_sound = (
        fields.directory_id == directory_id
        and fields.file_bytes == _HEAD_BYTES + size
        and fields.body_sum == total.digest()
    )
    if not is_sound:
        return None
    try:
        return _Whole(bool(msgpack.unpackb(table, raw=False).get("waits")))
    except (AttributeError, ValueError):
        return None


def _blocks(read: Callable[[int], bytes]) -> Iterator[bytes]:
    while block := read(_READ_BYTES):
        yield block
