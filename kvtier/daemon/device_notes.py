"""Devices note how far the daemon directory has got, so that a start beside them finds out that it
was given an older copy of the directory (tiers/nvme_noted.py).

At the start before READY, within a second of a new journal or of the end of a namespace, and at the
end. What they note is durable in the directory by then, so a process that is killed anywhere leaves
devices that know less, never more. A device that cannot take the note (full, read-only, away) knows
what it knew. Event loop's thread; files are written by a thread of each device, apart from those
that serve it: a note that takes long says nothing about the device.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

from kvtier.core.store import Store
from kvtier.daemon.device_health import DeviceHealth
from kvtier.daemon.devices import Devices
from kvtier.daemon.durability import Durability
from kvtier.daemon.registry import Registry
from kvtier.errors import Busy, TierIOError
from kvtier.tiers.base import TierOperation
from kvtier.tiers.crash_points import crash_point
from kvtier.tiers.io_pool import IoClass, IoPool
from kvtier.tiers.nvme_noted import Noted

__all__ = ["DeviceNotes"]

log = logging.getLogger(__name__)

#: How long somebody waits for a note: a start, say.
_NOTE_S = 2.0


class DeviceNotes:
    """`retry_s`: so long a device that refused a note is left alone."""

    def __init__(
        self,
        devices: Devices,
        durability: Durability,
        store: Store,
        registry: Registry,
        *,
        retry_s: float,
    ) -> None:
        self._devices = devices
        self._durability = durability
        self._store = store
        self._registry = registry
        self._retry_s = retry_s
        #: What each device has noted in this boot: journal, and number of a namespace.
        self._done: dict[int, tuple[int, int]] = {}
        #: Those that refused, of which the log has heard, and when they are asked again.
        self._refused: dict[int, float] = {}
        self._pools = {
            number: IoPool(threads=1, name=f"kvtier-note{number}", queue_max=1)
            for number in devices.health
        }

    def close(self) -> None:
        """A note that hangs is left alone."""
        for pool in self._pools.values():
            pool.close(0)

    async def note(self, *, is_last: bool = False) -> None:
        """Does nothing where all is noted. What fails here is found out, and told, by others.
        `is_last`: those that refused are asked once more, for there is no later."""
        noted = Noted(
            journal=self._durability.number,
            generation=self._store.snapshots.last_generation,
            names=self._registry.last_number,
        )
        if not noted.journal:
            return
        news, now = (noted.journal, noted.names), time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number, health in self._devices.health.items():
                is_able = health.online and not health.read_only
                is_due = is_last or now >= self._refused.get(number, 0.0)
                hangs = self._pools[number].longest_s(now) >= _NOTE_S
                if is_able and is_due and not hangs and self._done.get(number) != news:
                    group.create_task(self._note(health, noted))

    async def _note(self, health: DeviceHealth, noted: Noted) -> None:
        number = health.device.number
        try:
            job = self._pools[number].submit(IoClass.DEMOTE, partial(_write, health, noted))
            try:
                async with asyncio.timeout(_NOTE_S):  # also of waiting for one that may hang
                    await job.wait(None)
            finally:
                job.cancel()  # one that has not begun never does: the next has more to note
        except (Busy, TimeoutError):
            return  # next time
        except TierIOError as error:
            if number not in self._refused:
                extra = {"path": str(health.device.path), "reason": str(error)}
                log.warning("nvme.device_not_noted", extra=extra)
            self._refused[number] = time.monotonic() + self._retry_s
            return
        self._done[number] = noted.journal, noted.names
        self._refused.pop(number, None)


def _write(health: DeviceHealth, noted: Noted) -> None:
    """A thread of the device. Raises TierIOError."""
    crash_point("device.before_note")
    try:
        health.device.directory.note(noted)
    except OSError as error:
        raise health.device.failed(TierOperation.WRITE, error) from error
    crash_point("device.noted")
