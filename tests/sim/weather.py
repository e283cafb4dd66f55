"""What happens by itself, whatever the clients do: the daemon's own work, and bad luck."""

from __future__ import annotations

import contextlib
from collections.abc import Coroutine
from typing import Any

from kvtier.core.page import Tier
from kvtier.errors import DirectoryError
from kvtier.packing.record import HEADER_BYTES
from tests.sim.boot import Boot, Nvme
from tests.sim.clients import Clients
from tests.sim.crew import Crew

__all__ = ["Weather"]


class Weather:
    """Of one boot."""

    def __init__(self, boot: Boot, clients: Clients, crew: Crew) -> None:
        self._boot = boot
        self._rng = boot.rng
        self._clients = clients
        self._crew = crew

    async def change(self) -> None:
        """Something, or nothing."""
        rng, store, roll = self._rng, self._boot.store, self._rng.random()
        nvme = self._boot.nvme
        if nvme is not None and nvme.lower.jobs and rng.random() < 0.04:
            await self._crew.lose_one()  # somebody may have waited for it
        if roll < 0.01:
            if self._boot.slabs_waiting:
                store.room.grant(Tier.HOST, self._boot.slabs_waiting.pop())
        elif roll < 0.03:
            self._flip_a_bit_in_memory()
        elif roll < 0.06:
            self._clients.now += rng.random() * 5
            store.pins.expire(self._clients.now)
            store.grants.expire(self._clients.now)
        elif roll < 0.08:
            store.sweep(rng.randint(1, 5))
        elif roll < 0.11:
            await self._crew.lose_one()
        elif roll < 0.115:
            store.survey.clear_quarantine(None)
        elif roll < 0.2 and nvme is not None:
            self._change_nvme(nvme, (roll - 0.115) / 0.085)

    def _change_nvme(self, nvme: Nvme, roll: float) -> None:
        setting, disk = self._boot.machine.setting, self._boot.machine.disk
        begin = self._crew.begin
        if roll < 0.2:
            begin(nvme.tiering.clean())
        elif roll < 0.35 or (self._boot.has_broken_journal and roll < 0.5):
            begin(_unless_refused(nvme.durability.checkpoint()))
        elif roll < 0.5:
            begin(nvme.lower.sync(self._synced))
        elif roll < 0.6:
            nvme.lower.land()
        elif roll < 0.75:
            nvme.lower.sweep(self._rng.randint(1, 8))
        elif roll < 0.9:
            nvme.lower.retry()
        elif roll < 0.92 and setting.faults:
            nvme.lower.take_offline(self._rng.randrange(len(setting.segments_max)))
        elif 0.93 < roll < 0.95:
            self._boot.note()
        elif roll > 0.95 and setting.refusing:
            disk.refuses_names = not disk.refuses_names

    def _synced(self) -> None:
        sealed = self._boot.sealed_on_nvme().values()
        self._boot.oracle.safe |= {generation for generation, _ in sealed}

    def _flip_a_bit_in_memory(self) -> None:
        boot, rng = self._boot, self._rng
        rows = boot.store.survey.sealed_rows(Tier.HOST).tolist()
        if not rows:
            return
        found = boot.store.survey.acquire_row(rng.choice(rows))
        assert found is not None
        reading, namespace, shard, key = found
        with reading:
            at = rng.randrange(HEADER_BYTES + reading.length)
            boot.arena.view(reading.ref.slot, at, 1)[0] ^= 1 << rng.randrange(8)
        boot.oracle.space_of(namespace, shard).flips[key] += 1
        boot.oracle.counts.flips += 1


async def _unless_refused(work: Coroutine[Any, Any, None]) -> None:
    with contextlib.suppress(DirectoryError):
        await work
