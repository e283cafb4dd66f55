"""Copies down that meet: over a real store, arena and threads, with a device that waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kvtier.core.generations import Generations
from kvtier.core.handles import Reading
from kvtier.core.page import NO_SUM, Codec, PageMeta, Tier
from kvtier.core.slabs import SlabAllocator
from kvtier.core.store import Store
from kvtier.core.store_config import StoreConfig
from kvtier.packing.checksum import payload_sum
from kvtier.packing.record import HEADER_BYTES, RecordHeader, encode_header, record_bytes
from kvtier.testing.memory_tier import MemoryTier
from kvtier.tiers.base import Buffer
from kvtier.tiers.host import HostArena
from kvtier.tiers.io_pool import IoClass, IoJob, IoPool
from kvtier.transfer.lower import MoveCode, Subject
from kvtier.transfer.mover import Mover
from kvtier.transfer.place import Identity
from tests.faults.kinds_rig import key_of, rows

SLAB = 256 << 10
NS = 1
IDENTITY = Identity(fingerprint=bytes(32), generation=1, shard=0)
LENGTH = 10_000


class WaitingTier(MemoryTier):
    """A write is done when `gate` is set."""

    def __init__(self) -> None:
        super().__init__(1 << 30)
        self.gate = threading.Event()
        self.written: list[int] = []

    def write(self, slot: int, parts: Sequence[Buffer], offset: int = 0) -> None:
        assert self.gate.wait(20)
        super().write(slot, parts, offset)
        self.written.append(slot)


class PlainLower:
    """kvtier.transfer.lower.Lower over one device where nothing goes wrong."""

    segment_bytes = SLAB
    timeout_s = 20.0

    def __init__(self, tier: WaitingTier) -> None:
        self.tier = tier
        self.pool = IoPool(threads=4, name="kvtier-test", queue_max=16)

    def submit(self, io_class: IoClass, slot: int, work: Callable[[], Any]) -> IoJob[Any]:
        return self.pool.submit(io_class, work)

    def serves(self, slot: int) -> bool:
        return True

    def report(self, slot: int, error: object) -> None:
        assert error is None

    async def grow(self, record_bytes: int) -> None: ...

    async def prepare(self, slot: int, record_bytes: int) -> None: ...

    async def forget(self, generation: int) -> None: ...


class Rig:
    def __init__(self) -> None:
        self.tier = WaitingTier()
        self.arena = HostArena(SLAB, slab_bytes=SLAB, huge_pages=False)
        self.store = Store(
            StoreConfig(boot_id=1, pages_max=64, seed=1),
            tiers={
                Tier.HOST: SlabAllocator(slab_bytes=SLAB, numbers=range(1)),
                Tier.NVME: SlabAllocator(slab_bytes=SLAB, numbers=range(1)),
            },
            generations=Generations(0, lambda bound: None),
        )
        self.store.open_namespace(NS, 1)
        for tier in (Tier.HOST, Tier.NVME):
            self.store.room.grant(tier, 0)

    def put(self, name: str) -> bytes:
        key, payload = key_of(name), bytes(LENGTH)
        made = payload_sum(
            payload,
            key=key,
            fingerprint=IDENTITY.fingerprint,
            namespace_generation=IDENTITY.generation,
            shard=IDENTITY.shard,
            codec=Codec.RAW,
            length=LENGTH,
        )
        meta = PageMeta(key=key, length=LENGTH, codec=Codec.RAW, payload_sum=NO_SUM)
        filling = self.store.reserve(NS, 0, meta, record_bytes(LENGTH))
        ref = filling.ref
        header = RecordHeader(
            fingerprint=IDENTITY.fingerprint,
            namespace_generation=IDENTITY.generation,
            shard=IDENTITY.shard,
            key=key,
            length=LENGTH,
            codec=Codec.RAW,
            lossy=False,
            payload_sum=made,
            generation=ref.generation,
            sequence=ref.generation,
            tier=Tier.HOST,
            slot=ref.slot,
            boot_id=1,
            created_ms=0,
        )
        record = self.arena.view(ref.slot, 0, HEADER_BYTES + LENGTH)
        record[:] = encode_header(header) + payload
        filling.seal()
        return key

    def mover(self, lower: PlainLower) -> Mover:
        return Mover(self.store, self.arena, lower, codec=Codec.RAW)  # type: ignore[arg-type]

    def down(self, mover: Mover, key: bytes, io_class: IoClass) -> asyncio.Task[MoveCode]:
        (reading,) = self.store.acquire(NS, 0, rows([key]))
        assert isinstance(reading, Reading)
        page = Subject(namespace=NS, key=key, identity=IDENTITY, layout=None)
        return asyncio.create_task(mover.demote(reading, page, io_class))


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    try:
        yield made
    finally:
        made.arena.close()


@pytest.mark.parametrize("first", [IoClass.DEMOTE, IoClass.PUT])
def test_a_page_is_not_written_twice_at_once(rig: Rig, first: IoClass) -> None:
    """The late one of two records, cut off by a crash, would be the younger of the page."""

    async def run() -> None:
        lower = PlainLower(rig.tier)
        mover, key, other = rig.mover(lower), rig.put("page"), rig.put("other")
        begun = [rig.down(mover, key, first)]
        begun += [rig.down(mover, key, IoClass.PUT), rig.down(mover, other, IoClass.PUT)]
        await asyncio.sleep(0.05)
        assert rig.store.status()[Tier.NVME].filling == 2  # one of each page
        rig.tier.gate.set()
        assert await asyncio.gather(*begun) == [MoveCode.DONE] * 3
        assert len(rig.tier.written) == 2
        assert lower.pool.close(5)

    asyncio.run(run())
    counts = rig.store.status()
    assert (counts[Tier.NVME].filling, counts[Tier.HOST].pinned) == (0, 0)


def test_the_next_one_writes_when_the_first_is_cancelled(rig: Rig) -> None:
    async def run() -> None:
        lower = PlainLower(rig.tier)
        mover, key = rig.mover(lower), rig.put("page")
        first, second = (rig.down(mover, key, IoClass.PUT) for _ in range(2))
        await asyncio.sleep(0.05)
        first.cancel()
        await asyncio.sleep(0.05)
        rig.tier.gate.set()
        assert await second is MoveCode.DONE
        assert lower.pool.close(5)
        await asyncio.sleep(0.05)

    asyncio.run(run())
    assert rig.store.status()[Tier.HOST].pinned == 0
    assert rig.store.survey.in_tier(NS, 0, rows([key_of("page")]), Tier.NVME).all()
