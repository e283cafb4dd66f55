"""Condemned copies whose bytes are kept for inspection, up to a share of their tier.

Past the share the oldest slots are used again; a copy that somebody is reading goes when the
reading ends. Slots of writers that vanished are quarantined too, but not here: no cap frees those.
The caller holds the store's lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kvtier.core.page import Tier
from kvtier.core.table import CopyTable

__all__ = ["NO_VERDICT", "Quarantine", "Verdict", "Why"]


class Why(StrEnum):
    """Why a copy was condemned; shown to people, and sent as it is."""

    NOBODY_SAYS = ""
    GET = "failed its checks in a get"
    PUT = "failed its checks in a put"
    COPY = "failed its checks when copied to NVMe"
    READ = "failed its checks when read from NVMe"
    SCRUB = "failed its checks in a scrub or verify"
    UNREADABLE = "could not be read in a scrub or verify"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`at` is in monotonic seconds, 0 where nobody says."""

    why: Why = Why.NOBODY_SAYS
    at: float = 0.0


NO_VERDICT: Final = Verdict()


class Quarantine:
    """`drain(row)` gives the slot of a condemned row back."""

    def __init__(
        self, table: CopyTable, bytes_max: dict[Tier, int], drain: Callable[[int], None]
    ) -> None:
        self._table = table
        self._bytes_max = bytes_max
        self._drain = drain
        self._rows: dict[Tier, deque[int]] = {tier: deque() for tier in bytes_max}
        self._bytes = dict.fromkeys(bytes_max, 0)
        self._verdicts: dict[int, Verdict] = {}

    def __contains__(self, row: int) -> bool:
        return row in self._rows[Tier(self._table.tier[row])]

    def __iter__(self) -> Iterator[int]:
        """Rows, the oldest of each tier first."""
        for rows in self._rows.values():
            yield from rows

    def kept_bytes(self, tier: Tier) -> int:
        """Bytes of the condemned copies of a tier."""
        return self._bytes[tier]

    def verdict(self, row: int) -> Verdict:
        """Of a row that is in it."""
        return self._verdicts[row]

    def add(self, row: int, verdict: Verdict) -> None:
        """A row that has just been condemned."""
        self._verdicts[row] = verdict
        tier = Tier(self._table.tier[row])
        self._rows[tier].append(row)
        self._bytes[tier] += self._table.record[row]
        self.trim(tier)

    def trim(self, tier: Tier) -> None:
        """Gives the oldest back until the tier's share is kept."""
        rows = self._rows[tier]
        for _ in range(len(rows)):
            if self._bytes[tier] <= self._bytes_max[tier]:
                break
            oldest = rows.popleft()
            if self._table.leases[oldest]:
                rows.append(oldest)
            else:
                self._give_back(tier, oldest)

    def remove(self, row: int) -> bool:
        """Gives one back; False when somebody is reading it."""
        if self._table.leases[row]:
            return False
        tier = Tier(self._table.tier[row])
        self._rows[tier].remove(row)
        self._give_back(tier, row)
        return True

    def _give_back(self, tier: Tier, row: int) -> None:
        self._bytes[tier] -= self._table.record[row]
        del self._verdicts[row]
        self._drain(row)
