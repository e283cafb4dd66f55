"""The end of a boot, and what the next start has to find.

SIGKILL keeps every byte that was written, and a torn part of what was being written, in blocks of
4 KiB. A power cut keeps what was synced, and a random part of the rest. Now and then a checkpoint
is damaged too.
"""

from __future__ import annotations

import random
from enum import Enum, auto

from kvtier.tiers.nvme_recovery import Recovered
from tests.sim.away import Away
from tests.sim.boot import Boot, Machine
from tests.sim.oracle import Oracle, Space

__all__ = ["Ending", "Restarts"]


class Ending(Enum):
    KILL = auto()
    POWER_CUT = auto()
    STOP = auto()
    OVER = auto()  # of the run: a SIGKILL when everything has come to rest


class Restarts:
    def __init__(self, oracle: Oracle, rng: random.Random, away: Away) -> None:
        self._oracle = oracle
        self._away = away
        self._where: dict[tuple[Space, bytes], tuple[int, int]] = {}
        self._rng = rng
        self._demanded: dict[tuple[Space, bytes], int] = {}
        self._is_damaged = False  # a checkpoint, before the start

    def end(self, boot: Boot, ending: Ending) -> None:
        """What a machine with an NVMe tier keeps of the boot."""
        assert boot.nvme is not None
        self._demanded = self._sealed(boot, only_safe=ending is Ending.POWER_CUT)
        self._away.drop(boot.nvme.durability.given_up)
        if ending is Ending.POWER_CUT:
            self._away.power_cut()
        device, disk = boot.machine.device, boot.machine.disk
        if ending is not Ending.STOP:
            device.is_ending = True
            for job in boot.nvme.lower.jobs:
                job.tear()
            device.is_ending = False
            if self._rng.random() < 0.5:
                boot.nvme.lower.land()
            boot.nvme.files.kill()
        if ending is Ending.POWER_CUT:
            device.faulty.power_cut(survival=self._rng.random())
            device.faulty.power_on()
            disk.power_cut(self._rng)
        device.faulty._delayed.clear()
        disk.refuses_names = False
        self._damage(boot.machine)
        counts = self._oracle.counts
        counts.kills += ending in (Ending.KILL, Ending.OVER)
        counts.power_cuts += ending is Ending.POWER_CUT
        counts.stops += ending is Ending.STOP

    def judge(self, boot: Boot, recovered: Recovered) -> None:
        """The next boot, when its pages can be found."""
        oracle = self._oracle
        self._look_at_families(boot)
        found, bad = {}, []
        for (space, key), payload in boot.found_on_nvme().items():
            if payload is None:
                bad.append((space, key))
            else:
                found[space, key] = oracle.version_of(space, key, payload)
        is_lost = recovered.report.is_lost
        oracle.counts.ghosts += len(bad)
        oracle.counts.lost += is_lost
        # Pages of a device that was away are in one checkpoint only, until the next one is written.
        is_excused = (is_lost or bool(recovered.report.forgotten)) and self._is_damaged
        is_excused |= bool(recovered.report.skipped) or boot.machine.setting.reads_faults
        absent = self._away.absent
        oracle.counts.without += bool(absent)
        gone = {page for page, (_, device) in self._where.items() if device in absent}
        demanded = {page: v for page, v in self._demanded.items() if page not in gone}
        self._away.went((page, self._where[page]) for page in gone & self._demanded.keys())
        if is_lost or recovered.report.forgotten:
            self._away.drop()
        back = self._away.back()
        oracle.judge_restart(found, *(({}, []) if is_excused else (demanded, back)))
        for space, key in bad:
            space.hurt.add(key)

    def _sealed(self, boot: Boot, *, only_safe: bool) -> dict[tuple[Space, bytes], int]:
        """The version of every page that has to be found."""
        oracle, sealed = self._oracle, boot.sealed_on_nvme()
        for space in oracle.every:
            for key in space.must:
                if (space, key) not in sealed:
                    raise oracle.broken(f"{space.page(key)} was durable, and is gone")
        demanded, self._where = {}, sealed
        for (space, key), (generation, _) in sealed.items():
            if space.is_ending or key in space.hurt:
                continue
            if key not in space.live:
                raise oracle.broken(f"{space.page(key)} is on NVMe and was deleted or never put")
            if generation in oracle.safe or not only_safe:
                demanded[space, key] = space.live[key]
        return demanded

    def _damage(self, machine: Machine) -> None:
        rng, disk = self._rng, machine.disk
        self._is_damaged = False
        if rng.random() < 0.1:
            self._is_damaged = disk.damage_checkpoint(rng, newest=rng.random() < 0.8)
            if rng.random() < 0.1:
                self._is_damaged |= disk.damage_checkpoint(rng, newest=False)

    def _look_at_families(self, boot: Boot) -> None:
        """A bump that was answered has survived, and one that was under way is decided now."""
        oracle = self._oracle
        present = {f.identity.fingerprint: f.generation for f in boot.registry.families()}
        for space in oracle.every:
            is_present = present.get(space.place.fingerprint) == space.place.generation
            if is_present and space.is_ended:
                raise oracle.broken(f"{space.title} was bumped and is back")
            if not (is_present or space.is_ended or space.is_ending):
                raise oracle.broken(f"{space.title} is not known any more")
            space.is_ending = False
            if not is_present:
                space.is_ended = True
                space.kept.clear()
