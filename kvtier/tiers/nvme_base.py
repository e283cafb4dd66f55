"""What a recovery begins with: which of the two checkpoints, and the journals from it on.

The newest whole one; the one before it where the newest is damaged, and where the newest lacks the
pages of a device that is back. With all journals since, the older one is as good, only slower. It
is not where one of these journals is missing or damaged: then what was deleted could come back, and
the newest knows what was; so the pages that it lacks are given up.

Nothing is written. Synchronous, from any thread.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
from kvtier.tiers.nvme_geometry import GEOMETRY_FILE
from kvtier.tiers.nvme_journal import JournalContents, Known, journal_paths, read_journal
from kvtier.tiers.nvme_lengths import JournalLengths, read_lengths
from kvtier.tiers.sealed_file import LOST_STATE

__all__ = ["Base", "Chosen", "choose", "files_left", "without_geometry"]


class Base(Enum):
    """Which checkpoint. AWAITED is the one before the newest, for a device that is back."""

    NEWEST = auto()
    OLD = auto()
    AWAITED = auto()
    NONE = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """`why`: why no page can be trusted, or "". `waits`: devices whose pages the checkpoint lacks,
    and about how many; `forgotten` names those whose pages nothing tells of any more. `newest` is
    the highest number of a journal or checkpoint that anything in the directory tells of.
    """

    base: Base
    file: CheckpointFile | None
    why: str = ""
    bad: tuple[CheckpointFile, ...] = ()
    journals: tuple[JournalContents, ...] = ()
    lengths: JournalLengths = field(default_factory=JournalLengths)
    next_number: int = 1
    newest: int = 0
    waits: dict[int, int] = field(default_factory=dict)
    #: No page up to here is new, whatever the base says.
    last_generation: int = 0
    forgotten: tuple[str, ...] = ()

    @property
    def bad_words(self) -> tuple[str, ...]:
        return tuple(f"{file.path.name}: {file.reason}" for file in self.bad)


@dataclass(slots=True)
class _Journals:
    """Those that are there, and how long each was; `read` those that are needed first, for later
    ones know how long others were."""

    paths: Mapping[int, Path]
    lengths: JournalLengths
    directory_id: bytes
    contents: dict[int, JournalContents] = field(default_factory=dict)

    def read(self, numbers: Sequence[int]) -> tuple[JournalContents, ...]:
        """Raises DirectoryError."""
        for number in [number for number in numbers if number not in self.contents]:
            found = read_journal(self.paths[number], self.directory_id)
            known = [entry for entry in found.entries if isinstance(entry, Known)]
            self.lengths = self.lengths.with_more(item for one in known for item in one.lengths)
            self.contents[number] = found
        return tuple(self.contents[number] for number in numbers)

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


def without_geometry(directory: Path) -> DirectoryError | None:
    """Why no daemon starts with a directory without `geometry`; None: nothing needs one."""
    left = files_left(directory)
    if not left:
        return None
    return DirectoryError(
        f"{directory / GEOMETRY_FILE[0]} is missing although {left[0].name} is there:"
        " nothing says where the pages lie",
        remedy=LOST_STATE,
    )


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
    lengths = read_lengths(directory, directory_id)
    journals = _Journals(journal_paths(directory), lengths, directory_id)
    bad = tuple(f for f in (newest, old) if f is not None and f.state is CheckpointState.BAD)
    choice = _choice(newest, old, journals, present)
    file = choice.file
    known = [found.number for found in (*bad, newest, *([file] if file else []))]
    is_used = bool(journals.paths or bad or journals.lengths.of)
    waits = _waits(file) if file is not None else {}
    # What is noted counts as well: devices may have noted a journal that is gone.
    newest_number = max([0, *journals.paths, *known, lengths.newest])
    why = _why_lost(file, journals, is_used=is_used)
    return Chosen(
        base=choice.base,
        file=file,
        why=why,
        bad=bad,
        journals=journals.read(journals.since(file)) if file is not None and not why else (),
        lengths=journals.lengths,
        next_number=newest_number + 1,
        newest=newest_number,
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
    before = [number for number in journals.since(old) if number < newest.number]
    journals.read(journals.since(newest))  # they know how long the last two of these were
    try:
        contents = journals.read(before)
    except DirectoryError as error:
        return str(error)
    for found in contents:
        if found.bad_frames or journals.lengths.lost_bytes(found.number, found.good_bytes):
            return f"{found.path.name} is damaged"
    return ""
