"""Kind 19, METRICS: what is counted is what happened, tier by tier, once; what is shown of a tier
is what a look at everything finds, also after a restart.
"""

from __future__ import annotations

import os
import random

import pytest

from kvtier.core.lifecycle import State
from kvtier.core.page import GetCode, Tier
from kvtier.testing.faulty_tier import FaultKind
from tests.faults.kinds_rig import (
    PAGE,
    always,
    get_checked,
    keys_of,
    on_loop,
    pages_of,
    put_on_disk,
    running,
    until,
)

KEYS = keys_of(range(20))
ABSENT = keys_of(f"absent {n}" for n in range(5))
RECORD = PAGE + 4096
RESULTS = ("done", "busy", "gone", "corrupt", "io_error", "timeout", "refused")


@on_loop
async def test_a_trace_that_was_counted_by_hand(base):
    """20 pages on NVMe, none in host memory; every call, and what it adds to each counter."""
    await put_on_disk(base, KEYS)
    async with running(base) as daemon:
        ns = await daemon.namespace()
        assert daemon.counts(Tier.HOST).sealed == 0
        looked_up = await ns.lookup([*KEYS, *ABSENT])
        assert looked_up.hits == 20  # lookup: 20 hits, 5 misses
        assert (await get_checked(ns, KEYS[:8])).prefix == 8  # nvme +8
        assert (await get_checked(ns, KEYS[:12])).prefix == 12  # host +8, nvme +4
        assert (await get_checked(ns, ABSENT)).hits == 0  # miss +5
        slots = daemon.slots(ns, KEYS[12:14])
        daemon.disk.plan(always(FaultKind.EIO), slots=slots[:1])
        daemon.disk.plan(always(FaultKind.FLIP), slots=slots[1:])
        failed = await get_checked(ns, KEYS[12:14])  # io_error +1, corrupt +1
        assert failed.reasons == [GetCode.IO_ERROR, GetCode.CORRUPT]
        daemon.disk.heal()
        # The one that failed to be read is there; the corrupt one is a miss now.
        assert (await ns.lookup(KEYS[12:14])).hits == 1  # lookup: 1 hit, 1 miss
        assert (await get_checked(ns, KEYS[12:14])).hits == 1  # nvme +1, miss +1
        async with ns.lease(KEYS[:2]) as held:  # no get
            assert held.prefix == 2
        assert (await ns.prefetch(KEYS[14:17])).hits == 3  # up +3, no get
        await until(lambda: daemon.counts(Tier.HOST).sealed == 16)
        assert (await get_checked(ns, KEYS[14:17])).prefix == 3  # host +3

        codes = {"hit": 24, "miss": 6, "io_error": 1, "corrupt": 1}
        for code in GetCode:
            name = code.name.lower()
            assert daemon.metric("kvtier_get_pages_total", code=name) == codes.get(name, 0), name
        assert daemon.metric("kvtier_get_hits_total", tier="nvme") == 13
        assert daemon.metric("kvtier_get_hits_total", tier="host") == 11
        assert daemon.metric("kvtier_sent_bytes_total") == 24 * PAGE
        assert daemon.metric("kvtier_lookup_keys_total", result="hit") == 21
        assert daemon.metric("kvtier_lookup_keys_total", result="miss") == 6
        ups = {name: daemon.metric("kvtier_moves_total", way="up", result=name) for name in RESULTS}
        assert ups == dict.fromkeys(RESULTS, 0) | {"done": 16, "io_error": 1, "corrupt": 1}
        assert daemon.metric("kvtier_nvme_bytes_total", way="read") == 16 * RECORD
        assert daemon.metric("kvtier_nvme_bytes_total", way="written") == 0
        assert daemon.metric("kvtier_pages_total", event="stored") == 16
        assert daemon.metric("kvtier_pages_total", event="condemned") == 1
        assert daemon.metric("kvtier_nvme_io_errors_total") == 1
        counters = (await daemon.kv.status()).counters
        told = [counters[name] for name in ("hit_host", "hit_nvme", "get_hit", "get_miss")]
        assert told == [11, 13, 24, 6]
        assert daemon.counts(Tier.NVME).sealed == 19
        await daemon.settled()


@on_loop
async def test_puts_and_moves_down_by_hand(base):
    async with running(base) as daemon:
        ns = await daemon.namespace()
        await ns.put(KEYS[:10], pages_of(KEYS[:10]), durable="nvme")  # stored 10 + 10
        again = await ns.put(KEYS[:10], pages_of(KEYS[:10]), durable="nvme")  # exists 10, no move
        assert again.durable == 10
        await ns.put(KEYS[10:], pages_of(KEYS[10:]))  # stored 10
        assert (await daemon.kv.flush()).pages_lost == 0  # stored 10
        assert (await ns.demote(KEYS)).hits == 20  # all there: no move
        assert (await ns.delete(KEYS[:3])).deleted == 3  # two copies of each
        assert daemon.metric("kvtier_moves_total", way="down", result="done") == 20
        assert daemon.metric("kvtier_nvme_bytes_total", way="written") == 20 * RECORD
        assert daemon.metric("kvtier_pages_total", event="stored") == 40
        assert daemon.metric("kvtier_pages_total", event="deleted") == 6
        assert daemon.metric("kvtier_put_pages_total", code="stored") == 20
        assert daemon.metric("kvtier_put_pages_total", code="exists") == 10
        assert daemon.metric("kvtier_received_bytes_total") == 30 * PAGE
        assert daemon.metric("kvtier_moves_under_way") == 0
        await daemon.settled()
    async with running(base) as daemon:
        for event in ("stored", "deleted", "evicted", "condemned"):
            assert daemon.metric("kvtier_pages_total", event=event) == 0, "a boot counts its own"
        assert daemon.metric("kvtier_tier_pages", tier="nvme", state="sealed") == 17


def scan(daemon, tier):
    """(pages by state, bytes used) of a tier, from the table's rows."""
    table = daemon.store._residents.table
    mine = table.live("tier") == tier
    states = {
        state.name.lower(): int((mine & (table.live("state") == state)).sum())
        for state in (State.FILLING, State.SEALED, State.RETIRING, State.QUARANTINED)
    }
    taken = mine & (table.live("state") != State.FREE)
    return states, int(table.live("record")[taken].sum())


def check_gauges(daemon, base):
    for tier in (Tier.HOST, Tier.NVME):
        states, used = scan(daemon, tier)
        name = tier.name.lower()
        for state, count in states.items():
            assert daemon.metric("kvtier_tier_pages", tier=name, state=state) == count
        quarantined = daemon.metric("kvtier_tier_bytes", tier=name, kind="quarantined")
        assert daemon.metric("kvtier_tier_bytes", tier=name, kind="used") == used
        assert quarantined == states["quarantined"] * RECORD
        assert daemon.metric("kvtier_tier_pages", tier=name, state="pinned") == 0
    disk = base / "disk"
    on_disk = sum(os.stat(path).st_blocks * 512 for path in disk.iterdir())
    assert daemon.metric("kvtier_nvme_disk_bytes", path=str(disk)) == on_disk
    segments = sum(path.name.startswith("segment-") for path in disk.iterdir())
    granted = daemon.metric("kvtier_tier_bytes", tier="nvme", kind="granted")
    assert granted == segments * daemon.disk.segment_bytes


@pytest.mark.parametrize("seed", [1, 2])
@on_loop
async def test_gauges_equal_a_full_scan_and_totals_add_up(base, seed):
    """After random calls under pressure in both tiers, with failures, and after a restart."""
    rng = random.Random(seed)
    keys = keys_of(range(260))
    small = ("host.bytes=1MiB", "nvme.bytes=4MiB", "nvme.clean_percent=20")
    async with running(base, *small) as daemon:
        ns = await daemon.namespace()
        for call in range(150):
            some = rng.sample(keys, rng.randint(1, 8))
            what = rng.randrange(7)
            if what <= 1:
                await ns.put(some, pages_of(some), chain=False, durable=("host", "nvme")[what])
            elif what == 2:
                await ns.delete(some)
            elif what == 3:
                await ns.prefetch(some)
            elif what == 4:
                await ns.demote(some)
            else:
                await get_checked(ns, some)
            if call % 25 == 24:
                await until(lambda: daemon.node.nvme.tiering.under_way == 0)
                await daemon.settled()
                check_gauges(daemon, base)
                check_totals(daemon)
                slot = rng.choice([int(daemon.store._residents.table.slot[r]) for r in
                                   daemon.store.survey.sealed_rows(Tier.NVME)])  # fmt: skip
                daemon.disk.plan(always(rng.choice([FaultKind.EIO, FaultKind.FLIP])), slots=[slot])
        assert daemon.metric("kvtier_pages_total", event="evicted") > 50
        daemon.disk.heal()
        await daemon.settled()
        before = scan(daemon, Tier.NVME)[0]["sealed"]
    async with running(base, *small) as daemon:
        await daemon.settled()
        check_gauges(daemon, base)
        assert scan(daemon, Tier.NVME)[0]["sealed"] >= before
        assert daemon.metric("kvtier_tier_pages", tier="host", state="sealed") == 0


def check_totals(daemon):
    """Every copy that was ever stored is there or was counted when it went."""
    counters = daemon.store.counters()
    there = sum(daemon.counts(tier).sealed for tier in (Tier.HOST, Tier.NVME))
    gone = counters.evicted + counters.deleted + counters.condemned
    assert counters.stored == there + gone
    put = daemon.metric("kvtier_put_pages_total", code="stored")
    down = daemon.metric("kvtier_nvme_bytes_total", way="written") / RECORD
    up = daemon.metric("kvtier_moves_total", way="up", result="done")
    # Of two copies that are made of one page at once, one is stored.
    assert put <= daemon.metric("kvtier_pages_total", event="stored") <= put + down + up
    # What was deleted or evicted while it was written came to nothing.
    ended = [
        daemon.metric("kvtier_moves_total", way="down", result=result)
        for result in ("done", "gone")
    ]
    assert down <= sum(ended)
    outcomes = sum(
        daemon.metric("kvtier_get_pages_total", code=code.name.lower()) for code in GetCode
    )
    hits = sum(daemon.metric("kvtier_get_hits_total", tier=name) for name in ("host", "nvme"))
    assert hits == daemon.metric("kvtier_get_pages_total", code="hit") <= outcomes
    errors = daemon.metric("kvtier_moves_total", way="up", result="io_error")
    assert errors <= daemon.metric("kvtier_nvme_io_errors_total")
