"""The journal: what happened to the NVMe tier since a checkpoint's snapshot, a few bytes an event.

Journal n goes on from checkpoint n and is created before its snapshot is taken; so from the oldest
checkpoint that a start may use there is a journal of every number on. Its bytes: nvme_frames.

Promise: when `append` with `sync` returns, its entries survive a power cut. A torn tail is what a
crash leaves: it is dropped and counted. A damaged frame is skipped alone and counted. After a write
that failed nobody knows what is in the file: the journal takes nothing more (`failed`), and its
owner begins another one.

The writer belongs to one event loop, system calls run outside of it; one writer a directory.
Reading is synchronous, from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import aiofiles

from kvtier.errors import DirectoryError
from kvtier.tiers.crash_points import crash_point, is_armed
from kvtier.tiers.nvme_frames import (
    JOURNAL_HEAD_BYTES,
    JOURNAL_MAGIC,
    JOURNAL_VERSION,
    JOURNAL_VERSIONS,
    Delete,
    Drop,
    Entry,
    JournalHead,
    Known,
    Mark,
    encode_frame,
    encode_head,
    frame_seed,
    parse_frames,
)
from kvtier.tiers.nvme_lengths import LengthNote
from kvtier.tiers.nvme_state import (
    Head,
    check_owner,
    check_version,
    open_private,
    parse_head,
    read_file,
    sync_directory,
    to_the_end,
    unreadable,
    unwritable,
    write_whole,
)

if TYPE_CHECKING:
    from aiofiles.threadpool.binary import AsyncFileIO

__all__ = [
    "Delete",
    "Drop",
    "Entry",
    "Journal",
    "JournalContents",
    "Known",
    "Mark",
    "journal_name",
    "journal_number",
    "journal_paths",
    "read_journal",
]

_NAME: Final = re.compile(r"journal-([0-9]{10}|[1-9][0-9]{10,18})")


@dataclass(slots=True)
class _Waiting:
    frame: bytes
    sync: bool
    done: asyncio.Future[None]


class Journal:
    """A journal that is written. Made by `create`; close it."""

    def __init__(
        self, file: AsyncFileIO, path: Path, number: int, seed: int, *, note: LengthNote | None
    ) -> None:
        self.path = path
        self.number = number
        self._note = note
        self._written_bytes = self._size_bytes = JOURNAL_HEAD_BYTES
        self._file = file
        self._seed = seed
        self._frames = 0
        self._waiting: list[_Waiting] = []
        self._writer: asyncio.Task[None] | None = None
        self._failure: OSError | None = None
        self._is_closed = False
        opened = os.fstat(file.fileno())
        self._identity = opened.st_dev, opened.st_ino

    @classmethod
    async def create(
        cls,
        directory: Path,
        *,
        number: int,
        directory_id: bytes,
        note: LengthNote | None = None,
        opening: Known | None = None,
    ) -> Journal:
        """Durably makes the journal `number`, with nothing in it but `opening`. Raises
        DirectoryError, also if it exists.

        `note` is told how much is durable, before anybody else hears of it.
        """
        work = cls._create(directory, number, directory_id, note, opening)
        return await to_the_end(work, cls._undo)

    @classmethod
    async def _create(
        cls,
        directory: Path,
        number: int,
        directory_id: bytes,
        note: LengthNote | None,
        opening: Known | None,
    ) -> Journal:
        path = directory / journal_name(number)
        try:
            file = await aiofiles.open(path, "xb", buffering=0, opener=_open_appending)
        except OSError as error:
            raise unwritable(path, error) from error
        journal = cls(file, path, number, frame_seed(directory_id, number), note=note)
        try:
            frame = journal._next_frame([opening]) if opening is not None else b""
            journal._written_bytes += len(frame)
            await write_whole(file, encode_head(directory_id, number) + frame)
            await asyncio.to_thread(os.fsync, file.fileno())
            await asyncio.to_thread(sync_directory, directory)
            if note is not None:
                await asyncio.to_thread(note.begin, number, journal._written_bytes)
        except DirectoryError:
            await journal._undo()
            raise
        except OSError as error:
            await journal._undo()
            raise unwritable(path, error) from error
        return journal

    async def _undo(self) -> None:
        """It was never there. Where that cannot be noted it stays, with nothing in it."""
        await self.close()
        with contextlib.suppress(OSError, DirectoryError):
            if self._note is not None:
                await asyncio.to_thread(self._note.drop, self.number)
            self.path.unlink()

    @property
    def size_bytes(self) -> int:
        """Bytes of the file, those that wait to be written included."""
        return self._size_bytes

    @property
    def failed(self) -> bool:
        """A write was refused: nothing can be appended any more."""
        return self._failure is not None

    async def append(self, entries: Sequence[Entry], *, sync: bool) -> None:
        """Returns when `entries`, all of them or none, survive the daemon; with `sync` also a power
        cut. Without entries and with `sync`: when everything appended before does.

        Appends that wait together share one write and one sync. A caller that is cancelled does not
        stop the write. Raises DirectoryError: the entries may be there or not.
        """
        self._check_usable()
        frame = self._next_frame(entries) if entries else b""
        done = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(frame, sync, done))
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_waiting())
        await done

    def _next_frame(self, entries: Sequence[Entry]) -> bytes:
        frame = encode_frame(entries, frame=self._frames, seed=self._seed)
        self._frames += 1
        self._size_bytes += len(frame)
        return frame

    async def close(self) -> None:
        """Closes the file once everything that waits is written; again does nothing."""
        if not self._is_closed:
            self._is_closed = True
            if self._writer is not None:
                await self._writer
            await self._file.close()

    def check(self) -> None:
        """Raises OSError unless the file of this name is still this one, with all that was written
        to it: a start finds nothing else. Any thread."""
        try:
            found = self.path.stat()
        except FileNotFoundError as error:
            raise OSError(errno.ESTALE, "it was removed") from error
        if (found.st_dev, found.st_ino) != self._identity:
            raise OSError(errno.ESTALE, "another file was put in its place")
        if found.st_size < self._written_bytes:
            raise OSError(errno.ESTALE, "it was cut short")

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise unwritable(self.path, self._failure) from self._failure
        if self._is_closed:
            raise DirectoryError(
                f"{self.path} is closed", remedy="Append to the journal that came after it."
            )

    async def _write_waiting(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                await self._write(batch)
        finally:
            self._writer = None

    async def _write(self, batch: list[_Waiting]) -> None:
        try:
            frames = b"".join(item.frame for item in batch)
            await self._write_bytes(frames)
            self._written_bytes += len(frames)
            _settle([item for item in batch if not item.sync])
            if any(item.sync for item in batch):
                await asyncio.to_thread(self._sync)
        except OSError as error:
            self._failure = error
            for item in self._taken_back(batch):
                item.done.set_exception(unwritable(self.path, error))
        except BaseException:
            # The loop is ending: nobody must wait for what never comes.
            for item in self._taken_back(batch):
                item.done.cancel()
            raise
        else:
            _settle(batch)

    def _sync(self) -> None:
        """A thread. In this order: what is noted must be true after a power cut."""
        os.fdatasync(self._file.fileno())
        self.check()
        if self._note is not None:
            self._note.note(self.number, self._written_bytes)

    def _taken_back(self, batch: list[_Waiting]) -> list[_Waiting]:
        """All that wait, but for those whose caller was cancelled or has its answer."""
        waiting, self._waiting = [*batch, *self._waiting], []
        return [item for item in waiting if not item.done.done()]

    async def _write_bytes(self, frames: bytes) -> None:
        if is_armed("journal.half"):
            half = len(frames) // 2
            await write_whole(self._file, frames[:half])
            crash_point("journal.half")
            frames = frames[half:]
        await write_whole(self._file, frames)
        crash_point("journal.written")


def _settle(items: list[_Waiting]) -> None:
    for item in items:
        if not item.done.done():  # else its caller was cancelled
            item.done.set_result(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalContents:
    """What a journal says. `bad_frames` counts the frames that are lost in the middle and a damaged
    head; `torn_bytes` is what comes after the last good frame, which ends at `good_bytes`.
    """

    path: Path
    number: int
    directory_id: bytes
    entries: tuple[Entry, ...]
    frames: int
    bad_frames: int
    torn_bytes: int
    good_bytes: int = 0
    is_head_damaged: bool = False


def read_journal(path: Path, directory_id: bytes | None = None) -> JournalContents:
    """The journal at `path`; without `directory_id`, of whichever daemon directory it says.

    Raises DirectoryError when the file cannot be read, is of a version that this build does not
    know, or of another directory or number.
    """
    blob = read_file(path)
    if blob is None:
        raise unreadable(path, FileNotFoundError(2, os.strerror(2)))
    named = _NAME.fullmatch(path.name)
    number = int(named[1]) if named else 0
    head = parse_head(blob, JOURNAL_MAGIC)
    version = JOURNAL_VERSION
    if isinstance(head, Head):
        check_version(path, head.version, JOURNAL_VERSIONS)
        version = head.version
        found = JournalHead.of(head)
        if directory_id is not None:
            check_owner(path, found.directory_id, directory_id)
        if named and found.number != number:
            raise DirectoryError(
                f"{path} is journal {found.number} under another name",
                remedy="Give the files of the daemon directory their names back.",
            )
        directory_id, number = found.directory_id, found.number
    # Under a damaged head the frames speak for themselves: their sums know directory and number.
    directory_id = directory_id or b""
    frames = parse_frames(blob, version=version, seed=frame_seed(directory_id, number))
    is_damaged = not isinstance(head, Head) and len(blob) >= JOURNAL_HEAD_BYTES
    return JournalContents(
        path=path,
        number=number,
        directory_id=directory_id,
        entries=frames.entries,
        frames=frames.good,
        bad_frames=frames.bad + is_damaged,
        # Shorter than its head: the file of a `create` that was cut off.
        torn_bytes=(torn := frames.torn_bytes if len(blob) >= JOURNAL_HEAD_BYTES else len(blob)),
        good_bytes=len(blob) - torn,
        is_head_damaged=is_damaged,
    )


def journal_paths(directory: Path) -> dict[int, Path]:
    """The journals of a daemon directory by number, in order. Raises DirectoryError."""
    try:
        found = [(match, path) for path in directory.iterdir() if (match := _match(path))]
    except OSError as error:
        raise unreadable(directory, error) from error
    return dict(sorted((int(match[1]), path) for match, path in found))


def journal_number(path: Path) -> int | None:
    """Of a path of `journal_paths`; None for any other file."""
    match = _match(path)
    return int(match[1]) if match else None


def _open_appending(path: str, flags: int) -> int:
    """What was cut off leaves the file shorter for good: no write goes past a hole."""
    return open_private(path, flags | os.O_APPEND)


def journal_name(number: int) -> str:
    return f"journal-{number:010d}"


def _match(path: Path) -> re.Match[str] | None:
    return _NAME.fullmatch(path.name)
