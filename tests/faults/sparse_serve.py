"""`kvtier serve` with a large arena that has memory only where a test wants pages to lie.

    python sparse_serve.py SLAB,... PYTHON -m kvtier serve WORDS

is the whole of `kvtier serve WORDS`, but that host memory is not asked for and not populated: only
the slabs with these numbers are used, and what is never written takes no memory. Its generations
begin at GENERATIONS_FROM, a little below 2**32. For the `prefix` of a DaemonProcess.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvtier.cli import main
from kvtier.core.generations import Generations
from kvtier.daemon import run
from kvtier.tiers.host import HostArena
from kvtier.tiers.memory import Headroom, MemoryGrant

__all__ = ["GENERATIONS_FROM", "serving_slabs"]

GENERATIONS_FROM = (1 << 32) - 64


def serving_slabs(*slabs: int) -> tuple[str, ...]:
    """What comes before the daemon's own command."""
    return (sys.executable, str(Path(__file__).resolve()), ",".join(map(str, slabs)))


class _SparseArena(HostArena):
    slabs: tuple[int, ...] = ()

    def start_populating(self, on_ready: Callable[[int], None], **_options: object) -> None:
        for slab in self.slabs:
            on_ready(slab)


def _granted(asked_bytes: int, **_options: object) -> MemoryGrant:
    return MemoryGrant(
        asked_bytes=asked_bytes,
        granted_bytes=asked_bytes,
        waited_s=0.0,
        headroom=Headroom(free_bytes=asked_bytes, limit="none"),
    )


def _generations(start: int, journal: Callable[[int], None]) -> Generations:
    return Generations(max(start, GENERATIONS_FROM), journal)


if __name__ == "__main__":
    _SparseArena.slabs = tuple(map(int, sys.argv[1].split(",")))
    run.check_memory = _granted
    run.Generations = _generations  # type: ignore[assignment,misc]
    run.HostArena = partial(_SparseArena, huge_pages=False)  # type: ignore[misc]
    sys.exit(main(sys.argv[sys.argv.index("serve") :]))
