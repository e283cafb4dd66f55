"""What a recovery begins with: which of the two checkpoints, and the journals from it on.

The newest whole one; the one before it where the newest is damaged, and where the newest lacks the
pages of a device that is back. With all journals since, the older one is as good, only slower.

Nothing is written. Synchronous, from any thread.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import pairwise
from pathlib import Path

from kvtier.tiers.nvme_checkpoint import (
    CHECKPOINT,
    CHECKPOINT_OLD,
    CheckpointFile,
    CheckpointState,
    read_checkpoint,
)
from kvtier.tiers.nvme_journal import journal_paths
from kvtier.tiers.nvme_lengths import JournalLengths, read_lengths

__all__ = ["Base", "Chosen", "choose"]


class Base(Enum):
    """Which checkpoint. AWAITED is the one before the newest, for a device that is back."""

    NEWEST = auto()
    OLD = auto()
    AWAITED = auto()
    NONE = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """`why`: why no page can be trusted, or "". `waits`: devices whose pages the checkpoint lacks,
    and about how many; `forgotten` names those that are back and whose pages nothing tells of.
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


def choose(directory: Path, directory_id: bytes, present: Collection[int] | None) -> Chosen:
    """`present` are the numbers of the devices that can be read; None: all there are.

    Raises DirectoryError: a file cannot be read, is of a version that this build does not know, or
    of another directory.
    """
    newest = read_checkpoint(directory / CHECKPOINT, directory_id)
    old: CheckpointFile | None = None
    if newest.state is not CheckpointState.GOOD or _is_back(newest, present):
        old = read_checkpoint(directory / CHECKPOINT_OLD, directory_id)
    paths = journal_paths(directory)
    lengths = read_lengths(directory, directory_id)
    bad = tuple(f for f in (newest, old) if f is not None and f.state is CheckpointState.BAD)
    base, file, forgotten = _base(newest, old, sorted(paths), lengths)
    numbers = [number for number in sorted(paths) if file is not None and number >= file.number]
    known = [found.number for found in (*bad, newest, *([file] if file else []))]
    return Chosen(
        base=base,
        file=file,
        why=_why_lost(file, numbers, lengths, is_used=bool(paths or bad or lengths.of)),
        bad=bad,
        journals=tuple(paths[number] for number in numbers),
        lengths=lengths,
        next_number=max([0, *paths, *known]) + 1,
        waits=dict(file.snapshot.waits) if file is not None and file.snapshot is not None else {},
        last_generation=newest.snapshot.last_generation if newest.snapshot is not None else 0,
        forgotten=forgotten,
    )


def _is_back(newest: CheckpointFile, present: Collection[int] | None) -> bool:
    waits = newest.snapshot.waits if newest.snapshot is not None else {}
    return any(present is None or device in present for device in waits)


def _base(
    newest: CheckpointFile,
    old: CheckpointFile | None,
    numbers: Sequence[int],
    lengths: JournalLengths,
) -> tuple[Base, CheckpointFile | None, tuple[str, ...]]:
    """(which, the file, what a device that is back has lost)"""
    is_good = newest.state is CheckpointState.GOOD
    if old is None:
        return Base.NEWEST, newest, ()
    if old.state is CheckpointState.GOOD:
        why = _why_lost(old, [n for n in numbers if n >= old.number], lengths, is_used=True)
        if not is_good:
            return Base.OLD, old, ()
        if not why:
            return Base.AWAITED, old, ()
    else:
        why = f"{old.path.name}: {old.reason or 'it is missing'}"
    if is_good and newest.snapshot is not None:
        waits = newest.snapshot.waits.items()
        words = [
            f"about {pages} pages of device {device} are lost: {why}" for device, pages in waits
        ]
        return Base.NEWEST, newest, tuple(words)
    return Base.NONE, None, ()


def _why_lost(
    chosen: CheckpointFile | None,
    numbers: Sequence[int],
    lengths: JournalLengths,
    *,
    is_used: bool,
) -> str:
    """Why deleted pages could come back, or ""; `numbers` are the journals from `chosen` on."""
    if chosen is None:
        return "there is no whole checkpoint" if is_used else ""
    for before, number in pairwise([chosen.number - 1, *numbers]):
        if number != before + 1:
            return f"journal {before + 1} is missing (journal {number} is there)"
    if numbers and lengths.newest > numbers[-1]:
        return f"journal {lengths.newest} is missing, the newest"
    return "" if numbers else f"journal {chosen.number} is missing"
