"""What a recovery begins with: which of the two checkpoints, and the journals from it on.

The newest whole one; the one before it where the newest is damaged, and where the newest lacks the
pages of a device that is back. With all journals since, the older one is as good, only slower. It
is not where one of these journals is missing or damaged: then what was deleted could come back, and
the newest knows what was; so the pages that it lacks are given up.

Nothing is written. Synchronous, from any thread.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import pairwise
from pathlib import Path

from kvtier.errors import DirectoryError
from kvtier.tiers.nvme_checkpoint import (
    CHECKPOINT,
    CHECKPOINT_OLD,
    CheckpointFile,
    CheckpointState,
    read_checkpoint,
)
from kvtier.tiers.nvme_journal import journal_paths, read_journal
from kvtier.tiers.nvme_lengths import JournalLengths, read_lengths

__all__ = ["Base", "Chosen", "choose", "files_left"]


class Base(Enum):
    """Which checkpoint. AWAITED is the one before the newest, for a device that is back."""

    NEWEST = auto()
    OLD = auto()
    AWAITED = auto()
    NONE = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """`why`: why no page can be trusted, or "". `waits`: devices whose pages the checkpoint lacks,
    and about how many; `forgotten` names those whose pages nothing tells of any more.
    """

    base: Base
    file: CheckpointFile | None
    why: str = ""
    bad: tuple[CheckpointFile, ...] = ()
    journals: tuple[Path, ...] = ()
    lengths: JournalLengths = field(default_factory=JournalLengths)
    next_number: int = 1
    waits: dict[int, int] = field(default_factory=dict)
    #: No page up to here is new, whatever the base says.
    last_generation: int = 0
    forgotten: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Journals:
    """Those that are there, and how long each was."""

    paths: Mapping[int, Path]
    lengths: JournalLengths
    directory_id: bytes

    def since(self, checkpoint: CheckpointFile) -> list[int]:
        return [number for number in sorted(self.paths) if number >= checkpoint.number]


@dataclass(frozen=True, slots=True)
class _Choice:
    """`lost`: devices and pages that the base lacks and that no other file has; `why` that is."""

    base: Base
    file: CheckpointFile | None
    lost: Mapping[int, int] = field(default_factory=dict)
    why: str = ""


def files_left(directory: Path) -> list[Path]:
    """The files there that tell of pages, the checkpoints first."""
    checkpoints = [directory / CHECKPOINT, directory / CHECKPOINT_OLD]
    return [path for path in checkpoints if path.exists()] + list(journal_paths(directory).values())


def choose(directory: Path, directory_id: bytes, present: Collection[int] | None) -> Chosen:
    """`present` are the numbers of the devices that can be read; None: all there are.

    Raises DirectoryError: a file cannot be read, is of a version that this build does not know, or
    of another directory.
    """
    newest = read_checkpoint(directory / CHECKPOINT, directory_id)
    old: CheckpointFile | None = None
    is_back = any(present is None or device in present for device in _waits(newest))
    if newest.state is not CheckpointState.GOOD or is_back:
        old = read_checkpoint(directory / CHECKPOINT_OLD, directory_id)
    journals = _Journals(
        journal_paths(directory), read_lengths(directory, directory_id), directory_id
    )
    bad = tuple(f for f in (newest, old) if f is not None and f.state is CheckpointState.BAD)
    choice = _choice(newest, old, journals, present)
    file = choice.file
    known = [found.number for found in (*bad, newest, *([file] if file else []))]
    is_used = bool(journals.paths or bad or journals.lengths.of)
    waits = _waits(file) if file is not None else {}
    return Chosen(
        base=choice.base,
        file=file,
        why=_why_lost(file, journals, is_used=is_used),
        bad=bad,
        journals=tuple(journals.paths[n] for n in (journals.since(file) if file else ())),
        lengths=journals.lengths,
        next_number=max([0, *journals.paths, *known]) + 1,
        waits={device: pages for device, pages in waits.items() if device not in choice.lost},
        last_generation=newest.snapshot.last_generation if newest.snapshot is not None else 0,
        forgotten=tuple(
            f"about {pages} pages of device {device} are lost: {choice.why}"
            for device, pages in choice.lost.items()
        ),
    )


def _waits(file: CheckpointFile) -> Mapping[int, int]:
    return file.snapshot.waits if file.snapshot is not None else {}


def _choice(
    newest: CheckpointFile,
    old: CheckpointFile | None,
    journals: _Journals,
    present: Collection[int] | None,
) -> _Choice:
    """`old` is None where it is not needed."""
    if old is None:
        return _Choice(Base.NEWEST, newest)
    if newest.state is not CheckpointState.GOOD:
        if old.state is not CheckpointState.GOOD:
            return _Choice(Base.NONE, None)
        return _Choice(Base.OLD, old, _waits(old), f"{old.path.name} lacks them")
    waits = _waits(newest)
    if old.state is not CheckpointState.GOOD:
        why = f"{old.path.name}: {old.reason or 'it is missing'}"
        return _Choice(Base.NEWEST, newest, waits, why)
    why = _why_lost(old, journals, is_used=True) or _why_not(old, newest, journals)
    if why:
        return _Choice(Base.NEWEST, newest, waits, why)
    # It is the older one that has what waits, unless the one that had it was lost.
    lost = {device: pages for device, pages in waits.items() if device in _waits(old)}
    is_back = any(present is None or device in present for device in waits.keys() - lost.keys())
    chosen = (Base.AWAITED, old) if is_back else (Base.NEWEST, newest)
    return _Choice(*chosen, lost, f"{old.path.name} lacks them")


def _why_lost(chosen: CheckpointFile | None, journals: _Journals, *, is_used: bool) -> str:
    """Why deleted pages could come back, or ""."""
    if chosen is None:
        return "there is no whole checkpoint" if is_used else ""
    numbers = journals.since(chosen)
    for before, number in pairwise([chosen.number - 1, *numbers]):
        if number != before + 1:
            return f"journal {before + 1} is missing (journal {number} is there)"
    if numbers and journals.lengths.newest > numbers[-1]:
        return f"journal {journals.lengths.newest} is missing, the newest"
    return "" if numbers else f"journal {chosen.number} is missing"


def _why_not(old: CheckpointFile, newest: CheckpointFile, journals: _Journals) -> str:
    """Why entries can be missing that the newest needs not and the older one does, or ""."""
    for number in journals.since(old):
        if number >= newest.number:
            break
        path = journals.paths[number]
        try:
            found = read_journal(path, journals.directory_id)
        except DirectoryError as error:
            return str(error)
        if found.bad_frames or journals.lengths.lost_bytes(number, found.good_bytes):
            return f"{path.name} is damaged"
    return ""
