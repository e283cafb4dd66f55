"""What a store is made with: numbers that stay as they are while it lives.

A value, safe to share between threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtier.core.page import Tier

__all__ = ["StoreConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreConfig:
    boot_id: int
    pages_max: int
    #: Of these, what one tier may take; a tier that is not named has no bound of its own.
    tier_pages_max: Mapping[Tier, int] = field(default_factory=dict)
    seed: int
    events_max: int = 65_536
    quarantine_share: float = 0.05
    #: Of the host tier, what one holder may be granted ahead of time.
    grants_share: float = 0.02
