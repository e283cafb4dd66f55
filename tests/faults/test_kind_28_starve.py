"""Kind 28, STARVE: pages that are put come to NVMe and are found there, host memory is refilled by
what is read, writers do not starve a reader, and the tier is not written for nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict

import numpy as np
import pytest

import kvtier
from kvtier.core.page import GetCode, Tier
from kvtier.testing.faulty_tier import FaultKind
from tests.faults.kinds_rig import (
    WRITE,
    always,
    get_checked,
    keys_of,
    on_loop,
    page_of,
    pages_of,
    put_on_disk,
    running,
    until,
)

PAGE = 96 << 10
RECORD = 100 << 10
#: Host memory of 10, 20, 40, 81 pages: 0.25x, 0.5x, 1x and 2x of a GPU's pool of 40.
POOLS = {0.25: "1MiB", 0.5: "2MiB", 1.0: "4MiB", 2.0: "8MiB"}
WORKING_SET = 160


def lru_hits(trace, capacity):
    """Of each request, whether an LRU cache of so many pages has it."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = []
    for n in trace:
        hits.append(n in cache)
        cache[n] = None
        cache.move_to_end(n)
        if len(cache) > capacity:
            cache.popitem(last=False)
    return hits


async def replay(daemon, ns, trace, *, step=4):
    """What an engine does: asks for pages, and puts those that it had to compute."""
    hits = []
    for at in range(0, len(trace), step):
        keys = keys_of(trace[at : at + step])
        got = await get_checked(ns, keys, PAGE)
        hits += [item.reason is GetCode.HIT for item in got]
        missing = [key for key, item in zip(keys, got, strict=True) if item.ref is None]
        while missing:
            put = await ns.put(missing, pages_of(missing, PAGE), chain=False)
            missing = [key for key, item in zip(missing, put, strict=True) if not item.is_stored]
            # An engine that outran the device would have pages dropped, and counted.
            await until(lambda: daemon.node.nvme.tiering.under_way == 0)
    return hits


@pytest.mark.parametrize(
    "pool", [0.25, 2.0, *(pytest.param(pool, marks=pytest.mark.soak) for pool in (0.5, 1.0))]
)
@on_loop
async def test_write_through_finds_everything_again(base, pool):
    """Four times the GPU's pool, twice: however small host memory is, pass 2 finds pass 1."""
    settings = ("nvme.write_policy=through", f"host.bytes={POOLS[pool]}", "nvme.bytes=64MiB")
    trace = list(range(WORKING_SET))
    async with running(base, *settings) as daemon:
        ns = await daemon.namespace(PAGE)
        assert not any(await replay(daemon, ns, trace))
        second = await replay(daemon, ns, trace)
        dropped = sum(daemon.node.nvme.tiering.dropped.values())
        assert sum(second) >= 0.98 * len(trace), f"{dropped} were given up"
        await daemon.settled()


@pytest.mark.parametrize("pool", [0.5, pytest.param(1.0, marks=pytest.mark.soak)])
@on_loop
async def test_a_tier_too_small_for_all_is_no_worse_than_lru(base, pool):
    """A trace with favourites over an NVMe tier of about half of it."""
    settings = (
        "nvme.write_policy=through",
        f"host.bytes={POOLS[pool]}",
        "nvme.bytes=6MiB",
    )
    rng = np.random.default_rng(28)
    trace = (rng.zipf(1.2, WORKING_SET) % WORKING_SET).tolist()
    async with running(base, *settings) as daemon:
        ns = await daemon.namespace(PAGE)
        first = await replay(daemon, ns, trace)
        second = await replay(daemon, ns, trace)
        segment_bytes = daemon.disk.segment_bytes
        segments = daemon.counts(Tier.NVME).capacity_bytes // segment_bytes
        capacity = segments * (segment_bytes // RECORD)
        assert capacity < len(set(trace)), "else there is nothing to choose"
        bound = sum(lru_hits(trace * 2, capacity)[len(trace) :]) / len(trace)
        assert sum(second) / len(trace) >= bound - 0.02, sum(first) / len(trace)
        await daemon.settled()


@on_loop
async def test_host_memory_is_refilled_by_what_is_read(base):
    keys = keys_of(range(8))
    await put_on_disk(base, keys, size=PAGE)
    async with running(base) as daemon:
        ns = await daemon.namespace(PAGE)
        first = await get_checked(ns, keys, PAGE)
        second = await get_checked(ns, keys, PAGE)
        assert {item.tier for item in first} == {Tier.NVME}
        assert {item.tier for item in second} == {Tier.HOST}
        # Also where something has to give way for it.
        other = keys_of(f"other {n}" for n in range(60))
        await ns.put(other, pages_of(other, PAGE), chain=False)
        assert Tier.HOST not in daemon.copies(ns, keys[0])
        assert {item.tier for item in await get_checked(ns, keys, PAGE)} == {Tier.NVME}
        assert {item.tier for item in await get_checked(ns, keys, PAGE)} == {Tier.HOST}


@on_loop
async def test_50_writers_do_not_take_a_page_from_its_reader(base):
    """It is read again and again, and found every time, in one tier or the other."""
    settings = ("host.bytes=8MiB", "nvme.bytes=64MiB", "nvme.clean_percent=20")  # 81 pages
    (key,) = keys = keys_of(["resident"])
    numbers = itertools.count()
    page = page_of(b"", PAGE)
    async with running(base, *settings) as daemon:
        ns = await daemon.namespace(PAGE)
        assert (await ns.put(keys, pages_of(keys, PAGE), durable="nvme")).durable == 1
        reads, slowest = 0, 0.0
        ended = False

        async def write():
            while not ended:
                some = keys_of(next(numbers) for _ in range(2))
                await ns.put(some, [page] * 2, chain=False)

        writers = [asyncio.create_task(write()) for _ in range(50)]
        while reads < 12:
            began = time.monotonic()
            got = await get_checked(ns, keys, PAGE)
            slowest = max(slowest, time.monotonic() - began)
            assert got.reasons == [GetCode.HIT], f"read {reads}"
            reads += 1
        ended = True
        await asyncio.gather(*writers)
        assert next(numbers) > 81, "host memory was turned over"
        assert slowest < 2.0
        assert daemon.copies(ns, key)
        await daemon.settled()


@on_loop
async def test_demotions_do_not_starve_gets(base):
    """All threads but one write, each write takes long, and hundreds wait: a get reads at once."""
    keys = keys_of(range(8))
    await put_on_disk(base, keys, size=PAGE)
    settings = ("nvme.write_policy=through", "host.bytes=32MiB", "nvme.io_threads=2")
    write_s = 0.1
    async with running(base, *settings, "nvme.bytes=64MiB") as daemon:
        ns = await daemon.namespace(PAGE)
        daemon.disk.plan(always(FaultKind.SLOW, WRITE, delay_s=write_s))
        for at in range(0, 200, 50):
            some = keys_of(f"down {n}" for n in range(at, at + 50))
            await ns.put(some, pages_of(some, PAGE), chain=False)
        assert daemon.node.nvme.tiering.under_way > 150
        for key in keys:
            began = time.monotonic()
            got = await get_checked(ns, [key], PAGE)
            assert got[0].tier is Tier.NVME
            # Behind the queue it would be seconds.
            assert time.monotonic() - began < 10 * write_s
        assert daemon.node.nvme.tiering.under_way > 50
        daemon.disk.heal()
        await until(lambda: daemon.node.nvme.tiering.under_way == 0)
        await daemon.settled()


@pytest.mark.parametrize("call", ["put", "flush"])
@on_loop
async def test_copies_that_nobody_waits_for_do_not_starve_a_durable_put_or_a_flush(base, call):
    """Hundreds of them wait for a slow device, those of the same pages among them."""
    settings = ("nvme.write_policy=through", "host.bytes=32MiB", "nvme.io_threads=1")
    keys = keys_of(["first"])
    async with running(base, *settings, "nvme.bytes=64MiB") as daemon:
        ns = await daemon.namespace(PAGE)
        daemon.disk.plan(always(FaultKind.SLOW, WRITE, delay_s=0.05))
        async with kvtier.aio.connect(daemon.url, deadline=20.0) as other:
            crowd = await other.namespace(ns.layout, tenant="t")
            for at in range(0, 200, 50):
                some = keys_of(f"down {n}" for n in range(at, at + 50))
                await crowd.put(some, pages_of(some, PAGE), chain=False)
        assert daemon.node.nvme.tiering.under_way > 150
        began = time.monotonic()
        if call == "put":
            assert (await ns.put(keys, pages_of(keys, PAGE), durable="nvme")).durable == 1
        else:
            assert (await ns.put(keys, pages_of(keys, PAGE))).stored == 1
            assert (await daemon.kv.flush()).pages_lost == 0
        assert daemon.node.nvme.tiering.under_way > 50, "behind the others it would be 10 s"
        assert time.monotonic() - began < 5.0
        daemon.disk.heal()
        await until(lambda: daemon.node.nvme.tiering.under_way == 0)
        assert daemon.counts(Tier.NVME).sealed == 201
        await daemon.settled()


@on_loop
async def test_host_memory_larger_than_nvme_is_not_copied_round_and_round(base):
    """The cleaner stops when all that it may keep is there; an end copies what fits, once."""
    settings = ("host.bytes=8MiB", "nvme.bytes=4MiB", "nvme.clean_percent=100")
    keys, size, record = keys_of(range(400)), 16 << 10, 20 << 10
    async with running(base, *settings) as daemon:
        ns = await daemon.namespace(size)
        for at in range(0, 400, 50):
            await ns.put(keys[at : at + 50], pages_of(keys[at : at + 50], size), chain=False)
        nvme, mover = daemon.counts(Tier.NVME).capacity_bytes, daemon.node.nvme.mover
        # On a busy machine it can pause: it has stopped when nothing has come for a second.
        written = still = 0
        while still < 5:
            await asyncio.sleep(0.2)
            still = still + 1 if written == mover.bytes_written > 0 else 0
            written = mover.bytes_written
            assert written <= 2 * nvme, "it goes on and on"
        assert (await get_checked(ns, keys[20:40], size)).prefix == 20
        daemon.stops = True
    assert mover.bytes_written - written <= nvme
    async with running(base, *settings) as daemon:
        ns = await daemon.namespace(size)
        found = (await ns.lookup(keys)).reasons
        assert found[20:40] == [GetCode.HIT] * 20, "what was used last was kept"
        assert found.count(GetCode.HIT) * record >= 0.8 * nvme
        await daemon.settled()
