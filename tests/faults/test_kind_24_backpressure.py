"""Kind 24, BACKPRESSURE: a device far slower than what is put costs copies on NVMe, which are
dropped and counted, and neither memory nor the calls of anybody.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import time

import numpy as np
import pytest

from kvtier.core.page import GetCode, PutCode, Tier
from kvtier.testing.faulty_tier import FaultKind
from tests.faults.kinds_rig import (
    WRITE,
    always,
    get_checked,
    keys_of,
    on_loop,
    page_of,
    pages_of,
    running,
    until,
)

PAGE = 64 << 10
QUEUE = 32
MIB = 1 << 20


def settings(policy, *more):
    return (
        f"nvme.write_policy={policy}",
        f"nvme.queue_pages_max={QUEUE}",
        "nvme.io_threads=1",  # the rate below is that of one write after another
        "nvme.bytes=1GiB",  # more than goes down in a minute
        f"nvme.clean_percent={25 if policy == 'back' else 0}",
        "host.bytes=16MiB",
        *more,
    )


def resident_bytes():
    """Of this process, with the arena, which is all there from the start."""
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


class _Load:
    """Clients that put as fast as they can, and what was seen meanwhile."""

    def __init__(self, daemon, ns):
        self.daemon, self.ns = daemon, ns
        self.numbers = itertools.count()
        self.page = page_of(b"", PAGE)  # making pages takes longer than putting them
        self.puts = self.put_s = self.get_s = self.memory = 0.0
        self.codes = dict.fromkeys(PutCode, 0)
        self.under_way = self.waiting = 0
        self.ended = False

    async def put(self):
        while not self.ended:
            keys = keys_of(next(self.numbers) for _ in range(16))
            began = time.monotonic()
            put = await self.ns.put(keys, [self.page] * 16, chain=False)
            self.put_s = max(self.put_s, time.monotonic() - began)
            for code, count in put.counts().items():
                self.codes[code] += count

    async def get(self, keys):
        """A page that is in host memory or came down before: it is always answered at once."""
        while not self.ended:
            began = time.monotonic()
            got = await get_checked(self.ns, keys, PAGE)
            self.get_s = max(self.get_s, time.monotonic() - began)
            assert got.reasons == [GetCode.HIT] * len(keys)
            await asyncio.sleep(0.01)

    async def watch(self):
        base = resident_bytes()
        health = self.daemon.node.nvme.devices.health[0]
        while not self.ended:
            self.under_way = max(self.under_way, self.daemon.node.nvme.tiering.under_way)
            self.waiting = max(self.waiting, health.pool.waiting)
            self.memory = max(self.memory, resident_bytes() - base)
            await asyncio.sleep(0.05)

    async def run(self, seconds, held, *, clients=4):
        tasks = [asyncio.create_task(self.put()) for _ in range(clients)]
        tasks += [asyncio.create_task(self.get(held)), asyncio.create_task(self.watch())]
        began = time.monotonic()
        await asyncio.sleep(seconds)
        self.ended = True
        await asyncio.gather(*tasks)
        self.seconds = time.monotonic() - began


async def under_load(base, policy, seconds, *, device_bytes_per_s, memory_max):
    held = keys_of(f"held {n}" for n in range(4))
    async with running(base, *settings(policy)) as daemon:
        ns = await daemon.namespace(PAGE)
        assert (await ns.put(held, pages_of(held, PAGE), durable="nvme")).durable == 4
        daemon.disk.plan(always(FaultKind.SLOW, WRITE, delay_s=PAGE / device_bytes_per_s))
        written = daemon.metric("kvtier_nvme_bytes_total", way="written")
        async with ns.lease(held, ttl=100.0):
            load = _Load(daemon, ns)
            await load.run(seconds, held)
        stored = load.codes[PutCode.STORED]
        assert load.codes == dict.fromkeys(PutCode, 0) | {PutCode.STORED: stored}
        offered = stored * PAGE / load.seconds
        written = daemon.metric("kvtier_nvme_bytes_total", way="written") - written
        assert offered > 2 * device_bytes_per_s, "the load was no load"
        assert written / load.seconds < 2 * device_bytes_per_s
        assert load.under_way <= QUEUE
        assert load.waiting <= QUEUE
        assert load.memory <= memory_max
        assert max(load.put_s, load.get_s) < 5.0

        await until(lambda: daemon.node.nvme.tiering.under_way == 0, 30.0)
        if policy == "through":
            # Every page that was stored went down, or was given up and counted.
            dropped = daemon.node.nvme.tiering.dropped
            assert dropped["queue"] > 0
            down = sum(daemon.node.nvme.mover.demotions.values()) - 4
            assert down + dropped.total() == stored
            told = daemon.metric("kvtier_moves_dropped_total", reason="queue")
            assert told == dropped["queue"]
        daemon.disk.heal()
        new = keys_of(f"new {n}" for n in range(16))
        put = await ns.put(new, pages_of(new, PAGE), durable="nvme")
        assert put.durable == 16, "and then as ever"
        await until(lambda: daemon.counts(Tier.HOST).pinned == 0)
    async with running(base, *settings(policy)) as daemon:
        ns = await daemon.namespace(PAGE)
        assert (await get_checked(ns, [*held, *new], PAGE)).prefix == 20
        await daemon.settled()


@pytest.mark.parametrize("policy", ["through", "back"])
@on_loop
async def test_a_slow_device_under_full_load(base, policy):
    await under_load(base, policy, 1.2, device_bytes_per_s=MIB // 2, memory_max=64 * MIB)


@pytest.mark.soak
@pytest.mark.parametrize("policy", ["through", "back"])
@on_loop
async def test_a_device_of_5_mb_a_second_under_a_minute_of_full_load(base, policy):
    await under_load(base, policy, 60.0, device_bytes_per_s=5 * MIB, memory_max=256 * MIB)


@on_loop
async def test_a_device_that_stands_still_does_not_make_puts_busy(base):
    """Copies are given up before the places in host memory are all taken by those that wait."""
    queue = "nvme.queue_pages_max=1024"
    async with running(base, *settings("through", queue)) as daemon:
        ns = await daemon.namespace(PAGE)
        daemon.disk.plan(always(FaultKind.HANG, WRITE))
        page = page_of(b"", PAGE)
        codes = []
        for at in range(0, 320, 16):  # host memory holds 240
            keys = keys_of(range(at, at + 16))
            codes += (await ns.put(keys, [page] * 16, chain=False)).reasons
        assert codes == [PutCode.STORED] * 320


@on_loop
async def test_over_the_queue_calls_are_busy_and_answered_at_once(base):
    """Demote and Prefetch do not wait for room in the queue: BUSY says that it is full."""
    keys = keys_of(range(3 * QUEUE))
    async with running(base, *settings("back", "nvme.clean_percent=0")) as daemon:
        ns = await daemon.namespace(PAGE)
        await ns.put(keys, [page_of(key, PAGE) for key in keys])
        daemon.disk.plan(always(FaultKind.HANG, WRITE))
        began = time.monotonic()
        codes = np.array((await ns.demote(keys)).reasons)
        assert time.monotonic() - began < 1.0
        assert (codes == GetCode.HIT).sum() == QUEUE
        assert (codes == GetCode.BUSY).sum() == 2 * QUEUE
        assert (codes[:QUEUE] == GetCode.HIT).all(), "the first that were asked for"
        again = np.array((await ns.demote(keys[QUEUE:])).reasons)
        assert (again == GetCode.BUSY).all()
        assert (await get_checked(ns, keys[-8:], PAGE)).prefix == 8
        daemon.disk.heal()
        await until(lambda: daemon.node.nvme.tiering.under_way == 0)
        assert (await ns.demote(keys[:QUEUE])).reasons == [GetCode.HIT] * QUEUE
        assert daemon.counts(Tier.NVME).sealed == QUEUE
        await daemon.settled()


@on_loop
async def test_a_reader_that_is_slow_holds_a_bounded_part_of_the_arena(base):
    """Pages that are brought up for it are no more than an eighth of host memory at once."""
    keys = keys_of(range(120))
    async with running(base, *settings("back", "nvme.clean_percent=0")) as daemon:
        ns = await daemon.namespace(PAGE)
        put = await ns.put(keys, [page_of(key, PAGE) for key in keys], durable="nvme")
        assert put.durable == 120
    async with running(base, *settings("back")) as daemon:
        ns = await daemon.namespace(PAGE)
        most = 0
        reading = asyncio.create_task(get_checked(ns, keys, PAGE))
        while not reading.done():
            most = max(most, daemon.counts(Tier.HOST).pinned + daemon.counts(Tier.HOST).filling)
            await asyncio.sleep(0)
        assert (await reading).prefix == 120
        assert 0 < most * (PAGE + 4096) <= daemon.counts(Tier.HOST).capacity_bytes // 8
        await daemon.settled()
