"""A whole kvtier in one thread: the real store, arena, Intake, Outlet, mover, tiering, registry and
durability, under a seeded scheduler, over as many boots as the seed asks for.

Clients stop between any two steps a real client could stop between. The scheduler picks who goes
on, moves the clock, grants slabs late, flips bits in memory, on the wire and on the devices, takes
devices away, lets clients vanish, and ends boots: by SIGKILL, by a power cut, or in good order.
What a client gets, and what a restart finds, is held against an oracle.

The same seed gives the same run, step by step (`World.trace` is a digest of it).
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import tempfile
from collections.abc import Coroutine, Iterable
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Any

from kvtier.core.namespaces import FamilyIdentity, ShardIdentity
from kvtier.core.page import Tier
from kvtier.errors import DirectoryError, KvtierError
from kvtier.packing.layout import Layout, Role, ScaleRule, Segment
from kvtier.packing.record import HEADER_BYTES
from kvtier.testing.faulty_tier import FaultyTier
from kvtier.testing.memory_tier import MemoryTier
from kvtier.tiers.nvme_recovery import Recovered
from kvtier.transfer.place import Place
from tests.sim.boot import Boot, Machine
from tests.sim.clients import Clients
from tests.sim.crashes import CrashLog, no_longer_than
from tests.sim.ending import settle, stop
from tests.sim.oracle import Broken, Counts, Oracle, Space
from tests.sim.settings import draw_setting
from tests.sim.sim_disk import StateDisk
from tests.sim.sim_nvme import SimDevice

__all__ = ["World", "run_seeds"]

#: Scripts under way at once.
_SCRIPTS = 6
#: name -> (payload bytes, shards)
_FAMILIES = {"model0": (3000, 1), "model1": (3000, 2), "model2": (20000, 1)}
_NVME_BYTES = 1 << 44
#: Many times what a boot needs.
_BOOT_CPU_S = 20.0


class Ending(Enum):
    KILL = auto()
    POWER_CUT = auto()
    STOP = auto()
    OVER = auto()  # of the run


class World:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.oracle = Oracle(seed)
        self.setting = draw_setting(self.rng)
        faulty = FaultyTier(
            MemoryTier(_NVME_BYTES), self.setting.faults, seed=seed, keeps_unsynced=True
        )
        self._device = SimDevice(faulty, self.rng)
        self._disk = StateDisk()
        self._demanded: dict[tuple[Space, bytes], int] = {}
        self._is_damaged = False  # a checkpoint, before the start
        self._left = 0
        # The books are what takes most of the time: some seeds look at them after every step.
        self._check_every = 1 if seed % 8 == 0 else 8
        self._version = 0
        self._digest = hashlib.sha256()
        self._scripts: list[asyncio.Task[Any]] = []
        self._others: list[asyncio.Task[Any]] = []
        self.spaces: list[Space] = []

    @property
    def counts(self) -> Counts:
        return self.oracle.counts

    @property
    def trace(self) -> str:
        return self._digest.hexdigest()

    def run(self, steps: int) -> None:
        """Raises WrongByte or Broken, or returns with everything closed and accounted for."""
        self._left = steps
        try:
            with tempfile.TemporaryDirectory() as path, CrashLog() as crashes:
                machine = Machine(self.setting, self._disk, self._device, Path(path))
                while self._run_boot(machine, crashes) is not Ending.OVER:
                    pass
                if self.setting.has_nvme:  # once more, to see what is left
                    self._run_boot(machine, crashes)
        except Broken:
            raise
        except AssertionError as error:
            raise Broken(f"seed {self.seed}: {type(error).__name__}: {error}") from error
        except BaseException as error:
            error.add_note(f"seed {self.seed}")
            raise

    # -- one boot --------------------------------------------------------------------------------

    def _run_boot(self, machine: Machine, crashes: CrashLog) -> Ending:
        boot = Boot(machine, self.oracle, self.rng)
        loop = boot.scheduler.loop
        loop.set_exception_handler(crashes.in_loop)
        self._scripts, self._others = [], []
        try:
            with no_longer_than(_BOOT_CPU_S, self.seed):
                ending = loop.run_until_complete(self._live(boot, crashes))
            self._end(boot, ending)
            return ending
        finally:
            boot.scheduler.is_over = crashes.is_ending = True
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            if tasks:
                loop.run_until_complete(asyncio.wait(tasks))
            loop.close()
            crashes.is_ending = False
            boot.arena.close()

    async def _live(self, boot: Boot, crashes: CrashLog) -> Ending:
        rng, scheduler = self.rng, boot.scheduler
        clients = Clients(
            boot,
            self.oracle,
            rng,
            note=self._note,
            new_version=self._new_version,
            bump=lambda space: self._begin(self._bumped(clients, space)),
        )
        starting = self._begin(self._start(boot))
        while self._left > 0:
            self._left -= 1
            if starting.done():
                self._top_up(clients)
                await self._weather(boot, clients)
            await scheduler.quiesce()
            self._look(crashes)
            if not scheduler.fire_one() and (self._scripts or self._others):
                raise self.oracle.broken("nothing can go on: something waits for ever")
            if self._left % self._check_every == 0:
                boot.store.survey.check()
            if boot.nvme is not None and rng.random() < self.setting.ending:
                ending = rng.choice((Ending.KILL, Ending.KILL, Ending.POWER_CUT, Ending.STOP))
                if ending is Ending.STOP and starting.done():
                    await stop(boot, [*self._scripts, *self._others])
                    self._look(crashes)
                    return Ending.STOP
                return Ending.KILL if ending is Ending.STOP else ending
        await settle(boot, self._scripts, self._others)
        self._look(crashes)
        return Ending.OVER

    async def _start(self, boot: Boot) -> None:
        await boot.start(partial(self._judge_start, boot))
        self.spaces = []
        for name in _FAMILIES:
            await self._open(boot, name)

    def _look(self, crashes: CrashLog) -> None:
        """Nothing may have failed unseen."""
        for tasks in (self._scripts, self._others):
            for task in [task for task in tasks if task.done()]:
                tasks.remove(task)
                if not task.cancelled():
                    task.result()
        crashes.raise_first(self.seed)

    def _begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Starts what no client can cancel."""
        task = asyncio.get_running_loop().create_task(work)
        self._others.append(task)
        return task

    def _top_up(self, clients: Clients) -> None:
        while len(self._scripts) < _SCRIPTS:
            work: Any = clients.choose()(self.rng.choice(self.spaces))
            self._scripts.append(asyncio.get_running_loop().create_task(work))

    # -- what happens by itself ------------------------------------------------------------------

    async def _weather(self, boot: Boot, clients: Clients) -> None:
        rng, store = self.rng, boot.store
        roll = rng.random()
        if roll < 0.01 and boot.slabs_waiting:
            store.room.grant(Tier.HOST, boot.slabs_waiting.pop())
        elif roll < 0.03:
            self._flip_a_bit_in_memory(boot)
        elif roll < 0.06:
            clients.now += rng.random() * 5
            store.pins.expire(clients.now)
        elif roll < 0.08:
            store.sweep(rng.randint(1, 5))
        elif roll < 0.10:
            await self._client_vanishes(boot)
        elif roll < 0.105:
            store.survey.clear_quarantine(None)
        elif boot.nvme is not None:
            self._nvme_weather(boot, (roll - 0.105) / 0.895)

    async def _client_vanishes(self, boot: Boot) -> None:
        """In the middle of anything, also of the loop's own work."""
        if self.rng.random() < 0.5:
            boot.scheduler.fire_one()
            for _ in range(self.rng.randrange(8)):
                await asyncio.sleep(0)
        if self._scripts:
            script = self._scripts.pop(self.rng.randrange(len(self._scripts)))
            script.cancel()
            self._others.append(script)

    def _nvme_weather(self, boot: Boot, roll: float) -> None:
        nvme = boot.nvme
        assert nvme is not None
        is_faulty = bool(self.setting.faults)
        if roll < 0.02:
            self._begin(nvme.tiering.clean())
        elif roll < 0.035 or boot.has_broken_journal:
            self._begin(_unless_refused(nvme.durability.checkpoint()))
        elif roll < 0.05:
            self._begin(nvme.lower.sync(partial(self._synced, boot)))
        elif roll < 0.06:
            nvme.lower.land()
        elif roll < 0.09:
            nvme.lower.retry()
        elif roll < 0.092 and is_faulty:
            nvme.lower.take_offline(self.rng.randrange(len(self.setting.segments_max)))
        elif roll < 0.1 and self.setting.refusing:
            self._disk.refuses_names = not self._disk.refuses_names

    def _synced(self, boot: Boot) -> None:
        self.oracle.safe |= set(boot.sealed_on_nvme().values())

    def _flip_a_bit_in_memory(self, boot: Boot) -> None:
        rows = boot.store.survey.sealed_rows(Tier.HOST).tolist()
        if not rows:
            return
        found = boot.store.survey.acquire_row(self.rng.choice(rows))
        assert found is not None
        reading, namespace, shard, key = found
        with reading:
            at = self.rng.randrange(HEADER_BYTES + reading.length)
            boot.arena.view(reading.ref.slot, at, 1)[0] ^= 1 << self.rng.randrange(8)
        self.oracle.space_of(namespace, shard).flips[key] += 1
        self.counts.flips += 1

    # -- families --------------------------------------------------------------------------------

    async def _bumped(self, clients: Clients, space: Space) -> None:
        if await clients.bump(space):
            await self._open(clients.boot, space.name)

    async def _open(self, boot: Boot, name: str) -> None:
        """The spaces of a family at its present generation take the place of older ones."""
        size, shards = _FAMILIES[name]
        layout = _opaque_layout(name, size)
        fingerprint = layout.fingerprint("tenant", b"")
        identity = FamilyIdentity(
            fingerprint=fingerprint,
            tenant="tenant",
            model_id=name,
            weights_revision="1",
            shard_count=shards,
        )
        spaces = []
        for shard in range(shards):
            part = ShardIdentity(index=shard, layers=(0, 1), heads=(0, 1))
            while True:
                try:
                    family, _ = await boot.registry.open(identity, part)
                    break
                except KvtierError:
                    self._disk.refuses_names = False
            place = Place(
                namespace=family.number,
                shard=shard,
                fingerprint=fingerprint,
                generation=family.generation,
                layout=layout,
            )
            spaces.append(self._space(name, place, size))
        self.spaces = [space for space in self.spaces if space.name != name] + spaces

    def _space(self, name: str, place: Place, size: int) -> Space:
        for space in self.oracle.every:
            if space.place == place:
                return space
        space = Space(name, place, size)
        self.oracle.every.append(space)
        return space

    # -- the end of a boot, and the next one -----------------------------------------------------

    def _end(self, boot: Boot, ending: Ending) -> None:
        self._count(boot)
        if boot.nvme is None:
            return
        self._demanded = self._sealed(boot, only_safe=ending is Ending.POWER_CUT)
        device, disk = self._device, self._disk
        if ending is not Ending.STOP:
            device.is_ending = True
            for job in boot.nvme.lower.jobs:
                job.tear()
            device.is_ending = False
            if self.rng.random() < 0.5:
                boot.nvme.lower.land()
            boot.nvme.files.kill()
        if ending is Ending.POWER_CUT:
            device.faulty.power_cut(survival=self.rng.random())
            device.faulty.power_on()
            disk.power_cut(self.rng)
        device.faulty._delayed.clear()
        disk.refuses_names = False
        self._is_damaged = False
        if self.rng.random() < 0.1:
            self._is_damaged = disk.damage_checkpoint(self.rng, newest=self.rng.random() < 0.8)
            if self.rng.random() < 0.1:
                self._is_damaged |= disk.damage_checkpoint(self.rng, newest=False)
        self.counts.kills += ending in (Ending.KILL, Ending.OVER)
        self.counts.power_cuts += ending is Ending.POWER_CUT
        self.counts.stops += ending is Ending.STOP

    def _sealed(self, boot: Boot, *, only_safe: bool) -> dict[tuple[Space, bytes], int]:
        """What the next start has to find."""
        sealed = boot.sealed_on_nvme()
        for space in self.oracle.every:
            for key in space.must:
                if (space, key) not in sealed:
                    raise self.oracle.broken(
                        f"{key.hex()[:8]} of {space.title} was durable, and is gone"
                    )
        demanded = {}
        for (space, key), generation in sealed.items():
            if space.is_ending or key in space.hurt:
                continue
            if key not in space.live:
                what = f"{key.hex()[:8]} of {space.title}"
                raise self.oracle.broken(f"{what} is on NVMe and was deleted or never put")
            if generation in self.oracle.safe or not only_safe:
                demanded[space, key] = space.live[key]
        return demanded

    def _judge_start(self, boot: Boot, recovered: Recovered) -> None:
        present = {f.identity.fingerprint: f.generation for f in boot.registry.families()}
        for space in self.oracle.every:
            is_present = present.get(space.place.fingerprint) == space.place.generation
            if is_present and space.is_ended:
                raise self.oracle.broken(f"{space.title} was bumped and is back")
            if not (is_present or space.is_ended or space.is_ending):
                raise self.oracle.broken(f"{space.title} is not known any more")
            space.is_ending = False
            if not is_present:
                space.is_ended = True
                space.kept.clear()
        found, bad = {}, []
        for (space, key), payload in boot.found_on_nvme().items():
            if payload is None:
                bad.append((space, key))
            else:
                found[space, key] = self.oracle.version_of(space, key, payload)
        self.counts.ghosts += len(bad)
        self.counts.lost += recovered.report.is_lost
        is_excused = recovered.report.is_lost and self._is_damaged
        is_excused |= bool(recovered.report.skipped) or self.setting.reads_faults
        self.oracle.judge_restart(found, {} if is_excused else self._demanded)
        for space, key in bad:
            space.hurt.add(key)

    def _count(self, boot: Boot) -> None:
        counts = self.counts
        if boot.nvme is not None:
            nvme = boot.nvme
            counts.demoted += sum(nvme.mover.demotions.values())
            counts.promoted += sum(nvme.mover.promotions.values())
            counts.checkpoints += nvme.durability.checkpoints
            counts.timeouts += nvme.lower.timeouts
            counts.offline += nvme.lower.offline_times
            counts.refused += nvme.files.failures
            counts.injected = len(self._device.faulty.injected)

    def _new_version(self) -> int:
        self._version += 1
        return self._version

    def _note(self, *codes: int) -> None:
        self._digest.update(bytes(codes))


async def _unless_refused(work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except DirectoryError:
        pass


def _opaque_layout(model: str, size: int) -> Layout:
    segment = Segment(
        name="bytes",
        role=Role.OPAQUE,
        dtype="uint8",
        layers=1,
        heads=1,
        dim=size,
        scale_rule=ScaleRule.NONE,
    )
    return Layout.from_segments(
        [segment], model_id=model, revision="1", page_tokens=1, kv_compute="uint8"
    )


def run_seeds(seeds: Iterable[int], steps: int) -> Counts:
    """Runs each seed; what all of them together have done."""
    total = Counts()
    for seed in seeds:
        world = World(seed)
        world.run(steps)
        total.add(world.counts)
    return total
