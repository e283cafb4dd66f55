"""The asyncio client: many calls at once, cancelled calls, one event loop."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

import kvtier
from kvtier.transfer.planes.grpc import GrpcPlane, _LostStatus


def test_the_asyncio_client(daemon, layout, make_pages):
    pages = make_pages(8)

    async def main():
        async with kvtier.aio.connect(daemon.url, deadline=5.0) as kv:
            ns = await kv.namespace(layout)
            keys = ns.keys(range(32))
            puts = await asyncio.gather(
                *(ns.put(keys[n : n + 1], pages[n : n + 1]) for n in range(8))
            )
            assert [put.stored for put in puts] == [1] * 8
            gots = await asyncio.gather(*(ns.get(keys) for _ in range(8)))
            assert all(got.pages == pages for got in gots)
            async with ns.lease(keys[:2]) as held:
                assert await held.pages() == pages[:2]
            assert (await ns.delete(keys)).deleted == 8
            assert (await kv.status()).state == "ready"
            assert await ns.bump() == 2
            assert await ns.reopen() == 2
        with pytest.raises(kvtier.ClientClosed):
            await ns.get(keys)

    asyncio.run(main())
    assert daemon.sessions == set()


def test_a_cancelled_call_ends_and_writes_nothing_more(daemon, layout, make_pages):
    async def main():
        async with kvtier.aio.connect(daemon.url, deadline=5.0) as kv:
            ns = await kv.namespace(layout)
            keys = ns.keys(range(16))
            await ns.put(keys, make_pages(4))
            daemon.stall_get_after = 2
            out = bytearray(4 * layout.raw_bytes)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(ns.get(keys, out=out), 0.2)
            daemon.stall_get_after = -1
            out.append(0)  # nobody holds it any more
            assert (await ns.get(keys)).hits == 4

    asyncio.run(main())


def test_an_asyncio_connection_belongs_to_one_loop(daemon, layout):
    kv = kvtier.aio.connect(daemon.url)

    async def use():
        await kv.status()

    async def close():
        await kv.close()

    with asyncio.Runner() as first:
        first.run(use())
        with asyncio.Runner() as second, pytest.raises(kvtier.ClientClosed, match="another event"):
            second.run(use())
        first.run(close())


def test_first_calls_at_once_open_one_session(daemon, layout):
    async def main():
        async with kvtier.aio.connect(daemon.url, deadline=5.0) as kv:
            spaces = await asyncio.gather(
                *(kv.namespace(layout, tenant=f"t{n}") for n in range(10))
            )
            daemon.boot()
            keys = spaces[0].keys(range(4))
            await asyncio.gather(*(ns.lookup(keys) for ns in spaces for _ in range(3)))
            assert len(daemon.sessions) == 1
            assert len(daemon.handles) == 10

    asyncio.run(main())


def test_a_put_whose_status_is_lost_twice_is_unavailable(daemon, layout, make_pages, monkeypatch):
    """As when the daemon is killed again in the middle of asking what became of the put."""

    async def lost(*_):
        raise _LostStatus

    async def main():
        async with kvtier.aio.connect(daemon.url, deadline=5.0) as kv:
            ns = await kv.namespace(layout)
            monkeypatch.setattr(GrpcPlane, "_put", lost)
            put = await ns.put(ns.keys(range(8)), make_pages(2))
            assert put.reasons == [kvtier.PutCode.UNAVAILABLE] * 2

    asyncio.run(main())


class BrokenPut:
    """A put whose daemon is killed while grpc ends the stream: that raises an error of grpc's own
    machinery, in `done_writing` or at any other place.
    """

    def __init__(self, call, *, breaks_at):
        self._call = call
        self._breaks_at = breaks_at

    async def write(self, message):
        await self._call.write(message)
        self._break("write")

    async def done_writing(self):
        self._break("done_writing")

    def __await__(self):
        self._break("await")
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "killed"
        )
        yield

    def _break(self, where):
        if where == self._breaks_at:
            raise grpc.aio.InternalError('Failed "execute_batch"')

    def cancel(self):
        self._call.cancel()


@pytest.mark.parametrize("breaks_at", ["write", "done_writing", "await"])
def test_a_put_that_breaks_inside_grpc_is_unavailable(daemon, layout, make_pages, breaks_at):
    async def main():
        async with kvtier.aio.connect(daemon.url, deadline=5.0) as kv:
            ns = await kv.namespace(layout)
            channel = ns.link.plane._channel
            make = channel.callable

            def callable_of(service, name):
                made = make(service, name)
                if name != "Put":
                    return made
                return lambda **options: BrokenPut(made(**options), breaks_at=breaks_at)

            channel.callable = callable_of
            put = await ns.put(ns.keys(range(8)), make_pages(2))
            assert put.reasons == [kvtier.PutCode.UNAVAILABLE] * 2
            channel.callable = make
            assert (await ns.put(ns.keys(range(8)), make_pages(2))).stored == 2

    asyncio.run(main())
