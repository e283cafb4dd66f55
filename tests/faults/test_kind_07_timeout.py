"""Kind 7, TIMEOUT: a device that hangs costs its own pages, for `nvme.io_timeout_ms`, and nothing
else: no other page, no other device, no thread for ever, no slot.
"""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from kvtier.core.page import GetCode, PutCode, Tier
from kvtier.testing.faulty_tier import FaultKind
from kvtier.tiers.nvme_geometry import split_slab
from tests.faults.kinds_rig import (
    READ,
    WRITE,
    always,
    get_checked,
    keys_of,
    on_loop,
    pages_of,
    running,
    until,
)

TIMEOUT_S = 0.4
#: A loaded machine takes its time; what waits for the device in turns takes ten times as long.
SLACK_S = 1.5
KEYS = keys_of(range(40))
OTHER, OTHER_BYTES = keys_of(f"other {n}" for n in range(8)), 40 << 10


def settings(base, *more):
    """Two devices. Each gets the segments of one page size."""
    return (
        f"nvme.paths={base}/disk0,{base}/disk1",
        "nvme.bytes=64MiB",
        f"nvme.io_timeout_ms={TIMEOUT_S * 1000:.0f}",
        "nvme.retry_s=60",
        *more,
    )


def devices_of(daemon, ns, keys):
    units = daemon.disk.segment_bytes // 4096
    return {split_slab(slot // units)[0] for slot in daemon.slots(ns, keys)}


async def put_on_both(base):
    """KEYS are on the first device, OTHER on the second, and nowhere else."""
    async with running(base, *settings(base)) as daemon:
        ns, other = await daemon.namespace(), await daemon.namespace(OTHER_BYTES)
        put = await ns.put(KEYS, pages_of(KEYS), durable="nvme")
        put.raise_for_refused()
        put = await other.put(OTHER, pages_of(OTHER, OTHER_BYTES), durable="nvme")
        put.raise_for_refused()
        assert (devices_of(daemon, ns, KEYS), devices_of(daemon, other, OTHER)) == ({0}, {1})


async def timed(call):
    began = time.monotonic()
    return await call, time.monotonic() - began


def pool_threads():
    return sum(thread.name.startswith("kvtier-nvme") for thread in threading.enumerate())


@on_loop
async def test_32_reads_that_hang_cost_their_own_pages_one_timeout(base):
    await put_on_both(base)
    async with running(base, *settings(base)) as daemon:
        ns, other = await daemon.namespace(), await daemon.namespace(OTHER_BYTES)
        hung = KEYS[:32]
        assert (await get_checked(ns, KEYS[32:36])).prefix == 4, "now in host memory"
        daemon.disk.plan(always(FaultKind.HANG), slots=daemon.slots(ns, hung))
        threads = pool_threads()
        waiting = [asyncio.create_task(timed(get_checked(ns, [key]))) for key in hung]
        await until(lambda: daemon.disk.hanging == 4)  # as many as nvme.io_threads

        got, host_s = await timed(get_checked(ns, KEYS[32:36]))
        assert {item.tier for item in got} == {Tier.HOST}
        got, other_s = await timed(get_checked(other, OTHER, OTHER_BYTES))
        assert {item.tier for item in got} == {Tier.NVME}
        new = keys_of(f"new {n}" for n in range(8))
        put, put_s = await timed(ns.put(new, pages_of(new)))
        assert put.stored == 8
        assert await daemon.kv.status()
        assert max(host_s, other_s, put_s) < TIMEOUT_S + SLACK_S

        answers = await asyncio.gather(*waiting)
        codes = [got.reasons[0] for got, _ in answers]
        # Those that hang are given up; those behind them never start.
        assert set(codes) <= {GetCode.TIMEOUT, GetCode.IO_ERROR, GetCode.BUSY, GetCode.MISS}, codes
        assert codes.count(GetCode.TIMEOUT) >= 4
        assert max(seconds for _, seconds in answers) < TIMEOUT_S + SLACK_S
        (first, second) = (await daemon.kv.status()).devices
        assert (first.is_online, second.is_online) == (False, True)
        assert "no answer" in first.reason

        # Nothing waits for it any more.
        got, gone_s = await timed(get_checked(ns, hung))
        assert set(got.reasons) <= {GetCode.MISS, GetCode.BUSY}
        assert gone_s < TIMEOUT_S, "a device that is known to hang is not waited for"
        await until(lambda: daemon.counts(Tier.NVME).sealed == len(OTHER))
        assert (await get_checked(ns, hung)).reasons == [GetCode.MISS] * 32
        assert daemon.disk.hanging == 4
        assert pool_threads() <= threads + 4, "new ones for those that hang, once"
        assert daemon.counts(Tier.HOST).quarantined == 4, "slots that hung reads may still write to"

        daemon.disk.heal()
        await until(lambda: daemon.counts(Tier.HOST).quarantined == 0)
        assert daemon.counts(Tier.NVME).retiring == 0
        assert (await ns.lookup(hung)).hits == 0, "a late completion is discarded"
        assert (await ns.put(hung, pages_of(hung))).stored == 32
        assert (await get_checked(ns, hung)).prefix == 32
        await daemon.settled()


@on_loop
async def test_a_write_that_hangs_costs_the_put_one_timeout_and_its_slot_comes_back(base):
    keys = KEYS[:3]
    async with running(base, *settings(base)) as daemon:
        ns = await daemon.namespace()
        daemon.disk.plan(always(FaultKind.HANG, WRITE))
        put, seconds = await timed(ns.put(keys, pages_of(keys), durable="nvme"))
        assert (put.reasons, put.durable) == ([PutCode.STORED] * 3, 0)
        assert seconds < TIMEOUT_S + SLACK_S
        assert daemon.counts(Tier.NVME).quarantined == 3
        daemon.disk.heal()
        await until(lambda: daemon.counts(Tier.NVME).quarantined == 0)
        assert daemon.counts(Tier.NVME).sealed == 0, "what lands late is not published"
        put = await ns.put(keys, pages_of(keys), durable="nvme")
        assert put.durable == 3, "on the other device"
        await daemon.settled()
    async with running(base, *settings(base)) as daemon:
        ns = await daemon.namespace()
        assert daemon.counts(Tier.NVME).sealed == 3
        assert (await get_checked(ns, keys)).prefix == 3


@on_loop
async def test_a_device_that_hangs_stays_offline_and_takes_no_thread_at_each_try(base):
    """A probe would find it well: what hangs are reads of its files."""
    await put_on_both(base)
    async with running(base, *settings(base, "nvme.retry_s=0.05")) as daemon:
        ns = await daemon.namespace()
        threads = pool_threads()
        health = daemon.node.nvme.devices.health[0]
        daemon.disk.plan(always(FaultKind.HANG))
        assert (await ns.get(KEYS[:8])).hits == 0
        for _ in range(20):
            await asyncio.sleep(0.02)
            assert not health.online
            assert pool_threads() <= threads + 4
        put, seconds = await timed(ns.put(KEYS[:4], pages_of(KEYS[:4]), durable="nvme"))
        assert put.durable == 4, "on the other device"
        assert devices_of(daemon, ns, KEYS[:4]) == {1}
        assert seconds < TIMEOUT_S
        daemon.disk.heal()
        await until(lambda: health.online)
        await until(lambda: pool_threads() == threads)
        assert sum(daemon.counts(tier).quarantined for tier in (Tier.HOST, Tier.NVME)) == 0
        assert (await get_checked(ns, KEYS[4:8])).hits == 0, "it comes back empty"
        put = await ns.put(KEYS[4:8], pages_of(KEYS[4:8]), durable="nvme")
        assert put.durable == 4
        await daemon.settled()


@pytest.mark.parametrize("call", ["get", "put", "flush"])
@on_loop
async def test_a_clients_deadline_is_not_the_devices(base, call):
    """It ends at its own deadline, though the device has ten times as long."""
    await put_on_both(base)
    async with running(base, *settings(base, "nvme.io_timeout_ms=5000")) as daemon:
        ns = await daemon.namespace()
        await ns.put(KEYS[38:], pages_of(KEYS[38:]))
        daemon.disk.plan(always(FaultKind.HANG), always(FaultKind.HANG, WRITE))
        new = keys_of(["new"])
        if call == "get":
            got, seconds = await timed(ns.get(KEYS[:2], deadline=0.3))
            assert got.reasons == [GetCode.TIMEOUT] * 2
        elif call == "put":
            put, seconds = await timed(ns.put(new, pages_of(new), durable="nvme", deadline=0.3))
            assert put.reasons == [PutCode.TIMEOUT]
        else:
            await ns.put(new, pages_of(new))
            began = time.monotonic()
            with pytest.raises(TimeoutError):
                await daemon.kv.flush(deadline=0.3)
            seconds = time.monotonic() - began
        assert seconds < 0.3 * 1.2 + 0.5
        daemon.disk.heal()
        await until(lambda: daemon.disk.hanging == 0)
        await until(lambda: daemon.counts(Tier.HOST).pinned == 0)
        assert (await get_checked(ns, KEYS[:4])).prefix == 4
        assert daemon.disk.calls(READ) >= 2 or call != "get"
        await until(lambda: daemon.counts(Tier.HOST).filling == daemon.counts(Tier.NVME).filling)
        await until(lambda: daemon.counts(Tier.HOST).quarantined == 0)
        await daemon.settled()
