"""What a store has done since its start."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Counters"]


@dataclass(slots=True)
class Counters:
    """Totals since the start. A key is counted once for each call that named it."""

    lookup_hits: int = 0
    lookup_misses: int = 0
    stored: int = 0
    exists: int = 0
    busy: int = 0
    stale_commits: int = 0
    deleted: int = 0
    evicted: int = 0
    evicted_last: int = 0  # of the evicted copies, those that were their page's last one
    condemned: int = 0
    slabs_moved: int = 0
