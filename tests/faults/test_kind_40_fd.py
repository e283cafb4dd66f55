"""Kind 40, FD: with 128 descriptors for everything, no outcome of a get keeps one, and running out
of them costs the calls of that moment and nothing after it.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket

import pytest

import kvtier
from kvtier.core.page import GetCode, Tier
from kvtier.testing.daemon_process import DaemonProcess
from tests.faults.kinds_rig import (
    get_checked,
    keys_of,
    on_loop,
    opaque,
    pages_of,
    short_directory,
)

LIMIT = 128
KEYS = keys_of(range(96))
SLACK = 4


@pytest.fixture
def daemon():
    with short_directory() as base:
        settings = (
            f"nvme.paths={base}/disk",
            "nvme.bytes=32MiB",
            "nvme.clean_percent=0",
            "nvme.retry_s=0.2",
            "host.bytes=1MiB",  # 51 pages: half of the gets bring pages up
        )
        limited = ("sh", "-c", f'ulimit -n {LIMIT}; exec "$@"', "sh")
        with DaemonProcess(base, *settings, prefix=limited) as process:
            yield process


def descriptors(process):
    return len(os.listdir(f"/proc/{process.pid}/fd"))


def corrupt_on_disk(process, pages):
    """One bit of each of these payloads, in place."""
    flipped = 0
    for path in (process.base / "disk").glob("segment-*"):
        data = path.read_bytes()
        with path.open("r+b") as file:
            for page in pages:
                at = data.find(page)
                if at >= 0:
                    os.pwrite(file.fileno(), bytes([data[at + 99] ^ 1]), at + 99)
                    flipped += 1
    return flipped


async def disconnected(url):
    """A client that goes away in the middle of a get."""
    async with kvtier.aio.connect(url, deadline=10.0) as kv:
        ns = await kv.namespace(opaque(), tenant="t")
        call = asyncio.create_task(ns.get(KEYS))
        await asyncio.sleep(0.002)
    await asyncio.wait([call])
    assert isinstance(call.exception(), kvtier.KvtierError | None)


async def many_gets(process, calls, seed):
    """Hits of both tiers, misses, corrupt pages, cancelled calls; how often each outcome came."""
    rng = random.Random(seed)
    seen: dict[GetCode, int] = {}
    async with kvtier.aio.connect(process.url, deadline=20.0) as kv:
        ns = await kv.namespace(opaque(), tenant="t")
        for n in range(calls):
            keys = rng.sample(KEYS, 6) + keys_of([f"absent {n}"])
            if n % 10 == 0:
                key = KEYS[n // 10 % len(KEYS)]
                await ns.put([key], pages_of([key]), durable="nvme")
                await fill_host(ns, n)
                corrupt_on_disk(process, pages_of([key]))
                keys.append(key)
            call = asyncio.create_task(get_checked(ns, keys))
            if n % 7 == 0:
                await asyncio.sleep(rng.random() * 0.005)
                call.cancel()
                await asyncio.wait([call])
                continue
            got = await call
            for code, count in got.counts().items():
                seen[code] = seen.get(code, 0) + count
    return seen


async def fill_host(ns, n):
    keys = keys_of(f"fill {n} {i}" for i in range(60))
    await ns.put(keys, pages_of(keys), chain=False)


async def check_flat(process, calls):
    async with kvtier.aio.connect(process.url, deadline=20.0) as kv:
        ns = await kv.namespace(opaque(), tenant="t")
        put = await ns.put(KEYS, pages_of(KEYS), durable="nvme", chain=False)
        assert put.durable >= 50
        await many_gets(process, 20, seed=0)
        before = descriptors(process)
        assert before < LIMIT - 32
        seen = await many_gets(process, calls, seed=1)
        assert {GetCode.HIT, GetCode.MISS, GetCode.CORRUPT} <= set(seen), seen
        status = await kv.status()
        assert status.counters["hit_nvme"] > 50
        assert status.counters["condemned"] > 0
        for _ in range(10):
            await disconnected(process.url)
        await asyncio.sleep(0.2)
        assert abs(descriptors(process) - before) <= SLACK


@on_loop
async def test_no_outcome_keeps_a_descriptor(daemon):
    await check_flat(daemon, 60)


@pytest.mark.soak
@on_loop
async def test_no_outcome_of_20_000_gets_keeps_a_descriptor(daemon):
    await check_flat(daemon, 20_000)


@on_loop
async def test_out_of_descriptors(daemon):
    """A hundred connections take what there is. Calls of clients that are connected go on, and no
    page is lost for it."""
    keys = KEYS[:40]
    async with kvtier.aio.connect(daemon.url, deadline=10.0) as kv:
        ns = await kv.namespace(opaque(), tenant="t")
        large = await kv.namespace(opaque(100 << 10), tenant="t")
        larger = await kv.namespace(opaque(200 << 10), tenant="t")
        old = pages_of(keys[:1], 100 << 10)
        assert (await large.put(keys[:1], old, durable="nvme")).durable == 1
        assert (await ns.put(keys, pages_of(keys), durable="nvme")).durable == 40
        before = descriptors(daemon)
        taken = []
        for _ in range(LIMIT + 20):
            taken.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            taken[-1].settimeout(1.0)
            try:
                taken[-1].connect(str(daemon.socket))
            except (BlockingIOError, TimeoutError):
                break
        try:
            await asyncio.sleep(0.3)
            assert descriptors(daemon) >= LIMIT - 2
            assert (await get_checked(ns, keys)).prefix == 40
            # A page of another size asks for a segment, and so for a descriptor; without one it
            # takes that of the page used least.
            put = await larger.put(keys[:1], pages_of(keys[:1], 200 << 10), durable="nvme")
            assert put.stored == 1, "durable or not"
        finally:
            for each in taken:
                each.close()
        for _ in range(100):
            await asyncio.sleep(0.05)
            if abs(descriptors(daemon) - before) <= SLACK:
                break
        assert abs(descriptors(daemon) - before) <= SLACK
        assert [device.is_online for device in (await kv.status()).devices] == [True]
        assert {item.tier for item in await ns.lookup(keys)} <= {Tier.HOST, Tier.NVME}, "lost"
        await asyncio.sleep(0.3)  # nvme.retry_s
        async with kvtier.aio.connect(daemon.url, deadline=10.0) as other:
            ns2 = await other.namespace(opaque(), tenant="t")
            assert (await get_checked(ns2, keys)).prefix == 40
            for _ in range(100):  # the device looks again when its time has come
                put = await larger.put(keys[1:2], pages_of(keys[1:2], 200 << 10), durable="nvme")
                if put.durable == 1:
                    break
                await asyncio.sleep(0.1)
            assert put.durable == 1
