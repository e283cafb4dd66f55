"""Kind 25, SAMEKEY: one key asked for or put by many at once, or twice in a batch, is one page, one
write and one read; a page that fails does so alone and in its place.
"""

from __future__ import annotations

import asyncio

import pytest

from kvtier.core.page import GetCode, PutCode, Tier
from kvtier.testing.faulty_tier import Fault, FaultKind
from kvtier.v1 import transfer_pb2
from tests.daemon.raw_calls import RawClient, opaque_layout, put_page
from tests.faults.kinds_rig import (
    PAGE,
    READ,
    WRITE,
    always,
    get_checked,
    keys_of,
    on_loop,
    pages_of,
    put_on_disk,
    running,
    until,
)

KEYS = keys_of(range(16))


@on_loop
async def test_durable_puts_of_one_key_at_once_are_one_copy(base):
    (key,) = keys_of(["one"])
    async with running(base) as daemon:
        ns = await daemon.namespace()
        daemon.disk.plan(always(FaultKind.SLOW, WRITE, delay_s=0.05))
        puts = [ns.put([key], pages_of([key]), durable="nvme") for _ in range(32)]
        results = await asyncio.gather(*puts)
        codes = [put.reasons[0] for put in results]
        assert codes.count(PutCode.STORED) == 1
        assert codes.count(PutCode.EXISTS) == 31
        assert [put.durable for put in results] == [1] * 32, "each was told the truth"
        assert daemon.disk.calls(WRITE) == 1
        assert daemon.counts(Tier.NVME).sealed == daemon.counts(Tier.HOST).sealed == 1
        assert daemon.metric("kvtier_pages_total", event="stored") == 2, "one in each tier"
        await daemon.settled()
    async with running(base) as daemon:
        assert daemon.counts(Tier.NVME).sealed == 1
        assert (await get_checked(await daemon.namespace(), [key])).prefix == 1


@on_loop
async def test_a_key_twice_in_a_batch_is_stored_once_and_answered_twice(base):
    a, b, c = KEYS[:3]
    batch = [a, b, a, c, b, b, a]
    async with running(base) as daemon:
        ns = await daemon.namespace()
        put = await ns.put(batch, pages_of(batch), durable="nvme", chain=False)
        new, old = PutCode.STORED, PutCode.EXISTS
        assert put.reasons == [new, new, old, new, old, old, old]
        assert put.durable == 7
        assert [item.ref is None for item in put] == [code is old for code in put.reasons]
        assert daemon.counts(Tier.NVME).sealed == 3
        assert daemon.disk.calls(WRITE) == 3
    async with running(base) as daemon:
        ns = await daemon.namespace()
        reads = daemon.disk.calls(READ)
        got = await get_checked(ns, batch)
        assert got.reasons == [GetCode.HIT] * 7
        assert daemon.disk.calls(READ) - reads == 3
        assert (await ns.delete(batch)).reasons.count(1) == 3
        assert (await get_checked(ns, batch)).reasons == [GetCode.MISS] * 7
        await daemon.settled()


@pytest.mark.parametrize("bad", [0, 7, 15])
@on_loop
async def test_one_page_that_cannot_be_written_fails_alone_and_in_its_place(base, bad):
    async with running(base, "nvme.io_threads=1") as daemon:
        ns = await daemon.namespace()
        # Two at once are on their way, and wait for the one thread in turn.
        daemon.disk.plan(Fault(kind=FaultKind.EIO, operation=WRITE, nth=bad + 1))
        put = await ns.put(KEYS, pages_of(KEYS), durable="nvme")
        assert put.reasons == [PutCode.STORED] * 16
        assert [item.durable for item in put] == [n != bad for n in range(16)]
        with pytest.raises(Exception, match=f"page {bad} is STORED in host memory and not durable"):
            put.raise_for_refused()
    async with running(base) as daemon:
        ns = await daemon.namespace()
        found = (await ns.lookup(KEYS)).reasons
        assert found == [GetCode.MISS if n == bad else GetCode.HIT for n in range(16)]
        assert (await get_checked(ns, KEYS)).reasons == found
        await daemon.settled()


@on_loop
async def test_a_page_with_a_wrong_sum_is_refused_alone_and_in_its_place(base):
    """A client that is not ours: bytes that are not those of the sum, in the middle of a batch."""
    layout = opaque_layout(PAGE)
    pages = pages_of(KEYS[:5])
    async with running(base) as daemon:

        def raw():
            with RawClient(daemon.url) as client:
                opened = client.open(layout, tenant="t")
                announced = [
                    put_page(opened, key, page) for key, page in zip(KEYS[:5], pages, strict=True)
                ]
                request = transfer_pb2.PutRequest(
                    open=transfer_pb2.PutOpen(handle=opened.handle, durability=2),
                    pages=announced,
                    data=b"".join([*pages[:2], bytes(PAGE), *pages[3:]]),
                )
                return client.put_messages([request])

        answer = await asyncio.to_thread(raw)
        good, bad = PutCode.STORED, PutCode.REFUSED
        assert list(answer.codes) == [good, good, bad, good, good]
        assert answer.leading_run == 2
        assert [reached == 2 for reached in answer.reached] == [True, True, False, True, True]
        assert daemon.counts(Tier.NVME).sealed == 4
        await daemon.settled()


@on_loop
async def test_many_who_ask_for_one_page_wait_for_one_read(base):
    await put_on_disk(base, KEYS[:2])
    async with running(base) as daemon:
        ns = await daemon.namespace()
        daemon.disk.plan(always(FaultKind.SLOW, delay_s=0.2))
        reads = daemon.disk.calls(READ)
        asked = [get_checked(ns, KEYS[:1]) for _ in range(24)]
        asked += [ns.prefetch(KEYS[:1]) for _ in range(8)]
        answers = await asyncio.gather(*asked)
        assert [answer.prefix for answer in answers] == [1] * 32
        assert daemon.disk.calls(READ) - reads == 1
        assert daemon.metric("kvtier_moves_total", way="up", result="done") == 1
        assert daemon.counts(Tier.HOST).sealed == 1
        # One that gives up takes nothing from the others.
        waiting = [asyncio.create_task(get_checked(ns, KEYS[1:2])) for _ in range(4)]
        await until(lambda: daemon.disk.calls(READ) - reads == 2)
        waiting[0].cancel()
        done = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(done[0], asyncio.CancelledError)
        assert [answer.prefix for answer in done[1:]] == [1] * 3
        assert daemon.disk.calls(READ) - reads == 2
        await until(lambda: daemon.counts(Tier.NVME).pinned == 0)
        await daemon.settled()


@on_loop
async def test_a_failed_read_is_told_to_all_who_waited_for_it(base):
    await put_on_disk(base, KEYS[:1])
    async with running(base) as daemon:
        ns = await daemon.namespace()
        daemon.disk.plan(
            always(FaultKind.SLOW, delay_s=0.2),
            Fault(kind=FaultKind.EIO, operation=READ, nth=1),
        )
        answers = await asyncio.gather(*(get_checked(ns, KEYS[:1]) for _ in range(12)))
        assert {answer.reasons[0] for answer in answers} == {GetCode.IO_ERROR}
        assert (await get_checked(ns, KEYS[:1])).prefix == 1, "and to nobody after them"
        await daemon.settled()
