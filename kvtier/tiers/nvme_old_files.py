"""Files of the daemon directory that nothing needs any more: journals before the checkpoints, and
what writes that broke off have left.

Blocking; any thread, but none while a checkpoint or a journal is written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvtier.errors import DirectoryError
from kvtier.tiers.nvme_frames import JOURNAL_HEAD_BYTES, Known
from kvtier.tiers.nvme_journal import journal_name, journal_paths, read_journal
from kvtier.tiers.nvme_state import unwritable

__all__ = ["remove_old", "remove_unused"]

#: Of writers that rest while `remove_old` runs.
_LEFTOVERS: Final = ("checkpoint.tmp", "geometry.tmp")


def remove_old(directory: Path, keep_from: int) -> None:
    """Deletes the journals with a number below `keep_from`, and what broken writes left behind.

    Not while a checkpoint is written. Raises DirectoryError.
    """
    old = [path for number, path in journal_paths(directory).items() if number < keep_from]
    for path in [*old, *(directory / name for name in _LEFTOVERS)]:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise unwritable(path, error) from error


def remove_unused(directory: Path, number: int) -> None:
    """Deletes the journal `number` if nothing happened in it: left by a `create` that failed
    half-way and could not take it back. Raises DirectoryError."""
    path = directory / journal_name(number)
    try:
        if path.stat().st_size <= JOURNAL_HEAD_BYTES or _has_opening_alone(path):
            path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        raise unwritable(path, error) from error


def _has_opening_alone(path: Path) -> bool:
    try:
        found = read_journal(path)
    except DirectoryError:
        return False  # whatever it is, it stays
    return not found.bad_frames and not [e for e in found.entries if not isinstance(e, Known)]
