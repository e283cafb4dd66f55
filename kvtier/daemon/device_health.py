"""One device of the NVMe tier as it fares, and how it is tried.

`DeviceHealth` belongs to the event loop's thread; `probe` and `check` block as long as the device
does, and run on a thread of its pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvtier.core.room import Lost
from kvtier.errors import TierIOError
from kvtier.tiers.base import NO_NEW_FILES, errno_of
from kvtier.tiers.io_pool import IoPool
from kvtier.tiers.nvme_device import NvmeDevice
from kvtier.tiers.nvme_geometry import slab_number

__all__ = ["DeviceHealth", "check", "probe"]


@dataclass(slots=True)
class DeviceHealth:
    """One device at this moment. `reason` says why it is offline or cannot grow."""

    device: NvmeDevice
    pool: IoPool
    online: bool = True
    read_only: bool = False
    reason: str = ""
    failures: int = 0
    retry_at: float = 0.0
    grow_at: float = 0.0
    writes: int = 0  # begun and ended, each counts
    synced: int = 0  # of them, covered by a sync
    #: The pool of before the last failure, while a thread of it hangs in the system.
    stuck: IoPool | None = None
    segments: set[int] = field(default_factory=set)  # local numbers that are granted
    pages_lost: int = 0  # that went with it, each time that it went offline
    #: And those where somebody else's file lies, or pages that could not be read at the start.
    occupied: set[int] = field(default_factory=set)
    #: What its files take, as of the last change: asking a device that hangs would hang.
    disk_bytes: int = 0
    #: Pages that are lost with it and wait to be taken out of the books, in slices.
    lost: list[Lost] = field(default_factory=list)

    @property
    def slabs(self) -> list[int]:
        """Those of its segments."""
        return [slab_number(self.device.number, local) for local in sorted(self.segments)]

    def free_number(self, segments_max: int, can_grant: Callable[[int], bool]) -> int | None:
        """The lowest local number for one more segment."""
        for local in range(segments_max):
            is_taken = local in self.segments or local in self.occupied
            if not is_taken and can_grant(slab_number(self.device.number, local)):
                return local
        return None


def probe(health: DeviceHealth) -> TierIOError | None:
    """Why no new file can be made there, or None. A thread of its own. Raises TierIOError for
    anything else that is amiss."""
    refusal = None
    try:
        health.device.probe()
    except TierIOError as error:
        if errno_of(error) not in NO_NEW_FILES:
            raise
        refusal = error
    health.disk_bytes = health.device.disk_bytes()
    return refusal


def check(health: DeviceHealth) -> TierIOError | None:
    """As `probe`, for a device that was away."""
    refusal = probe(health)
    health.device.look_again()
    return refusal
