"""Journal and checkpoints as files of the daemon directory, and whether they are still what this
daemon wrote.

A look compares each file with what it was after the last write: inode, length, and for files that
only this daemon replaces the time of change. It costs a stat a file. So that a file which was
removed, replaced or cut short under a running daemon is noticed before anything that would need
it is called durable. Methods that are async do their work in threads; `create_journal`,
`write_checkpoint` and `remove_old` one at a time.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from kvtier.errors import DirectoryError
from kvtier.tiers.nvme_checkpoint import (
    CHECKPOINT,
    CHECKPOINT_OLD,
    oldest_number,
    write_checkpoint,
)
from kvtier.tiers.nvme_journal import Entry, Journal, journal_paths, remove_old, remove_unused
from kvtier.tiers.nvme_lengths import LengthNote
from kvtier.tiers.nvme_snapshot import Snapshot
from kvtier.tiers.nvme_state import unwritable
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

    async def amiss(
        self, journal: JournalFile | None, *, only_journal: bool
    ) -> DirectoryError | None:
        """What is not as it was written, and is made good by a checkpoint alone. With
        `only_journal` checkpoints and older journals are not looked at. Raises DirectoryError when
        nothing can be made good."""


class DirectoryFiles:
    """StateFiles in the daemon directory. `keep` makes its other files good, or raises
    DirectoryError when it is not the directory of this daemon any more."""

    def __init__(
        self, directory: Path, directory_id: bytes, *, keep: Callable[[], None] = lambda: None
    ) -> None:
        self._directory = directory
        self._directory_id = directory_id
        self._keep = keep
        self._note = LengthNote(directory, directory_id)
        self._journal: Journal | None = None
        #: Checkpoints and older journals, as they were after the last change of ours.
        self._known: dict[Path, Signature] = {}

    async def create_journal(self, number: int) -> JournalFile:
        def prepare() -> None:
            self._keep()
            remove_unused(self._directory, number)
            # A start may have read what was written and not synced, and goes on from it.
            for path in journal_paths(self._directory).values():
                _sync(path)
            self._learn(newest=None)  # those of before go on being needed

        await asyncio.to_thread(prepare)
        self._journal = await Journal.create(
            self._directory, number=number, directory_id=self._directory_id, note=self._note
        )
        return self._journal

    async def write_checkpoint(self, snapshot: Snapshot, number: int) -> int:
        await asyncio.to_thread(self._keep)
        try:
            return await write_checkpoint(
                self._directory, snapshot, number=number, directory_id=self._directory_id
            )
        finally:
            await asyncio.to_thread(self._learn, newest=self._journal)

    async def remove_old(self) -> None:
        # The checkpoint before it is what a damaged one falls back to, and needs its journals.
        def remove() -> None:
            remove_old(self._directory, oldest_number(self._directory))
            self._learn(newest=self._journal)

        await asyncio.to_thread(remove)

    async def amiss(
        self, journal: JournalFile | None, *, only_journal: bool
    ) -> DirectoryError | None:
        return await asyncio.to_thread(self._amiss, journal, only_journal)

    def _amiss(self, journal: JournalFile | None, only_journal: bool) -> DirectoryError | None:
        self._keep()
        if isinstance(journal, Journal):
            try:
                journal.check()
            except OSError as error:
                return unwritable(journal.path, error)
            try:
                self._note.keep()
            except OSError as error:
                raise unwritable(self._note.path, error) from error
        for path, known in [] if only_journal else list(self._known.items()):
            if not _is_as_known(path, known):
                return DirectoryError(
                    f"{path} is not the file that this daemon wrote: it was removed or changed",
                    remedy="Leave the files of a running daemon alone; it writes them anew.",
                )
        return None

    def _learn(self, *, newest: Journal | None) -> None:
        """`newest` looks after itself (`Journal.check`)."""
        current = newest.path if newest is not None else None
        paths = [self._directory / name for name in (CHECKPOINT, CHECKPOINT_OLD)]
        with suppress(DirectoryError):  # the next look says why
            paths += [path for path in journal_paths(self._directory).values() if path != current]
        found = {path: signature_of(path) for path in paths}
        self._known = {path: known for path, known in found.items() if known is not None}


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
