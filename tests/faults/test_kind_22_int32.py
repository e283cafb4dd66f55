"""Kind 22, INT32: slots, offsets and sizes beyond what 32 bits hold, through both movements and a
restart.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import contextmanager

import numpy as np
import pytest

from kvtier.core.generations import Generations
from kvtier.core.handles import Filling, Reading
from kvtier.core.page import NO_SUM, Codec, PageMeta, PutCode, Tier
from kvtier.core.slabs import SlabAllocator
from kvtier.core.snapshots import Copies
from kvtier.core.store import Store
from kvtier.core.store_config import StoreConfig
from kvtier.packing.checksum import payload_sum
from kvtier.packing.record import HEADER_BYTES, RecordHeader, encode_header, record_bytes
from kvtier.tiers.host import HostArena
from kvtier.tiers.io_pool import IoClass, IoPool
from kvtier.tiers.nvme import SEGMENT_HEADER_BYTES, NvmeTier
from kvtier.tiers.nvme_device import open_device
from kvtier.tiers.nvme_geometry import slab_number
from kvtier.transfer.mover import MoveCode, Mover, Subject
from kvtier.transfer.place import Identity
from tests.faults.kinds_rig import (
    get_checked,
    key_of,
    keys_of,
    on_loop,
    page_of,
    pages_of,
    rows,
    running,
)
from tests.tiers.file_faults import SparseCalls

GIB = 1 << 30
PAGE = (1 << 20) - 4096  # a record of exactly 1 MiB
NS = 1
IDENTITY = Identity(fingerprint=b"f" * 32, generation=1, shard=0)


@on_loop
async def test_slots_of_the_second_device_need_more_than_32_bits(base):
    """A real daemon with segments of 256 MiB: the second device begins at slot 2**36."""
    settings = (f"nvme.paths={base}/disk0,{base}/disk1", "nvme.bytes=8GiB", "host.bytes=8MiB")
    small, big = keys_of(range(4)), keys_of(f"big {n}" for n in range(4))
    async with running(base, *settings) as daemon:
        assert daemon.disk.segment_bytes == 256 << 20
        ns, large = await daemon.namespace(), await daemon.namespace(64 << 10)
        assert (await ns.put(small, pages_of(small), durable="nvme")).durable == 4
        put = await large.put(big, pages_of(big, 64 << 10), durable="nvme")
        assert put.durable == 4
        slots = daemon.slots(large, big)
        assert min(slots) >= 1 << 36
        assert max(daemon.slots(ns, small)) < 1 << 20
        assert await daemon.kv.flush()
        daemon.stops = True  # through a checkpoint
    for ends_well in (False, True):
        async with running(base, *settings) as daemon:
            ns, large = await daemon.namespace(), await daemon.namespace(64 << 10)
            assert daemon.slots(large, big) == slots
            got = await get_checked(large, big, 64 << 10)
            assert {item.tier for item in got} == {Tier.NVME}
            assert (await get_checked(ns, small)).prefix == 4
            found = await daemon.kv.verify("nvme", bytes_per_second=1 << 30)
            assert (found.pages_done, found.pages_corrupt) == (8, 0)
            # A journal from here on: the next start finds this one by its header.
            await large.delete(big[:1])
            again = await large.put(big[:1], pages_of(big[:1], 64 << 10), durable="nvme")
            assert again.durable == 1
            slots = daemon.slots(large, big)
            await daemon.settled()
            daemon.stops = ends_well


class _Lower:
    """The tier as a mover sees it, with nothing around it."""

    timeout_s = 10.0

    def __init__(self, tier: NvmeTier) -> None:
        self.tier = tier
        self.segment_bytes = tier.segment_bytes
        self.pool = IoPool(threads=2, name="int32", queue_max=64)

    def submit(self, io_class, slot, work):
        return self.pool.submit(io_class, work)

    def serves(self, slot):
        return True

    def report(self, slot, error):
        assert error is None, error

    async def grow(self, record_bytes):
        raise AssertionError("there is room")

    async def prepare(self, slot, record_bytes):
        pass

    async def forget(self, generation):
        pass


@contextmanager
def parts(path, *, segment_bytes, slab):
    """A sparse tier of one segment, and a store over it and a small arena."""
    device = open_device(
        path,
        directory_id=b"0123456789abcdef",
        number=slab >> 20,
        segment_bytes=segment_bytes,
        calls=SparseCalls(),
    )
    tier = NvmeTier([device], segment_bytes=segment_bytes)
    tier.create_segment(slab)
    lower = _Lower(tier)
    with HostArena(8 << 20, slab_bytes=8 << 20, huge_pages=False) as arena:
        store = Store(
            StoreConfig(boot_id=7, pages_max=20_000, seed=1),
            tiers={
                Tier.HOST: SlabAllocator(slab_bytes=8 << 20, numbers=range(1)),
                Tier.NVME: SlabAllocator(slab_bytes=segment_bytes, numbers=[slab]),
            },
            generations=Generations(1 << 33, lambda bound: None),
        )
        store.open_namespace(NS, 1)
        store.room.grant(Tier.HOST, 0)
        store.room.grant(Tier.NVME, slab)
        try:
            yield store, arena, lower
        finally:
            lower.pool.close(2.0)
            tier.close()


def occupy(store, slab, *, segment_bytes, free):
    """Copies in all slots of the segment but the last `free`."""
    size = record_bytes(PAGE)
    count = segment_bytes // size - free
    units = segment_bytes // 4096
    copies = Copies(
        namespace=np.full(count, NS, np.uint32),
        shard=np.zeros(count, np.uint16),
        key=np.frombuffer(b"".join(key_of(f"old {n}") for n in range(count)), np.uint8).reshape(
            -1, 32
        ),
        generation=np.arange(1, count + 1, dtype=np.uint64),
        slot=np.arange(count, dtype=np.uint64) * np.uint64(size // 4096) + np.uint64(slab * units),
        length=np.full(count, PAGE, np.uint64),
        codec=np.full(count, Codec.RAW, np.uint8),
        lossy=np.zeros(count, np.uint8),
        parent=np.full(count, -1, np.int32),
    )
    assert store.snapshots.load(Tier.NVME, {slab: size}, copies) == count


def put(store, arena, name):
    """A page in host memory, as a put leaves it."""
    key, payload = key_of(name), page_of(key_of(name), PAGE)
    meta = PageMeta(key=key, length=PAGE, codec=Codec.RAW, payload_sum=NO_SUM)
    filling = store.reserve(NS, 0, meta, record_bytes(PAGE))
    assert isinstance(filling, Filling)
    names = {
        "key": key,
        "fingerprint": IDENTITY.fingerprint,
        "namespace_generation": IDENTITY.generation,
        "shard": IDENTITY.shard,
        "codec": Codec.RAW,
        "length": PAGE,
    }
    ref = filling.ref
    header = RecordHeader(
        **names,
        lossy=False,
        payload_sum=payload_sum(payload, **names),
        generation=ref.generation,
        sequence=ref.generation,
        tier=ref.tier,
        slot=ref.slot,
        boot_id=ref.boot_id,
        created_ms=0,
    )
    arena.view(ref.slot, 0, HEADER_BYTES + PAGE)[:] = encode_header(header) + payload
    assert filling.seal() is PutCode.STORED
    return key, payload


def acquire(store, key):
    (reading,) = store.acquire(NS, 0, rows([key]))
    assert isinstance(reading, Reading)
    return reading


@pytest.mark.parametrize("device", [0, 15])
def test_movements_beyond_4_gib_of_a_segment(tmp_path, device):
    """The last slots of a segment of 6 GiB: down, as it lies in the file, and up again."""
    segment_bytes, slab = 6 * GIB, slab_number(device, 3)
    with parts(tmp_path, segment_bytes=segment_bytes, slab=slab) as (store, arena, lower):
        arena.start_populating(lambda slab: None)
        assert arena.wait_populated(10.0)
        occupy(store, slab, segment_bytes=segment_bytes, free=3)
        made = [put(store, arena, name) for name in range(3)]

        async def main():
            mover = Mover(store, arena, lower, codec=Codec.RAW)
            for key, _ in made:
                page = Subject(namespace=NS, key=key, identity=IDENTITY, layout=None)
                source = acquire(store, key)
                host = source.ref
                assert await mover.demote(source, page, IoClass.PUT) is MoveCode.DONE
                assert store.condemn(host)
            store.survey.clear_quarantine(None)
            for key, payload in made:
                page = Subject(namespace=NS, key=key, identity=IDENTITY, layout=None)
                source = acquire(store, key)
                slot = source.ref.slot
                offset = slot * 4096 - slab * segment_bytes
                assert source.ref.tier is Tier.NVME
                assert segment_bytes - 3 * (1 << 20) <= offset < segment_bytes
                file = os.open(tmp_path / "segment-00000003", os.O_RDONLY)
                try:
                    at = SEGMENT_HEADER_BYTES + offset + HEADER_BYTES
                    assert os.pread(file, PAGE, at) == payload
                finally:
                    os.close(file)
                assert await mover.promote(source, page, IoClass.GET) is MoveCode.DONE
                with acquire(store, key) as above:
                    assert above.ref.tier is Tier.HOST
                    assert arena.view(above.ref.slot, HEADER_BYTES, PAGE) == payload
            store.survey.check()

        asyncio.run(main())
        counts = store.status()[Tier.NVME]
        assert counts.sealed == segment_bytes // (1 << 20)
        assert counts.used_bytes == segment_bytes > 1 << 32


def test_counts_of_a_tier_of_many_terabytes_do_not_wrap():
    """16 devices with 2**20 segments of 256 MiB: 2**52 bytes; the last slot and sums of bytes."""
    last = slab_number(15, (1 << 20) - 1)
    allocator = SlabAllocator(slab_bytes=256 << 20, numbers=[0, last])
    store = Store(
        StoreConfig(boot_id=7, pages_max=64, seed=1),
        tiers={Tier.NVME: allocator},
        generations=Generations(1 << 40, lambda bound: None),
    )
    store.open_namespace(NS, 1)
    store.room.grant(Tier.NVME, last)
    meta = PageMeta(key=key_of("far"), length=PAGE, codec=Codec.RAW, payload_sum=NO_SUM)
    filling = store.reserve(NS, 0, meta, record_bytes(PAGE), tier=Tier.NVME)
    assert isinstance(filling, Filling)
    assert filling.ref.slot == last << 16 == ((1 << 24) - 1) << 16
    assert filling.ref.slot * 4096 > 1 << 51
    assert filling.ref.generation > 1 << 40
    assert filling.seal() is PutCode.STORED
    with acquire(store, key_of("far")) as reading:
        assert reading.ref == filling.ref
    image = store.snapshots.take(Tier.NVME)
    assert image.copies().slot.tolist() == [filling.ref.slot]
    assert image.bindings == {last: record_bytes(PAGE)}
    store.survey.check()
