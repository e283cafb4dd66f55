"""Kind 31, ZEROLEN: nothing is never something: no page without bytes, no batch without an answer,
no empty call that means everything.
"""

from __future__ import annotations

import asyncio

import grpc
import pytest

import kvtier
from kvtier.client import FlushResult
from kvtier.core.page import GetCode, PutCode, Tier
from kvtier.v1 import pages_pb2, transfer_pb2
from tests.daemon.raw_calls import RawClient, opaque_layout, put_page
from tests.faults.kinds_rig import (
    PAGE,
    get_checked,
    key_of,
    keys_of,
    on_loop,
    pages_of,
    running,
)

KEYS = keys_of(range(4))


@on_loop
async def test_empty_calls_answer_nothing_and_change_nothing(base):
    async with running(base) as daemon:
        ns = await daemon.namespace()
        assert await daemon.kv.flush() == FlushResult(pages=0, pages_lost=0), "nothing was put"
        put = await ns.put(KEYS, pages_of(KEYS), durable="nvme")
        assert put.durable == 4
        before = {tier: daemon.counts(tier) for tier in (Tier.HOST, Tier.NVME)}
        for durable in ("host", "nvme"):
            empty = await ns.put([], [], durable=durable)
            assert (len(empty), empty.stored, empty.durable, empty.prefix) == (0, 0, 0, 0)
            empty.raise_for_refused()
        for found in (
            await ns.get([]),
            await ns.lookup([]),
            await ns.prefetch([]),
            await ns.demote([]),
            await ns.delete([]),
        ):
            assert (len(found), found.reasons) == (0, [])
        async with ns.lease([]) as held:
            assert (held.prefix, held.reasons) == (0, [])
        assert await daemon.kv.quarantine.clear([]) == 0
        assert await daemon.kv.quarantine.clear() == 0
        assert await daemon.kv.flush() == FlushResult(pages=4, pages_lost=0)
        assert await daemon.kv.flush() == FlushResult(pages=0, pages_lost=0)
        assert {tier: daemon.counts(tier) for tier in before} == before
        assert (await get_checked(ns, KEYS)).prefix == 4
        await daemon.settled()


@on_loop
async def test_clearing_no_copies_of_the_quarantine_clears_none(base):
    async with running(base) as daemon:
        ns = await daemon.namespace()
        await ns.put(KEYS, pages_of(KEYS), durable="nvme")
        for key in KEYS[:2]:
            for ref in daemon.copies(ns, key).values():
                assert daemon.store.condemn(ref)
        assert len(await daemon.kv.quarantine.list()) == 4
        assert await daemon.kv.quarantine.clear([]) == 0
        assert len(await daemon.kv.quarantine.list()) == 4
        assert await daemon.kv.quarantine.clear() == 4


@on_loop
async def test_empty_calls_on_the_wire(base):
    """As a client that is not ours sends them: messages without keys, pages or bytes."""
    async with running(base) as daemon:

        def raw():
            with RawClient(daemon.url) as client:
                opened = client.open(opaque_layout(PAGE), tenant="t")
                handle = opened.handle
                found = [
                    client.lookup(opened, []).codes,
                    client.get(opened, []).codes,
                    client.delete(opened, []),
                    client.call("Prefetch", pages_pb2.PrefetchRequest(handle=handle)).codes,
                    client.call("Demote", pages_pb2.DemoteRequest(handle=handle)).codes,
                    client.pin(opened, []).codes,
                    client.unpin(opened),
                    client.call("Renew", pages_pb2.RenewRequest(session_id=client.session)).codes,
                ]
                opening = transfer_pb2.PutOpen(handle=handle, durability=2)
                nothing = transfer_pb2.PutRequest(open=opening)
                put = client.put_messages([nothing, transfer_pb2.PutRequest()])
                flushed = client.call("Flush", pages_pb2.FlushRequest(session_id=client.session))
                with pytest.raises(grpc.RpcError) as caught:
                    client.put_messages([])
                return found, put, flushed, caught.value.code()

        found, put, flushed, refused = await asyncio.to_thread(raw)
        assert [list(codes) for codes in found] == [[]] * len(found)
        assert (list(put.codes), list(put.reached), put.leading_run) == ([], [], 0)
        assert (flushed.pages, flushed.pages_lost) == (0, 0)
        assert refused == grpc.StatusCode.INVALID_ARGUMENT, "not even a first message"
        await daemon.settled()


@on_loop
async def test_a_page_without_bytes_is_refused_and_never_on_nvme(base):
    """Between two whole pages of a durable put; nothing of it is found afterwards."""
    async with running(base) as daemon:

        def raw():
            with RawClient(daemon.url) as client:
                opened = client.open(opaque_layout(PAGE), tenant="t")
                pages = [*pages_of(KEYS[:1]), b"", *pages_of(KEYS[2:3]), b""]
                request = transfer_pb2.PutRequest(
                    open=transfer_pb2.PutOpen(handle=opened.handle, durability=2),
                    pages=[
                        put_page(opened, key, page) for key, page in zip(KEYS, pages, strict=True)
                    ],
                    data=b"".join(pages),
                )
                return client.put_messages([request])

        put = await asyncio.to_thread(raw)
        good, bad = PutCode.STORED, PutCode.REFUSED
        assert list(put.codes) == [good, bad, good, bad]
        assert [reached == 2 for reached in put.reached] == [True, False, True, False]
        assert daemon.counts(Tier.NVME).sealed == 2
        ns = await daemon.kv.namespace(opaque_layout(PAGE), tenant="t")
        found = [GetCode.HIT, GetCode.MISS, GetCode.HIT, GetCode.MISS]
        assert (await ns.lookup(KEYS)).reasons == found
        assert (await ns.get(KEYS)).reasons == found
    async with running(base) as daemon:
        ns = await daemon.kv.namespace(opaque_layout(PAGE), tenant="t")
        assert (await ns.get(KEYS)).reasons == found
        with pytest.raises(kvtier.PageSizeError):
            await ns.put([key_of("empty")], [b""], durable="nvme")
        await daemon.settled()


@on_loop
async def test_the_shortest_page_goes_through_both_tiers(base):
    """One byte; its record is as long as that of any page up to 4 KiB."""
    keys = keys_of(range(3))
    pages = [b"\x00", b"\xff", b"\xa5"]
    async with running(base) as daemon:
        ns = await daemon.kv.namespace(opaque_layout(1), tenant="t")
        assert (await ns.put(keys, pages, durable="nvme")).durable == 3
    async with running(base) as daemon:
        ns = await daemon.kv.namespace(opaque_layout(1), tenant="t")
        assert {item.tier for item in await ns.lookup(keys)} == {Tier.NVME}
        assert [bytes(page) for page in (await ns.get(keys)).pages] == pages
        assert daemon.counts(Tier.HOST).used_bytes == 3 * 8192
        await daemon.settled()
