"""A copy of the daemon directory, as it was at some start, beside devices that were used with newer
ones since: what is durable in it is true no more, and a start with it has to be refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtier.core.namespaces import Namespaces
from kvtier.tiers.nvme_journal import journal_paths
from kvtier.tiers.nvme_recovery import Base, Recovered
from tests.sim.sim_disk import StateDisk

__all__ = ["OlderCopy"]

#: A new copy is made every so many starts, and looked at in all between.
_STARTS = 4

#: recover() over the files of a directory, with a generation bound and a registry.
Recover = Callable[[Path, int, Namespaces], Recovered]


class OlderCopy:
    """Of one machine; `where` is an empty directory for the files."""

    def __init__(self, where: Path) -> None:
        self._where = where
        self._starts = 0
        self._generation_bound = 0
        self._namespaces: dict[str, Any] = {}
        self.refused = 0

    def at_start(self, disk: StateDisk, recover: Recover) -> None:
        """Before anything is written in this boot."""
        if self._starts % _STARTS == 0:
            disk.write_to(self._where)
            self._generation_bound, self._namespaces = disk.generation_bound, disk.namespaces
        elif disk.noted.journal > max(journal_paths(self._where), default=0):
            namespaces = Namespaces(namespaces_max=64)
            if self._namespaces:
                namespaces.load_state(self._namespaces)
            recovered = recover(self._where, self._generation_bound, namespaces)
            is_sound = recovered.report.base is Base.NONE or recovered.refusal is not None
            assert is_sound, "a start with an older directory is not refused"
            self.refused += recovered.refusal is not None
        self._starts += 1
