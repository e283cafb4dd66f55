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
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from kvtier.core.namespaces import FamilyIdentity, ShardIdentity
from kvtier.errors import KvtierError
from kvtier.packing.layout import Layout, Role, ScaleRule, Segment
from kvtier.testing.faulty_tier import FaultyTier
from kvtier.testing.memory_tier import MemoryTier
from kvtier.transfer.place import Place
from tests.sim.away import Away
from tests.sim.boot import Boot, Machine
from tests.sim.clients import Clients
from tests.sim.crashes import CrashLog, no_longer_than
from tests.sim.crew import Crew
from tests.sim.ending import settle, stop
from tests.sim.older import OlderCopy
from tests.sim.oracle import Broken, Counts, Oracle, Space
from tests.sim.restarts import Ending, Restarts
from tests.sim.settings import crowded, draw_setting
from tests.sim.sim_disk import StateDisk
from tests.sim.sim_jobs import SimDevice
from tests.sim.weather import Weather

__all__ = ["World", "run_seeds"]

#: name -> (payload bytes, shards)
_FAMILIES = {"model0": (3000, 1), "model1": (3000, 2), "model2": (20000, 1)}
_NVME_BYTES = 1 << 44
#: Every so many seeds are a crowd.
_CROWD_EVERY = 8
#: Many times what a boot needs.
_BOOT_CPU_S = 20.0
_ROUNDS_MAX = 1000


class World:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.oracle = Oracle(seed)
        self.setting = draw_setting(self.rng)
        if seed % _CROWD_EVERY == _CROWD_EVERY - 1:
            self.setting = crowded(self.setting)
        faulty = FaultyTier(
            MemoryTier(_NVME_BYTES), self.setting.faults, seed=seed, keeps_unsynced=True
        )
        self._device = SimDevice(faulty, self.rng)
        self._disk = StateDisk()
        devices = len(self.setting.segments_max) if self.setting.has_nvme else 0
        self._away = Away(self.oracle, devices=devices, seed=seed)
        self._restarts = Restarts(self.oracle, self.rng, self._away)
        self._left = 0
        # The books are what takes most of the time: some seeds look at them after every step.
        self._check_every = 1 if seed % 8 == 0 else 8
        self._version = 0
        self._digest = hashlib.sha256()
        self._spaces: list[Space] = []  # of the families at their present generations

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
                where, copy = Path(path, "state"), Path(path, "copy")
                where.mkdir()
                copy.mkdir()
                machine = Machine(
                    self.setting, self._disk, self._device, where, self._away, OlderCopy(copy)
                )
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
        self._away.next_boot()
        boot = Boot(machine, self.oracle, self.rng)
        loop = boot.scheduler.loop
        loop.set_exception_handler(crashes.in_loop)
        try:
            with no_longer_than(_BOOT_CPU_S, self.seed):
                ending = loop.run_until_complete(self._live(boot, Crew(boot, crashes)))
            if boot.nvme is not None:
                self._restarts.end(boot, ending)
            return ending
        finally:
            boot.count()
            self._digest.update(str(boot.scheduler.trace).encode())
            boot.scheduler.is_over = crashes.is_ending = True
            loop.run_until_complete(self._throw_away())
            loop.close()
            crashes.is_ending = False
            boot.arena.close()

    async def _live(self, boot: Boot, crew: Crew) -> Ending:
        clients = Clients(
            boot,
            note=self._note,
            new_version=self._new_version,
            bump=lambda space: crew.begin(self._bump(clients, space)),
        )
        weather = Weather(boot, clients, crew)
        starting = crew.begin(self._start(boot))
        while self._left > 0:
            self._left -= 1
            if starting.done():
                crew.top_up(clients, self._spaces)
                await weather.change()
            await boot.scheduler.quiesce()
            crew.look()
            if not boot.scheduler.fire_one() and crew.everybody:
                raise self.oracle.broken("nothing can go on: something waits for ever")
            if self._left % self._check_every == 0:
                boot.store.survey.check()
                boot.listing.check(boot.store)
            if boot.nvme is not None and self._ends_now(boot):
                return await self._end(boot, crew, has_started=starting.done())
        await settle(boot, crew.scripts, crew.others)
        crew.look()
        return Ending.OVER

    def _ends_now(self, boot: Boot) -> bool:
        """In a crowd in the middle of a copy."""
        assert boot.nvme is not None
        is_it = self.rng.random() < self.setting.ending
        return is_it and (not self.setting.is_crowd or boot.nvme.lower.is_at_work)

    async def _start(self, boot: Boot) -> None:
        await boot.start(partial(self._restarts.judge, boot))
        self._spaces = []
        for name in _FAMILIES:
            await self._open(boot, name)

    async def _end(self, boot: Boot, crew: Crew, *, has_started: bool) -> Ending:
        ending = self.rng.choice((Ending.KILL, Ending.KILL, Ending.POWER_CUT, Ending.STOP))
        if ending is not Ending.STOP:
            return ending
        if not has_started:
            return Ending.KILL
        await stop(boot, crew.everybody)
        crew.look()
        return Ending.STOP

    async def _throw_away(self) -> None:
        """Ends every task of a process that is no more, wherever it is."""
        only = asyncio.current_task()
        for _ in range(_ROUNDS_MAX):
            left = [task for task in asyncio.all_tasks() if task is not only]
            if not left:
                return
            for task in left:
                task.cancel()
            await asyncio.sleep(0)
        raise self.oracle.broken(f"{left} cannot be cancelled")

    # -- families --------------------------------------------------------------------------------

    async def _bump(self, clients: Clients, space: Space) -> None:
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
            spaces.append(self.oracle.space(name, place, size))
        self._spaces = [space for space in self._spaces if space.name != name] + spaces

    def _new_version(self) -> int:
        self._version += 1
        return self._version

    def _note(self, *codes: int) -> None:
        self._digest.update(bytes(codes))


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


def run_seeds(
    seeds: Iterable[int], steps: int, *, tell: Callable[[int], None] = lambda seed: None
) -> Counts:
    """Runs each seed and tells of it when it has ended; what all of them together have done."""
    total = Counts()
    for seed in seeds:
        world = World(seed)
        world.run(steps)
        total.add(world.counts)
        tell(seed)
    return total
