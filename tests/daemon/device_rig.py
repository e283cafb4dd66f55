"""Devices over real directories, with a store and a journal, and no daemon around them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from kvtier.config import NvmeConfig
from kvtier.core.generations import Generations
from kvtier.core.handles import Filling
from kvtier.core.page import NO_SUM, Codec, PageMeta, PageRef, PutCode, Tier
from kvtier.core.slabs import SlabAllocator
from kvtier.core.store import Store
from kvtier.core.store_config import StoreConfig
from kvtier.daemon.devices import DeviceHealth, Devices
from kvtier.daemon.durability import DirectoryFiles, Durability
from kvtier.tiers.nvme import NvmeDevice, NvmeTier, open_device
from kvtier.tiers.nvme_geometry import Plan, slab_number
from tests.faults.kinds_rig import key_of

NS = 1
DIRECTORY_ID = b"0123456789abcdef"
SEGMENT = 1 << 20
RECORD = 64 << 10
#: Records that a segment holds.
FIT = SEGMENT // RECORD
SEGMENTS = 4


@dataclass
class Rig:
    store: Store
    devices: Devices

    def health(self, number: int = 0) -> DeviceHealth:
        return self.devices.health[number]

    def reserve(self, name: object) -> Filling:
        """Room on NVMe for a page of RECORD bytes."""
        meta = PageMeta(key=key_of(name), length=RECORD - 4096, codec=Codec.RAW, payload_sum=NO_SUM)
        filling = self.store.reserve(NS, 0, meta, RECORD, tier=Tier.NVME)
        assert isinstance(filling, Filling), filling
        return filling

    def put(self, names: Sequence[object]) -> list[PageRef]:
        """Pages in the books alone: nothing is written."""
        fillings = [self.reserve(name) for name in names]
        assert [filling.seal() for filling in fillings] == [PutCode.STORED] * len(names)
        return [filling.ref for filling in fillings]

    def first_slot(self, number: int) -> int:
        return slab_number(number, 0) * (SEGMENT // 4096)

    def lose(self, number: int = 0) -> None:
        """The device does not answer."""
        self.devices.report(self.first_slot(number), TimeoutError("no answer"))
        assert not self.health(number).online

    async def come_back(self, number: int = 0) -> None:
        limit = time.monotonic() + 5
        while not self.health(number).online:
            assert time.monotonic() < limit, self.health(number).reason
            await self.devices.retry()
            await self.devices.sweep()
            await asyncio.sleep(0.01)

    @property
    def granted(self) -> int:
        """Segments that may be written to."""
        return self.store.status()[Tier.NVME].granted_bytes // SEGMENT


@asynccontextmanager
async def rig_on(base: Path, *, devices: int = 1) -> AsyncIterator[Rig]:
    opened = [
        open_device(
            base / f"d{number}", directory_id=DIRECTORY_ID, number=number, segment_bytes=SEGMENT
        )
        for number in range(devices)
    ]
    tier = NvmeTier(opened, segment_bytes=SEGMENT)
    slabs = [slab_number(n, local) for n in range(devices) for local in range(SEGMENTS)]
    store = Store(
        StoreConfig(boot_id=1, pages_max=1024, seed=1),
        tiers={
            Tier.HOST: SlabAllocator(slab_bytes=SEGMENT, numbers=range(1)),
            Tier.NVME: SlabAllocator(slab_bytes=SEGMENT, numbers=slabs),
        },
        generations=Generations(0, lambda bound: None),
    )
    store.open_namespace(NS, 1)
    (base / "state").mkdir()
    durability = Durability(
        DirectoryFiles(base / "state", DIRECTORY_ID),
        store,
        name_of=lambda number: (bytes(32), number),
        segment_bytes=SEGMENT,
        journal_bytes_max=1 << 20,
    )
    config = NvmeConfig(
        paths=tuple(device.path for device in opened),
        io_timeout_ms=1000,
        io_threads=2,
        retry_s=0.05,
    )
    plan = Plan(segments_per_device=SEGMENTS, metadata_bytes=0)
    made = Devices(tier, store, durability, plan, config)
    try:
        yield Rig(store, made)
    finally:
        assert made.close()
        tier.close()


@contextmanager
def slow_to_make(device: NvmeDevice) -> Iterator[threading.Event]:
    """Segment files are not made before this is set."""
    gate, make = threading.Event(), device._make_file

    def wait_and_make(local: int) -> None:
        assert gate.wait(20)
        make(local)

    with mock.patch.object(device, "_make_file", wait_and_make):
        try:
            yield gate
        finally:
            gate.set()
