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
    def __init__(
        self, devices: Devices, durability: Durability, store: Store, registry: Registry
    ) -> None:
        self._devices = devices
        self._durability = durability
        self._store = store
        self._registry = registry
        #: What each device has noted in this boot: journal, and number of a namespace.
        self._done: dict[int, tuple[int, int]] = {}
        self._refused: set[int] = set()  # those that the log has heard of
        self._pools = {
            number: IoPool(threads=1, name=f"kvtier-note{number}", queue_max=1)
            for number in devices.health
        }

    def close(self) -> None:
        """A note that hangs is left alone."""
        for pool in self._pools.values():
            pool.close(0)

    async def note(self) -> None:
        """Does nothing where all is noted. What fails here is found out, and told, by others."""
        noted = Noted(
            journal=self._durability.number,
            generation=self._store.snapshots.last_generation,
            names=self._registry.last_number,
        )
        news = noted.journal, noted.names
        async with asyncio.TaskGroup() as group:
            for number, health in self._devices.health.items():
                is_able = health.online and not health.read_only
                if noted.journal and is_able and self._done.get(number) != news:
                    group.create_task(self._note(health, noted))

    async def _note(self, health: DeviceHealth, noted: Noted) -> None:
        number = health.device.number
        try:
            job = self._pools[number].submit(IoClass.DEMOTE, partial(_write, health, noted))
            await job.wait(_NOTE_S)
        except (Busy, TimeoutError):
            return  # next time
        except TierIOError as error:
            if number not in self._refused:
                self._refused.add(number)
                extra = {"path": str(health.device.path), "reason": str(error)}
                log.warning("nvme.device_not_noted", extra=extra)
            return
        self._done[number] = noted.journal, noted.names
        self._refused.discard(number)


def _write(health: DeviceHealth, noted: Noted) -> None:
    """A thread of the device. Raises TierIOError."""
    crash_point("device.before_note")
    try:
        health.device.directory.note(noted)
    except OSError as error:
        raise health.device.failed(TierOperation.WRITE, error) from error
    crash_point("device.noted")
