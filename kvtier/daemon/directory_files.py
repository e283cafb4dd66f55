"""Journal and checkpoints as files of the daemon directory, and whether they are still what this
daemon wrote.

A look compares each file with what it was after the last write: inode, length, and for files that
only this daemon replaces the time of change. It costs a stat a file. So that a file which was
removed, replaced or cut short under a running daemon is noticed before anything that would need
it is called durable. What is amiss stays so until a checkpoint has been written, which needs no
other file; nobody looks while one is put in its place. Methods that are async do their work in
threads; `create_journal`, `write_checkpoint` and `remove_old` one at a time.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from kvtier.errors import DirectoryError
from kvtier.tiers.nvme_checkpoint import (
    CHECKPOINT,
    CHECKPOINT_OLD,
    oldest_number,
    write_checkpoint,
)
from kvtier.tiers.nvme_journal import (
    Entry,
    Journal,
    Known,
    journal_number,
    journal_paths,
)
from kvtier.tiers.nvme_lengths import LengthNote
from kvtier.tiers.nvme_old_files import remove_old, remove_unused
from kvtier.tiers.nvme_snapshot import Snapshot
from kvtier.tiers.nvme_state import padded, sync_directory, unwritable
from kvtier.tiers.plain_file import opened_plain
from kvtier.tiers.sealed_file import Signature, signature_of

__all__ = ["DirectoryFiles", "JournalFile", "StateFiles"]


class JournalFile(Protocol):
    """See nvme_journal.Journal."""

    @property
    def size_bytes(self) -> int: ...
    @property
    def failed(self) -> bool: ...
    async def append(self, entries: Sequence[Entry], *, sync: bool) -> None: ...
    async def close(self) -> None: ...


class StateFiles(Protocol):
    """Where journal and checkpoints lie. All raise DirectoryError."""

    async def create_journal(self, number: int) -> JournalFile: ...

    async def write_checkpoint(self, snapshot: Snapshot, number: int) -> int:
        """Makes it the newest; its bytes."""

    async def remove_old(self) -> None:
        """Journals that no start can need any more."""

    async def older_bytes(self) -> int:
        """What the journals before the newest take on disk."""

    async def amiss(self) -> DirectoryError | None:
        """What is not as it was written, and is made good by a new journal and a checkpoint alone.
        Raises DirectoryError when nothing can be made good."""


class DirectoryFiles:
    """StateFiles in the daemon directory. `keep` makes its other files good, or raises
    DirectoryError when it is not the directory of this daemon any more; `names` is the number that
    a namespace was given last, as far as that is durable."""

    def __init__(
        self,
        directory: Path,
        directory_id: bytes,
        *,
        keep: Callable[[], None] = lambda: None,
        names: Callable[[], int] = lambda: 0,
    ) -> None:
        self._directory = directory
        self._directory_id = directory_id
        self._keep = keep
        self._names = names
        self._note = LengthNote(directory, directory_id)
        #: Those of this life that a start may need, which look after themselves; the present last.
        self._journals: list[Journal] = []
        #: Checkpoints, and journals of a life before, as they were after the last change of ours.
        self._known: dict[Path, Signature] = {}
        self._changing = threading.Lock()  # checkpoints, older journals, and what is known of them

    async def create_journal(self, number: int) -> JournalFile:
        def prepare() -> tuple[tuple[int, int], ...]:
            self._keep()
            try:
                self._note.drop(number)
            except OSError as error:
                raise unwritable(self._note.path, error) from error
            remove_unused(self._directory, number)
            # A start may have read what was written and not synced, and goes on from it.
            for path in journal_paths(self._directory).values():
                _sync(path)
            if not self._journals:
                with self._change():
                    pass  # what is there, a start has read
            return self._note.before(number)

        lengths = await asyncio.to_thread(prepare)
        journal = await Journal.create(
            self._directory,
            number=number,
            directory_id=self._directory_id,
            note=self._note,
            opening=Known(self._names(), lengths),
        )
        self._journals = [*self._journals, journal]
        return journal

    async def write_checkpoint(self, snapshot: Snapshot, number: int) -> int:
        await asyncio.to_thread(self._keep)
        return await write_checkpoint(
            self._directory,
            snapshot,
            number=number,
            directory_id=self._directory_id,
            around=self._change(),
        )

    async def remove_old(self) -> None:
        # The checkpoint before it is what a damaged one falls back to, and needs its journals.
        def remove() -> None:
            with self._changing:
                keep_from = oldest_number(self._directory)
                remove_old(self._directory, keep_from)
                self._journals = [one for one in self._journals if one.number >= keep_from]
                # Whatever else is not there any more was taken away.
                for path in [path for path in self._known if _is_below(path, keep_from)]:
                    del self._known[path]

        await asyncio.to_thread(remove)

    async def remove_checkpoints(self) -> None:
        """Durably: whatever else is there, no start finds a page of before. Raises DirectoryError,
        and then the newest may be there still, with every journal."""

        def remove() -> None:
            with self._changing:
                for name in (CHECKPOINT_OLD, CHECKPOINT):
                    (self._directory / name).unlink(missing_ok=True)
                    self._known.pop(self._directory / name, None)
                sync_directory(self._directory)

        await self._removing(remove)

    async def remove_journals(self) -> None:
        """All, when there is no checkpoint and nothing is written. Raises DirectoryError."""

        def remove() -> None:
            with self._changing:
                self._journals, self._known = [], {}
                for path in journal_paths(self._directory).values():
                    path.unlink(missing_ok=True)

        await self._removing(remove)

    async def _removing(self, remove: Callable[[], None]) -> None:
        try:
            await asyncio.to_thread(remove)
        except OSError as error:
            raise unwritable(self._directory, error) from error

    async def older_bytes(self) -> int:
        return await asyncio.to_thread(self._older_bytes)

    async def amiss(self) -> DirectoryError | None:
        return await asyncio.to_thread(self._amiss)

    def _amiss(self) -> DirectoryError | None:
        self._keep()
        with self._changing:
            for journal in self._journals:
                try:
                    journal.check()
                except OSError as error:
                    return unwritable(journal.path, error)
            for path, known in self._known.items():
                if not _is_as_known(path, known):
                    return DirectoryError(
                        f"{path} is not the file that this daemon wrote: it was removed or changed",
                        remedy="Leave the files of a running daemon alone; it writes them anew.",
                    )
        try:
            self._note.keep()
        except OSError as error:
            raise unwritable(self._note.path, error) from error
        return None

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Around a change of ours. What is there after it is as it should be, or is not needed by a
        start that begins with what was written; if it fails, what was amiss is so still."""
        with self._changing:
            yield
            older, newest = self._journals[:-1], self._journals[-1:]
            self._journals = [*filter(_is_whole, older), *newest]
            names = {journal.path for journal in self._journals}
            paths = [self._directory / name for name in (CHECKPOINT, CHECKPOINT_OLD)]
            with suppress(DirectoryError):  # the next look says why
                paths += [p for p in journal_paths(self._directory).values() if p not in names]
            found = {path: signature_of(path) for path in paths}
            self._known = {path: known for path, known in found.items() if known is not None}

    def _older_bytes(self) -> int:
        newest = self._journals[-1].path if self._journals else None
        total = 0
        for path in journal_paths(self._directory).values():
            found = signature_of(path)
            if found is not None and path != newest:
                total += padded(found[2], 4096)
        return total


def _is_whole(journal: Journal) -> bool:
    """Also: it is still needed."""
    try:
        journal.check()
    except OSError:
        return False
    return True


def _is_below(path: Path, keep_from: int) -> bool:
    number = journal_number(path)
    return number is not None and number < keep_from


def _is_as_known(path: Path, known: Signature) -> bool:
    found = signature_of(path)
    if found is None or path.name in (CHECKPOINT, CHECKPOINT_OLD):
        return found == known
    # A journal may get its last bytes while the next one is there already.
    return found[:2] == known[:2] and found[2] >= known[2]


def _sync(path: Path) -> None:
    try:
        with opened_plain(path) as file:
            os.fsync(file.fileno())
    except OSError as error:
        raise unwritable(path, error) from error
