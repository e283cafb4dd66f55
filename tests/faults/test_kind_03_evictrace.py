"""Kind 3, EVICTRACE: a reader, a lookup, a lease or a movement that races eviction and delete gets
the old bytes or an honest outcome, never the bytes of whoever came after.
"""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from kvtier.core.page import GetCode, Tier
from kvtier.testing.faulty_tier import Fault, FaultKind
from tests.faults.kinds_rig import (
    READ,
    always,
    get_checked,
    keys_of,
    on_loop,
    pages_of,
    put_on_disk,
    running,
    until,
)

#: Some 150 pages on NVMe, some 200 in host memory.
SMALL = ("nvme.bytes=4MiB", "host.bytes=4MiB")


async def fill_disk(daemon, ns):
    """More durable pages than the tier holds: everything that may give way has. Where they are."""
    keys = keys_of(f"fill {n}" for n in range(200))
    for at in range(0, 200, 50):
        await ns.put(keys[at : at + 50], pages_of(keys[at : at + 50]), durable="nvme")
    assert daemon.metric("kvtier_pages_total", event="evicted") > 0
    found = [daemon.copies(ns, key).get(Tier.NVME) for key in keys]
    assert len(found) > 100
    return [ref for ref in found if ref is not None]


@pytest.mark.parametrize("way", ["deleted", "evicted"])
@on_loop
async def test_a_page_that_goes_while_it_is_read_is_itself_or_a_miss(base, way):
    """The read takes longer than everything that happens to its slot meanwhile."""
    keys = keys_of(["slow"])
    await put_on_disk(base, keys, *SMALL)
    async with running(base, *SMALL) as daemon:
        ns = await daemon.namespace()
        (slot,) = daemon.slots(ns, keys)
        daemon.disk.plan(always(FaultKind.HANG), slots=[slot])
        reading = asyncio.create_task(get_checked(ns, keys))
        await until(lambda: daemon.disk.hanging)
        if way == "deleted":
            assert (await ns.delete(keys)).deleted == 1
        used = {ref.slot for ref in await fill_disk(daemon, ns)}
        assert slot not in used, "a slot that is being read was given away"
        assert not reading.done()
        daemon.disk.release()
        (item,) = await reading
        if way == "deleted":
            assert item.reason is GetCode.MISS
            assert (await ns.lookup(keys)).hits == 0
        else:
            assert item.reason is GetCode.HIT, "what is being read is not evicted"
        await daemon.settled()


@on_loop
async def test_a_lease_shorter_than_the_transfer(base):
    """It ends while the page is read: the transfer holds the page itself."""
    keys = keys_of(range(4))
    await put_on_disk(base, keys, *SMALL)
    async with running(base, *SMALL, "nvme.io_threads=6") as daemon:
        ns = await daemon.namespace()
        daemon.disk.plan(always(FaultKind.HANG), slots=daemon.slots(ns, keys))
        async with ns.lease(keys, ttl=0.1) as held:
            assert held.prefix == 4
            reading = asyncio.create_task(get_checked(ns, keys))
            await until(lambda: daemon.store.pins.count() == 0)
            assert not reading.done()
            assert held.reasons == [GetCode.UNAVAILABLE] * 4, "and says so"
            await fill_disk(daemon, ns)
            daemon.disk.release()
            assert (await reading).prefix == 4
        await daemon.settled()


@on_loop
async def test_a_lease_that_has_ended_gives_old_bytes_or_none(base):
    keys = keys_of(range(20))
    async with running(base, *SMALL) as daemon:
        ns = await daemon.namespace()
        await ns.put(keys, pages_of(keys))
        before = [daemon.copies(ns, key)[Tier.HOST] for key in keys]
        async with ns.lease(keys, ttl=0.1):
            await until(lambda: daemon.store.pins.count() == 0)
            await ns.delete(keys[:10])
            others = keys_of(f"other {n}" for n in range(250))
            for at in range(0, 250, 50):
                await ns.put(others[at : at + 50], pages_of(others[at : at + 50]))
            refs = [daemon.copies(ns, key).get(Tier.HOST) for key in others]
            assert {ref.slot for ref in refs if ref} & {ref.slot for ref in before}, "refilled"
            got = await get_checked(ns, keys)
            assert set(got.reasons) == {GetCode.MISS}
        await daemon.settled()


@pytest.mark.parametrize("way", ["deleted", "evicted"])
@on_loop
async def test_a_page_that_goes_between_lookup_and_get(base, way):
    keys = keys_of(range(4))
    await put_on_disk(base, keys, *SMALL)
    async with running(base, *SMALL) as daemon:
        ns = await daemon.namespace()
        assert (await ns.lookup(keys)).prefix == 4
        if way == "deleted":
            async with ns.lease(keys[:1]):  # somebody else's lease does not keep it findable
                await ns.delete(keys)
        else:
            await fill_disk(daemon, ns)
        reads = daemon.disk.calls(READ)
        assert (await get_checked(ns, keys)).reasons == [GetCode.MISS] * 4
        assert (await ns.lookup(keys)).hits == 0
        assert daemon.disk.calls(READ) == reads
        assert (await ns.put(keys, pages_of(keys))).stored == 4
        await daemon.settled()


@on_loop
async def test_files_that_are_cut_by_hand_between_lookup_and_get(base):
    """One attempt a page and get; a device that goes on failing is given up."""
    keys = keys_of(range(4))
    await put_on_disk(base, keys)
    async with running(base, "nvme.retry_s=60") as daemon:
        ns = await daemon.namespace()
        assert (await ns.lookup(keys)).prefix == 4
        for path in (base / "disk").glob("segment-*"):
            os.truncate(path, 4096)
        for _ in range(2):
            reads = daemon.disk.calls(READ)
            assert (await get_checked(ns, keys)).reasons == [GetCode.IO_ERROR] * 4
            assert daemon.disk.calls(READ) - reads == 4
        # Eight failures: the device is offline, and its pages go.
        await until(lambda: daemon.counts(Tier.NVME).sealed == 0)
        assert (await ns.lookup(keys)).hits == 0
        assert (await get_checked(ns, keys)).reasons == [GetCode.MISS] * 4
        assert daemon.disk.calls(READ) - reads == 4
        assert (await ns.put(keys, pages_of(keys))).stored == 4
        await daemon.settled()


@on_loop
async def test_a_put_that_is_cancelled_while_the_tier_grows_for_it(base):
    """The segment is made all the same; who needs it next finds it, and not that it is there."""
    first, second = keys_of(range(2))
    async with running(base) as daemon:
        ns = await daemon.namespace()
        daemon.disk.create_s = 0.2
        put = asyncio.create_task(ns.put([first], pages_of([first]), durable="nvme"))
        await until(lambda: daemon.counts(Tier.HOST).pinned)
        await asyncio.sleep(0.05)
        put.cancel()
        await asyncio.wait([put])
        await until(lambda: not daemon.counts(Tier.HOST).pinned)
        other = await ns.put([second], pages_of([second]), durable="nvme")
        assert other.durable == 1
        assert [device.is_online for device in (await daemon.kv.status()).devices] == [True]
        assert len(daemon.disk.slabs()) == 1
        await daemon.settled()


# -- everything at once ---------------------------------------------------------------------------

BIG = 96 << 10
TASKS, STEPS, KEYS_EACH = 8, 40, 4


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.soak)])
@on_loop
async def test_movements_race_evictions_and_deletes(base, seed):
    """Each key is put and deleted by one task; all tasks get, prefetch, demote and lease any key.

    A key that its owner has deleted is a miss to it, whatever the others had begun with it.
    """
    tiny = ("host.bytes=1MiB", "nvme.bytes=4MiB")  # 10 and some 28 pages
    owned = [keys_of((task, n) for n in range(KEYS_EACH)) for task in range(TASKS)]
    everything = [key for keys in owned for key in keys]
    deleted: set[bytes] = set()
    async with running(base, *tiny) as daemon:
        ns = await daemon.namespace(BIG)
        slow = [
            Fault(kind=FaultKind.SLOW, operation=READ, probability=p, delay_s=delay)
            for p, delay in ((0.3, 0.02), (0.1, 0.05))
        ]
        daemon.disk.plan(*slow, seed=seed)

        async def work(task):
            rng = random.Random(f"{seed} {task}")
            for _ in range(STEPS):
                await step(rng, owned[task])
                await asyncio.sleep(0)

        async def step(rng, own):
            key = rng.choice(own)
            some = rng.sample(everything, rng.randint(1, 5))
            what = rng.randrange(8)
            if what == 0:
                deleted.discard(key)
                await ns.put([key], pages_of([key], BIG))
            elif what == 1:
                deleted.discard(key)
                await ns.put([key], pages_of([key], BIG), durable="nvme")
            elif what == 2:
                await ns.delete([key])
                deleted.add(key)
                assert (await get_checked(ns, [key], BIG)).hits == 0
            elif what == 3:
                await ns.prefetch(some)
            elif what == 4:
                await ns.demote(some)
            elif what == 5:
                async with ns.lease(some):
                    await get_checked(ns, some, BIG)
            else:
                await get_checked(ns, some, BIG)

        await asyncio.gather(*(work(task) for task in range(TASKS)))
        assert (await get_checked(ns, sorted(deleted), BIG)).hits == 0
        moved = daemon.node.nvme.mover.promotions
        await until(lambda: daemon.node.nvme.tiering.under_way == 0)
        assert sum(moved.values()) > 10
        await daemon.settled()
    async with running(base, *tiny) as daemon:
        ns = await daemon.namespace(BIG)
        got = await get_checked(ns, everything, BIG)
        back = {
            key for key, item in zip(everything, got, strict=True) if item.reason is GetCode.HIT
        }
        assert not back & deleted, f"seed {seed}"
        await daemon.settled()
