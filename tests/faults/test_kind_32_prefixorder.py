"""Kind 32, PREFIXORDER: a chain loses its tail before its head, in host memory and on NVMe, in
whatever order its pages came there; what is left of it can be hit.
"""

from __future__ import annotations

import random

import pytest

from kvtier.core.page import GetCode, PutCode, Tier
from kvtier.testing.faulty_tier import Fault, FaultKind
from tests.faults.kinds_rig import (
    PAGE,
    WRITE,
    get_checked,
    keys_of,
    on_loop,
    pages_of,
    running,
)

CHAIN = keys_of(range(100))
RECORD = PAGE + 4096
#: The host tier holds 204 pages, NVMe 180.
SMALL = ("host.bytes=4MiB", "nvme.bytes=4MiB")


async def put_chain(ns, keys, *, step=8, **options):
    """As an engine does: some pages at a time, each time with what comes before them."""
    for at in range(0, len(keys), step):
        some = keys[at : at + step]
        parent = {"parent": keys[at - 1], "depth": at} if at else {}
        put = await ns.put(some, pages_of(some), **parent, **options)
        assert put.stored == len(some)


async def put_alone(ns, names, **options):
    """Pages without parents, one after another, that take the place of others."""
    for name in names:
        keys = keys_of([name])
        assert (await ns.put(keys, pages_of(keys), **options)).stored == 1


def in_tier(daemon, ns, keys, tier):
    return [n for n, key in enumerate(keys) if tier in daemon.copies(ns, key)]


def capacity(daemon, tier):
    """Pages that the tier holds."""
    allocator = daemon.store._residents.allocators[tier]
    return allocator.slabs * (allocator.slab_bytes // RECORD)


@on_loop
async def test_host_memory_gives_up_the_tail(base):
    async with running(base, *SMALL) as daemon:
        ns = await daemon.namespace()
        await put_chain(ns, CHAIN)
        room = capacity(daemon, Tier.HOST)
        await put_alone(ns, (f"fill {n}" for n in range(room - 100)))
        await get_checked(ns, CHAIN[-5:])  # the GPU had the rest
        for n in range(room - 100):
            await ns.get(keys_of([f"fill {n}"]))
        await put_alone(ns, (f"more {n}" for n in range(30)))
        assert in_tier(daemon, ns, CHAIN, Tier.HOST) == list(range(70))
        assert (await get_checked(ns, CHAIN)).prefix == 70
        await daemon.settled()


@pytest.mark.parametrize(
    "order", ["head first", "tail first", pytest.param("shuffled", marks=pytest.mark.soak)]
)
@on_loop
async def test_nvme_gives_up_the_tail_in_whatever_order_it_came_down(base, order):
    """A tail that was demoted before its head is linked to it all the same."""
    async with running(base, *SMALL) as daemon:
        ns = await daemon.namespace()
        await put_chain(ns, CHAIN)
        down = list(range(100))
        if order == "tail first":
            down.reverse()
        elif order == "shuffled":
            random.Random(32).shuffle(down)
        for n in down:
            # A durable put of a page that is there already copies it down, and waits.
            put = await ns.put(CHAIN[n : n + 1], pages_of(CHAIN[n : n + 1]), durable="nvme")
            assert (put.reasons, put.durable) == ([PutCode.EXISTS], 1)
        assert in_tier(daemon, ns, CHAIN, Tier.NVME) == list(range(100))
        room = capacity(daemon, Tier.NVME)
        fill = [f"fill {n}" for n in range(room - 100 + 30)]
        await put_alone(ns, fill, durable="nvme")
        left = in_tier(daemon, ns, CHAIN, Tier.NVME)
        assert left == list(range(len(left))), "a gap"
        assert 65 <= len(left) <= 75
        await daemon.settled()
    async with running(base, *SMALL) as daemon:
        ns = await daemon.namespace()
        assert (await get_checked(ns, CHAIN)).prefix == len(left)
        # After the restart too: the links were in the records.
        await put_alone(ns, (f"again {n}" for n in range(20)), durable="nvme")
        now = in_tier(daemon, ns, CHAIN, Tier.NVME)
        assert now == list(range(len(now)))
        await daemon.settled()


@pytest.mark.parametrize(("policy", "seed"), [("lru", 1), ("arc", 2), ("s3-fifo", 3)])
@on_loop
async def test_no_page_is_left_without_its_parent_but_those_that_are_counted(base, policy, seed):
    """Trees of pages under pressure in both tiers. A page's parent is in some tier, or its last
    copy gave way, which is counted."""
    rng = random.Random(seed)
    settings = (f"host.policy={policy}", f"nvme.policy={policy}", "nvme.clean_percent=30")
    async with running(base, *SMALL, *settings) as daemon:
        ns = await daemon.namespace()
        parent_of: dict[bytes, bytes] = {}
        known: list[bytes] = []
        for call in range(80):
            at = rng.choice(known[-60:]) if known and rng.random() < 0.7 else b""
            keys = keys_of(f"{call} {n}" for n in range(rng.randint(1, 8)))
            options = {"durable": "nvme"} if rng.random() < 0.5 else {}
            put = await ns.put(keys, pages_of(keys), parent=at or None, **options)
            parent_of |= zip(keys, [at, *keys[:-1]], strict=True)
            known += [key for key, item in zip(keys, put, strict=True) if item.is_stored]
            if rng.random() < 0.5:
                await get_checked(ns, rng.sample(known, min(len(known), 8)))
        there = [item.reason is GetCode.HIT for item in await ns.lookup(known)]
        resident = {key for key, is_hit in zip(known, there, strict=True) if is_hit}
        counters = daemon.store.counters()
        assert counters.evicted > 50, "there was no pressure"
        orphans = [key for key in resident if parent_of[key] and parent_of[key] not in resident]
        lost = len(known) - len(resident)
        assert lost <= counters.evicted_last
        assert len(orphans) <= counters.evicted_last
        assert len(orphans) * 10 <= len(resident)
        for tier in (Tier.HOST, Tier.NVME):
            check_links(daemon, tier, parent_of)
        await daemon.settled()


def check_links(daemon, tier, parent_of):
    """In one tier a child is linked wherever its parent is, so that no head goes before it."""
    table = daemon.store._residents.table
    rows = {table.key(row): row for row in daemon.store.survey.sealed_rows(tier).tolist()}
    for key, row in rows.items():
        parent = rows.get(parent_of.get(key, b""))
        assert table.parent[row] == (0 if parent is None else parent + 1)


@on_loop
async def test_a_batch_that_loses_its_first_page_is_no_prefix(base):
    """Page 0 does not become durable: the pages after it are, and are no hit of a prompt."""
    keys = CHAIN[:8]
    async with running(base, "nvme.io_threads=1") as daemon:
        ns = await daemon.namespace()
        daemon.disk.plan(Fault(kind=FaultKind.EIO, operation=WRITE, nth=1))
        put = await ns.put(keys, pages_of(keys), durable="nvme")
        assert [item.durable for item in put] == [False] + [True] * 7
    async with running(base) as daemon:
        ns = await daemon.namespace()
        assert (await ns.lookup(keys)).prefix == (await get_checked(ns, keys)).prefix == 0
        assert (await ns.prefetch(keys)).prefix == 0
        put = await ns.put(keys[:1], pages_of(keys[:1]), durable="nvme")
        assert put.durable == 1
        assert (await get_checked(ns, keys)).prefix == 8, "the head brings the rest back"
        check_links(daemon, Tier.HOST, dict(zip(keys[1:], keys, strict=False)))
        await daemon.settled()


@pytest.mark.parametrize("is_listed", [True, False], ids=["checkpoint", "scan"])
@on_loop
async def test_a_page_restored_without_its_parent_is_linked_when_it_comes(base, is_listed):
    """Its record tells which page it waits for, and so do the checkpoint and those after it."""
    keys = CHAIN[:2]
    async with running(base) as daemon:
        ns = await daemon.namespace()
        await ns.put(keys, pages_of(keys))
        assert (await ns.put(keys[1:], pages_of(keys[1:]), durable="nvme")).durable == 1
        if is_listed:
            await daemon.node.nvme.durability.checkpoint()
    async with running(base) as daemon:
        report = daemon.node.nvme.report
        assert (report.listed, report.found) == ((1, 0) if is_listed else (0, 1))
        await daemon.node.nvme.durability.checkpoint()
    async with running(base) as daemon:
        assert daemon.node.nvme.report.listed == 1
        ns = await daemon.namespace()
        assert (await ns.lookup(keys)).reasons == [GetCode.MISS, GetCode.HIT]
        assert (await ns.put(keys[:1], pages_of(keys[:1]), durable="nvme")).durable == 1
        check_links(daemon, Tier.NVME, {keys[1]: keys[0]})
