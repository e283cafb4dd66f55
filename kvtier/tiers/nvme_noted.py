"""How far a daemon directory has got, and why no daemon starts with one that is older than what
lies on its devices.

Three numbers of a directory only rise. Devices have noted them (nvme_directory), journals the last
of them (nvme_frames.Known), and records name generations; always after they were durable in the
directory. So whoever knows a higher number knows a newer directory: what was deleted, bumped or
numbered since is forgotten in this one, would be back, and would be given out again. A device that
knows less was away, or is an older copy itself; what is on it is judged by the directory.

Pure, safe from any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvtier.errors import DirectoryError
from kvtier.tiers.sealed_file import DISCARD, LOST_STATE

__all__ = ["NOTHING_NOTED", "Evidence", "Noted", "refusal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """The number of the newest journal, the highest generation that may have been used, and the
    number that a namespace was given last. Zeros: nothing is noted."""

    journal: int = 0
    generation: int = 0
    names: int = 0


NOTHING_NOTED: Final = Noted()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What pages, journals and devices tell of a directory: the highest generation, the highest
    number of a namespace, namespace generations (fingerprint, generation) that are not there yet,
    and what each device has noted. `has_base`: pages are trusted, by a checkpoint and journals.
    """

    has_base: bool
    generation: int = 0
    names: int = 0
    unborn: tuple[tuple[bytes, int], ...] = ()
    on_devices: Mapping[Path, Noted] = field(default_factory=dict)


def refusal(reached: Noted, evidence: Evidence) -> DirectoryError | None:
    """Why no daemon may start with a directory that says that it has `reached` so far; None: it
    may."""
    path, noted = _furthest(evidence.on_devices)
    if evidence.has_base and noted.journal > reached.journal:
        # Without a base no page of before is trusted, whichever journals are gone.
        return DirectoryError(
            f"{path} was used with journal {noted.journal} of the daemon directory, which has"
            f" nothing after journal {reached.journal}: the directory, or its checkpoint and"
            " journals, is an older copy, in which what was deleted or bumped since is not",
            remedy=f"Put the directory back that was used last with these devices, or {DISCARD}.",
        )
    generation = max(evidence.generation, noted.generation)
    if generation > reached.generation:
        return DirectoryError(
            f"NVMe holds generation {generation}, the daemon directory says that"
            f" {reached.generation} is the last: its file `generations` is older than the pages",
            remedy=f"Put the file back as it was last, or {DISCARD}.",
        )
    if evidence.unborn:
        fingerprint, number = evidence.unborn[0]
        return _older_names(
            f"NVMe holds pages of generation {number} of namespace {fingerprint.hex()[:16]},"
            " which the daemon directory does not know yet"
        )
    names = max(evidence.names, noted.names)
    if names > reached.names:
        return _older_names(
            f"namespaces were given the numbers up to {names}, of which the daemon directory knows"
            f" those up to {reached.names}"
        )
    return None


def _older_names(what: str) -> DirectoryError:
    words = f"{what}: its file `namespaces` is older than the pages"
    return DirectoryError(words, remedy=LOST_STATE)


def _furthest(on_devices: Mapping[Path, Noted]) -> tuple[Path | None, Noted]:
    """The device of the newest journal, with the highest of every number."""
    if not on_devices:
        return None, Noted()
    every = list(on_devices.values())
    highest = Noted(
        journal=max(noted.journal for noted in every),
        generation=max(noted.generation for noted in every),
        names=max(noted.names for noted in every),
    )
    return max(on_devices, key=lambda path: on_devices[path].journal), highest
