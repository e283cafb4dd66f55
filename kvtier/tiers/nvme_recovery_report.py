"""How a recovery went, in counts and in words. A value."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from kvtier.tiers.nvme_base import Base

__all__ = ["RecoveryReport"]

#: So many segments that are gone are named; the count is of all.
_NAMED_MAX: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """How a recovery went. The counts of records are those of nvme_survivors.Survivors.

    `bad_checkpoints` and `skipped` are texts, one a file or slab. `slots` were looked at in
    `segments_scanned` segments; `damaged` of them have a header that is not what was written,
    `misplaced` one of another place. `is_lost`: there may have been pages, and `why` none is
    trusted.
    """

    base: Base
    bad_checkpoints: tuple[str, ...]
    is_lost: bool
    why: str
    journals: int = 0
    entries: int = 0
    bad_frames: int = 0
    torn_bytes: int = 0
    #: Of the journals: what was acknowledged and is not there any more.
    cut: tuple[str, ...] = ()
    cut_bytes: int = 0
    segments_scanned: int = 0
    #: Segments that held pages, or may have, and are not there any more.
    gone: tuple[str, ...] = ()
    segments_gone: int = 0
    skipped: tuple[str, ...] = ()
    #: Pages of devices that were away and whose pages nothing tells of any more.
    forgotten: tuple[str, ...] = ()
    slots: int = 0
    damaged: int = 0
    misplaced: int = 0
    listed: int = 0
    found: int = 0
    unplaced: int = 0
    stale: int = 0
    dropped: int = 0
    deleted: int = 0
    ended: int = 0
    superseded: int = 0
    torn: int = 0

    def counts(self) -> dict[str, int]:
        """Every number of it by name."""
        numbers = {part.name: getattr(self, part.name) for part in fields(self)}
        return {name: value for name, value in numbers.items() if type(value) is int}

    def warnings(self) -> list[str]:
        """What an operator should hear of: damage, and what it cost."""
        said = list(self.bad_checkpoints)
        if self.is_lost:
            said.append(f"{self.why}: no page of earlier boots is trusted")
        if self.base is Base.OLD:
            said.append("the checkpoint before the newest was used")
        if self.bad_frames:
            said.append(f"{self.bad_frames} damaged entries of the journal were left out")
        said += [*self.forgotten, *self.cut, *self.gone[:_NAMED_MAX]]
        if len(self.gone) > _NAMED_MAX:
            said.append(f"{len(self.gone) - _NAMED_MAX} more segments are not there any more")
        if self.damaged or self.misplaced:
            said.append(f"{self.damaged + self.misplaced} records have a damaged header")
        return said + [f"{text} (not read)" for text in self.skipped]
