"""Kind 14, PIN: every lease ends, however it was used; afterwards everything may give way again.

Pages lie in host memory, on NVMe, and in both.
"""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from kvtier.core.page import GetCode, LeaseCode, Tier
from kvtier.testing.faulty_tier import Fault, FaultKind
from tests.faults.kinds_rig import (
    READ,
    get_checked,
    keys_of,
    on_loop,
    pages_of,
    put_on_disk,
    rows,
    running,
    until,
)

LOWER = keys_of(f"on nvme {n}" for n in range(20))
UPPER = keys_of(f"in host memory {n}" for n in range(20))
BOTH = keys_of(f"in both {n}" for n in range(20))
ABSENT = keys_of(f"nowhere {n}" for n in range(4))
SMALL = ("host.bytes=4MiB", "nvme.bytes=4MiB")


async def lay_out(daemon):
    """Pages in each of the places; LOWER were put by an earlier boot."""
    ns = await daemon.namespace()
    assert (await ns.put(BOTH, pages_of(BOTH), durable="nvme")).durable == 20
    assert (await ns.put(UPPER, pages_of(UPPER))).stored == 20
    tiers = [set(daemon.copies(ns, keys[0])) for keys in (LOWER, UPPER, BOTH)]
    assert tiers == [{Tier.NVME}, {Tier.HOST}, {Tier.HOST, Tier.NVME}]
    return ns


def leases_on_rows(daemon):
    return int(daemon.store._residents.table.column("leases").sum())


class _Pinner:
    """One way to end a lease after another, on the store itself; none leaves anything."""

    def __init__(self, daemon, number, seed):
        self.store, self.number, self.rng = daemon.store, number, random.Random(seed)
        self.now = 1e9  # far from what the daemon's own clock says
        self.last_id = 0

    def pin(self, session, *, life_s=10.0):
        """(lease id, how many keys it holds) over some keys, one of them twice."""
        keys = self.rng.sample([*LOWER, *UPPER, *BOTH, *ABSENT], self.rng.randint(1, 12))
        keys.append(keys[0])
        lease, codes = self.store.pins.pin(
            session, self.number, 0, rows(keys), deadline=self.now + life_s
        )
        absent = set(ABSENT)
        expected = [GetCode.MISS if key in absent else GetCode.HIT for key in keys]
        assert codes.tolist() == expected
        assert (lease == 0) == (GetCode.HIT not in expected)
        return lease

    def end(self, lease, session, code):
        assert self.store.pins.unpin(session, [lease], now=self.now) == [code]

    def given_back(self):
        lease = self.pin(7)
        self.end(lease, 7, LeaseCode.RELEASED if lease else LeaseCode.UNKNOWN)

    def given_back_twice(self):
        self.given_back()
        lease = self.pin(7)
        if lease:
            self.end(lease, 7, LeaseCode.RELEASED)
        self.end(lease, 7, LeaseCode.UNKNOWN)

    def never_used(self):
        lease = self.pin(7, life_s=1.0)
        self.now += 1.5
        self.store.pins.expire(self.now)
        self.end(lease, 7, LeaseCode.EXPIRED if lease else LeaseCode.UNKNOWN)

    def renewed(self):
        lease = self.pin(7, life_s=1.0)
        renew = {"deadline": self.now + 5.0, "now": self.now}
        held = LeaseCode.HELD if lease else LeaseCode.UNKNOWN
        assert self.store.pins.renew(7, [lease], **renew) == [held]
        self.now += 1.5
        assert self.store.pins.expire(self.now) == 0
        self.now += 4.0
        assert self.store.pins.expire(self.now) == (lease != 0)

    def of_a_session_that_ends(self):
        held = [self.pin(8) for _ in range(3)]
        assert self.store.pins.end_session(8) == sum(lease != 0 for lease in held)
        assert self.store.pins.end_session(8) == 0
        for lease in held:
            self.end(lease, 8, LeaseCode.UNKNOWN)

    def given_back_by_another(self):
        lease = self.pin(7)
        self.end(lease, 9, LeaseCode.UNKNOWN)
        assert self.store.pins.count() == (lease != 0), "it is still held"
        self.end(lease + 1_000_000, 7, LeaseCode.UNKNOWN)
        assert self.store.pins.count() == (lease != 0)
        self.store.pins.end_session(7)

    def read_while_it_is_held(self):
        lease = self.pin(7)
        some = self.rng.sample([*LOWER, *UPPER, *BOTH], 5)
        readings = self.store.acquire(self.number, 0, rows(some))
        self.end(lease, 7, LeaseCode.RELEASED if lease else LeaseCode.UNKNOWN)
        for reading in readings:
            again = reading.again()
            reading.release()
            reading.release()
            again.release()


@on_loop
async def test_10_000_leases_leave_nothing(base):
    await put_on_disk(base, LOWER, *SMALL)
    async with running(base, *SMALL) as daemon:
        ns = await lay_out(daemon)
        pinner = _Pinner(daemon, daemon.number(ns), seed=14)
        ways = (
            pinner.given_back,
            pinner.given_back_twice,
            pinner.never_used,
            pinner.renewed,
            pinner.of_a_session_that_ends,
            pinner.given_back_by_another,
            pinner.read_while_it_is_held,
        )
        for n in range(7_000):  # some make more than one
            ways[n % len(ways)]()
            assert daemon.store.pins.count() == 0
            if n % 500 == 0:
                assert leases_on_rows(daemon) == 0
                await asyncio.sleep(0)
        assert leases_on_rows(daemon) == 0
        assert daemon.store.pins._book._last_id >= 9_000
        await everything_gives_way(daemon, ns)


async def everything_gives_way(daemon, ns):
    """New pages take the place of every one that was there, in both tiers."""
    old = [*LOWER, *UPPER, *BOTH]
    for n in range(8):
        keys = keys_of(f"new {n} {i}" for i in range(50))
        put = await ns.put(keys, pages_of(keys), durable="nvme")
        assert put.durable == 50, "no room is held by anybody"
    assert (await ns.lookup(old)).hits == 0
    capacity = daemon.counts(Tier.HOST).capacity_bytes // (20 << 10)
    assert daemon.counts(Tier.HOST).sealed == capacity
    assert leases_on_rows(daemon) == 0
    await daemon.settled()


@on_loop
async def test_leases_of_a_client_whose_gets_go_wrong(base):
    """Whole, partly, not at all, cancelled, failing, too late, twice."""
    await put_on_disk(base, LOWER, *SMALL)
    async with running(base, *SMALL) as daemon:
        ns = await lay_out(daemon)
        rng = random.Random(15)
        slots = daemon.slots(ns, LOWER)
        for n in range(60):
            daemon.disk.plan(
                Fault(kind=FaultKind.EIO, operation=READ, probability=0.2),
                Fault(kind=FaultKind.SLOW, operation=READ, probability=0.5, delay_s=0.01),
                slots=slots,
                seed=n,
            )
            held_keys = rng.sample([*LOWER, *UPPER, *BOTH, *ABSENT], 8)
            way = n % 6
            async with ns.lease(held_keys, ttl=0.05 if way == 4 else 5.0) as held:
                if way == 0:
                    pass
                elif way == 1:
                    await get_checked(ns, held_keys[:3])
                elif way == 2:
                    call = asyncio.create_task(get_checked(ns, held_keys))
                    await asyncio.sleep(rng.random() * 0.01)
                    call.cancel()
                    await asyncio.wait([call])
                elif way == 3:
                    await get_checked(ns, held_keys)
                    await held.fetch()
                elif way == 4:
                    await until(lambda: daemon.store.pins.count() == 0)
                else:
                    await ns.delete(held_keys[:1])
                    await ns.put(held_keys[:1], pages_of(held_keys[:1]), durable="nvme")
            assert daemon.store.pins.count() == 0
            # So that the next round has something to bring up.
            await ns.delete(UPPER[:2])
            await ns.put(UPPER[:2], pages_of(UPPER[:2]))
        daemon.disk.heal()
        await until(lambda: leases_on_rows(daemon) == 0)
        await everything_gives_way(daemon, ns)


async def hit_ratios(daemon, ns, ops, seed):
    """Of a working set of half of the host tier, used again and again among pages used once, at the
    beginning and at the end."""
    rng = np.random.default_rng(seed)
    room = daemon.counts(Tier.HOST).capacity_bytes // (20 << 10)
    often = keys_of(f"often {n}" for n in range(room // 2))
    hits = []
    for n in range(ops):
        if rng.random() < 0.8:
            keys = [often[int(at)] for at in rng.choice(len(often), 4, replace=False)]
        else:
            keys = keys_of(f"once {n} {i}" for i in range(2))
        async with ns.lease(keys):
            got = await get_checked(ns, keys)
        missing = [key for key, item in zip(keys, got, strict=True) if item.ref is None]
        if missing:
            await ns.put(missing, pages_of(missing), chain=False)
        if len(keys) == 4:
            hits.append(got.hits / 4)
        assert daemon.store.pins.count() == 0
    warm = hits[len(hits) // 5 :]
    part = len(warm) // 3
    return sum(warm[:part]) / part, sum(warm[-part:]) / part


@on_loop
async def test_the_hit_ratio_of_a_full_tier_stays(base):
    async with running(base, *SMALL) as daemon:
        ns = await daemon.namespace()
        first, last = await hit_ratios(daemon, ns, 300, seed=3)
        assert daemon.counts(Tier.HOST).used_bytes > 0.9 * daemon.counts(Tier.HOST).capacity_bytes
        assert last >= first - 0.01
        assert leases_on_rows(daemon) == 0


@pytest.mark.soak
@on_loop
async def test_the_hit_ratio_of_a_full_tier_stays_over_24_000_calls(base):
    async with running(base, *SMALL) as daemon:
        ns = await daemon.namespace()
        first, last = await hit_ratios(daemon, ns, 24_000, seed=4)
        assert last >= first - 0.01
        assert leases_on_rows(daemon) == 0
