"""One life of a simulated daemon: the real store, arena, registry, mover, tiering and durability
over a disk and devices that outlive it, and a start by the real recovery."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from kvtier.config.storage import NvmeConfig, WritePolicy
from kvtier.core.budget import WriteBudget
from kvtier.core.generations import Generations
from kvtier.core.namespaces import Family, Namespaces
from kvtier.core.page import Codec, Tier
from kvtier.core.slabs import SlabAllocator
from kvtier.core.snapshots import Copies
from kvtier.core.store import Store
from kvtier.core.store_config import StoreConfig
from kvtier.daemon.durability import Durability
from kvtier.daemon.registry import Registry
from kvtier.daemon.tiering import Tiering
from kvtier.packing.record import HEADER_BYTES
from kvtier.testing.faulty_tier import Fault
from kvtier.testing.listing_book import ListingBook
from kvtier.tiers.base import TierDevice
from kvtier.tiers.host import HostArena
from kvtier.tiers.nvme_geometry import slab_number, split_slab
from kvtier.tiers.nvme_noted import Noted
from kvtier.tiers.nvme_recovery import Recovered, recover
from kvtier.transfer.mover import MoveCode, Mover
from kvtier.transfer.place import Identity, check
from tests.sim.away import Away
from tests.sim.older import OlderCopy
from tests.sim.oracle import Oracle, Space
from tests.sim.scheduler import Scheduler
from tests.sim.sim_disk import DIRECTORY_ID, BootFiles, StateDisk
from tests.sim.sim_jobs import SimDevice
from tests.sim.sim_nvme import SEGMENT_BYTES, Chances, SimLower

__all__ = ["Boot", "Machine", "Nvme", "Setting"]

#: Of host memory.
SLAB = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a seed has to do with."""

    has_nvme: bool
    slabs: int  # of host memory
    segments_max: tuple[int, ...]  # of each device
    is_roomy: bool  # on NVMe nothing has to give way
    policy: WritePolicy
    streams: int  # pages that the devices are given at once
    journal_bytes_max: int
    faults: tuple[Fault, ...]
    chances: Chances
    refusing: float  # the chance of a write of journal or checkpoint to fail
    ending: float  # the chance that a step ends the boot
    reads_faults: bool  # a recovery may meet read errors
    is_crowd: bool = False  # few pages that everybody wants


@dataclass(slots=True)
class Machine:
    """What outlives a boot."""

    setting: Setting
    disk: StateDisk
    device: SimDevice
    directory: Path
    away: Away
    older: OlderCopy
    boots: int = 0


@dataclass(slots=True)
class Nvme:
    """The parts of a boot that only a daemon with an NVMe tier has."""

    files: BootFiles
    durability: Durability
    lower: SimLower
    mover: Mover
    tiering: Tiering


class SimRegistry(Registry):
    """Names a namespace number until its end is durable: only then nothing of it can come back."""

    def __init__(self, disk: StateDisk, store: Store) -> None:
        self._names: dict[int, tuple[bytes, int]] = {}
        super().__init__(disk, store, namespaces_max=64)  # type: ignore[arg-type]

    def lasting_name_of(self, number: int) -> tuple[bytes, int] | None:
        return self._names.get(number)

    def _register(self, family: Family) -> None:
        self._names[family.number] = family.identity.fingerprint, family.generation
        super()._register(family)

    def _end(self, number: int) -> None:
        super()._end(number)
        del self._names[number]


class Boot:
    """Made, then `start`ed; the arena is closed by the owner."""

    def __init__(self, machine: Machine, oracle: Oracle, rng: random.Random) -> None:
        machine.boots += 1
        setting = machine.setting
        self.machine = machine
        self.absent = machine.away.absent
        self.oracle = oracle
        self.rng = rng
        self.scheduler = Scheduler(rng)
        slabs = setting.slabs
        self.arena = HostArena(SLAB * slabs, slab_bytes=SLAB, huge_pages=False, poison=True)
        tiers = {Tier.HOST: SlabAllocator(slab_bytes=SLAB, numbers=range(slabs))}
        pages_max = 64
        if setting.has_nvme:
            numbers = [
                slab_number(device, local)
                for device, count in enumerate(setting.segments_max)
                if device not in self.absent
                for local in range(count)
            ]
            tiers[Tier.NVME] = SlabAllocator(slab_bytes=SEGMENT_BYTES, numbers=numbers)
            # Where there is little room, the table is too small too.
            pages_max = 8 * len(numbers) + (64 if setting.is_roomy else 24)
        disk = machine.disk
        self.listing = ListingBook()
        self.store = Store(
            StoreConfig(
                boot_id=(oracle.seed + 1) * 1000 + machine.boots,
                pages_max=pages_max,
                seed=oracle.seed,
                grants_share=0.25,  # the arena is very small
            ),
            tiers=tiers,
            generations=Generations(disk.generation_bound, disk.journal_generations),
            listing=self.listing,
        )
        self.slabs_waiting = list(range(rng.randint(1, slabs), slabs))  # granted later
        for slab in range(slabs - len(self.slabs_waiting)):
            self.store.room.grant(Tier.HOST, slab)
        self._count_evictions()
        self.registry = SimRegistry(disk, self.store)
        self.nvme = self._nvme(rng) if setting.has_nvme else None

    async def start(self, began: Callable[[Recovered], None]) -> None:
        """Brings back what is on NVMe; `began` is called when it can be found."""
        if self.nvme is None:
            return
        recovered = self._recovered()
        assert recovered.refusal is None, str(recovered.refusal)
        self._load(recovered)
        began(recovered)
        self.nvme.durability.wait_for(recovered.waits)
        self.nvme.files.failing = 0.0  # a daemon that cannot begin a journal does not start
        await self.nvme.durability.begin(
            recovered.next_number, has_base=recovered.base_number is not None
        )
        if recovered.report.forgotten:
            await self.nvme.durability.checkpoint(both=True)
        self.registry.on_ended = self.nvme.durability.know
        self.note()
        self.nvme.files.failing = self.machine.setting.refusing

    def note(self) -> None:
        """The devices note how far the directory has got."""
        if self.nvme is not None:
            self.machine.disk.noted = Noted(
                journal=self.nvme.durability.number,
                generation=self.store.snapshots.last_generation,
                names=self.registry.last_number,
            )

    @property
    def has_broken_journal(self) -> bool:
        """A daemon makes a checkpoint then, to go on with a new one."""
        journal = self.nvme.durability._journal if self.nvme is not None else None
        return journal is not None and journal.failed

    def found_on_nvme(self) -> dict[tuple[Space, bytes], bytes | None]:
        """The payload of every page there, None for one that does not pass."""
        assert self.nvme is not None
        found: dict[tuple[Space, bytes], bytes | None] = {}
        for row in self.store.survey.sealed_rows(Tier.NVME).tolist():
            held = self.store.survey.acquire_row(row)
            assert held is not None
            reading, namespace, shard, key = held
            with reading:
                space = self.oracle.space_of(namespace, shard)
                record = bytearray(HEADER_BYTES + reading.length)
                self.machine.device.faulty.inner.read(reading.ref.slot, 0, record)
                identity: Identity = space.place
                copy = check(memoryview(record), identity, reading, key, check_payload=True)
            found[space, key] = None if copy is None else bytes(copy.payload)
        return found

    def sealed_on_nvme(self) -> dict[tuple[Space, bytes], tuple[int, int]]:
        """(generation, device) of every page that can be found there now, and will be tomorrow."""
        table, allocator = self.store._table, self.store._residents.allocators[Tier.NVME]
        sealed = {}
        for row in self.store.survey.sealed_rows(Tier.NVME).tolist():
            slab = allocator.slab_of(table.slot[row])
            is_lasting = allocator.is_granted(slab)
            if is_lasting and self.registry.name_of(table.namespace[row]) is not None:
                space = self.oracle.space_of(table.namespace[row], table.shard[row])
                sealed[space, table.key(row)] = table.generation[row], split_slab(slab)[0]
        return sealed

    def going(self, device: int) -> None:
        """It is about to be taken offline: what is on it waits for a start that finds it."""
        sealed = self.sealed_on_nvme().items()
        self.machine.away.went(item for item in sealed if item[1][1] == device)

    def withdrawn(self) -> None:
        """A device has gone: what was only there need not be found in this boot."""
        sealed = self.sealed_on_nvme()
        for space in self.oracle.every:
            for key in list(space.must):
                if (space, key) not in sealed:
                    del space.must[key]
            for key in space.live:
                space.disturbed[key] += 1

    def count(self) -> None:
        """Adds what it has done to the counts of the run."""
        if self.nvme is not None:
            counts, nvme = self.oracle.counts, self.nvme
            counts.demoted += nvme.mover.demotions[MoveCode.DONE]
            counts.promoted += nvme.mover.promotions[MoveCode.DONE]
            counts.checkpoints += nvme.durability.checkpoints
            counts.timeouts += nvme.lower.timeouts
            counts.offline += nvme.lower.offline_times
            counts.refused += nvme.files.failures
            counts.injected = len(self.machine.device.faulty.injected)

    # -- making it -------------------------------------------------------------------------------

    def _nvme(self, rng: random.Random) -> Nvme:
        machine, setting = self.machine, self.machine.setting
        files = BootFiles(machine.disk, self.scheduler, rng, failing=setting.refusing)
        durability = Durability(
            files,
            self.store,
            name_of=self.registry.lasting_name_of,
            segment_bytes=SEGMENT_BYTES,
            journal_bytes_max=setting.journal_bytes_max,
        )
        lower = SimLower(
            self.store,
            durability,
            machine.device,
            self.scheduler,
            rng,
            disk=machine.disk,
            segments_max=setting.segments_max,
            chances=setting.chances,
            hurt=self.oracle.hurt,
            withdrawn=self.withdrawn,
            going=self.going,
            returned=lambda device: machine.away.drop([device]),
            absent=self.absent,
        )
        machine.device.faulty._sleep = lower.slow_down
        mover = Mover(self.store, self.arena, lower, codec=Codec.RAW)  # type: ignore[arg-type]
        tiering = Tiering(
            self.store,
            mover,
            NvmeConfig(queue_pages_max=12, io_threads=2, write_policy=setting.policy),
            subject_of=self.registry.subject_of,
            budget=WriteBudget(0, 0.0),
            streams=setting.streams,
        )
        return Nvme(files, durability, lower, mover, tiering)

    def _count_evictions(self) -> None:
        """The oracle hears of every page that gives way."""
        placement, table = self.store._placement, self.store._table
        give_up = placement._give_up

        def tell(rows: list[int], retire: Callable[[Sequence[int]], int]) -> None:
            for row in rows:
                self.oracle.evicted(
                    Tier(table.tier[row]), table.namespace[row], table.shard[row], table.key(row)
                )
            give_up(rows, retire)

        placement._give_up = tell  # type: ignore[method-assign]

    # -- recovery --------------------------------------------------------------------------------

    def _recovered(self) -> Recovered:
        machine = self.machine
        device = machine.device.faulty
        plain = partial(self._recover, device.inner)
        machine.older.at_start(machine.disk, plain)
        machine.disk.write_to(machine.directory)
        tier: TierDevice = device if machine.setting.reads_faults else device.inner
        bound, registry = machine.disk.generation_bound, self.registry
        return self._recover(tier, machine.directory, bound, registry)

    def _recover(
        self, tier: TierDevice, directory: Path, bound: int, registry: Registry | Namespaces
    ) -> Recovered:
        machine = self.machine
        return recover(
            directory,
            directory_id=DIRECTORY_ID,
            tier=tier,
            slabs=self._segments(),
            generation_bound=bound,
            names=registry.last_number,
            noted={Path("device"): machine.disk.noted},
            present=[n for n in range(len(machine.setting.segments_max)) if n not in self.absent],
            segment_bytes=SEGMENT_BYTES,
            generations={f.identity.fingerprint: f.generation for f in registry.families()},
            generation_floor=registry.generation_floor,
            threads=1,
        )

    def _segments(self) -> set[int]:
        """Of the devices that are there."""
        return {
            slab for slab in self.machine.disk.segments if split_slab(slab)[0] not in self.absent
        }

    def _load(self, recovered: Recovered) -> None:
        assert self.nvme is not None
        assert recovered.last_generation <= self.machine.disk.generation_bound, "a spent generation"
        self.nvme.lower.adopt(sorted(self._segments() - recovered.unread))
        self.nvme.lower.spared = recovered.unread
        numbers = {
            (family.identity.fingerprint, family.generation): family.number
            for family in self.registry.families()
        }
        of_family = np.array([numbers[name] for name in recovered.families], np.uint32)
        pages = recovered.pages
        copies = Copies(
            namespace=of_family[pages.family],
            shard=pages.shard,
            key=pages.key,
            generation=pages.generation,
            slot=pages.slot,
            length=pages.length,
            codec=pages.codec,
            lossy=pages.lossy,
            parent=pages.parent,
        )
        loaded = self.store.snapshots.load(Tier.NVME, recovered.classes, copies)
        assert loaded == len(pages), f"only {loaded} of {len(pages)} pages were taken over"
