"""The method table, and both ends of a connection made from it."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from kvtier import errors
from kvtier.transfer import rpc, wire
from kvtier.transfer.grpc_status import from_rpc_error
from kvtier.v1 import admin_pb2, pages_pb2, transfer_pb2


def test_the_table_has_every_rpc_of_the_descriptors():
    for module, service in ((pages_pb2, "Pages"), (admin_pb2, "Admin")):
        for method in module.DESCRIPTOR.services_by_name[service].methods:
            entry = rpc.METHODS[f"kvtier.v1.{service}"][method.name]
            assert entry.path == f"/kvtier.v1.{service}/{method.name}"
            assert (entry.kind is rpc.Kind.STREAM_IN) == method.client_streaming
            assert (entry.kind is rpc.Kind.STREAM_OUT) == method.server_streaming
    pages = rpc.METHODS[rpc.PAGES]
    assert pages["BumpGeneration"].attribute == "bump_generation"
    assert pages["Put"].parse_request is wire.parse_put
    assert pages["Put"].serialize_request is None
    assert pages["Get"].parse_response is wire.parse_get
    assert pages["Get"].serialize_response is None


def test_the_table_cannot_be_changed():
    with pytest.raises(TypeError):
        rpc.METHODS[rpc.PAGES]["Get"] = None


class Echo:
    """Enough of Pages to see every kind of rpc from both ends."""

    def __init__(self):
        self.closed = asyncio.Event()

    async def lookup(self, request, context):
        if not request.keys:
            raise errors.KeyLengthError("no keys", remedy="send 32 bytes, 100 %")
        return pages_pb2.LookupResponse(codes=[1] * (len(request.keys) // 32))

    async def put(self, requests, context):
        total = 0
        async for message in requests:
            total += len(message.data)
        return transfer_pb2.PutResponse(leading_run=total)

    async def get(self, request, context):
        try:
            for offset in range(3):
                yield wire.encode_get(transfer_pb2.GetResponse(offset=offset), [b"data"])
            if request.lossy_ok:
                await asyncio.sleep(60)
            raise errors.TierIOError("the disk is gone", remedy="look at the disk")
        finally:
            self.closed.set()

    async def watch(self, request, context):
        await context.write(pages_pb2.WatchEvent(epoch=5))


def with_server(body):
    async def main():
        server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
        echo = Echo()
        server.add_generic_rpc_handlers((rpc.generic_handler(rpc.PAGES, echo),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        options = list(rpc.CHANNEL_OPTIONS)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:

            def call(name):
                return rpc.multicallable(channel, rpc.METHODS[rpc.PAGES][name])

            await body(call, echo, channel)
        await server.stop(None)

    asyncio.run(main())


def test_each_kind_of_rpc_answers():
    async def body(call, echo, channel):
        answer = await call("Lookup")(pages_pb2.LookupRequest(keys=bytes(64)), timeout=5)
        assert list(answer.codes) == [1, 1]

        async def chunks():
            for offset in range(4):
                yield wire.encode_put(transfer_pb2.PutRequest(offset=offset), [b"abc"])

        assert (await call("Put")(chunks(), timeout=5)).leading_run == 12

        got = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for message in call("Get")(transfer_pb2.GetRequest(), timeout=5):
                got.append((message.offset, bytes(message.data)))
        assert got == [(0, b"data"), (1, b"data"), (2, b"data")]
        error = from_rpc_error(caught.value)
        assert type(error) is errors.TierIOError
        assert (str(error), error.remedy) == ("the disk is gone", "look at the disk")

        events = [e async for e in call("Watch")(pages_pb2.WatchRequest(), timeout=5)]
        assert [event.epoch for event in events] == [5]

    with_server(body)


def test_an_error_keeps_its_class_text_and_remedy():
    async def body(call, echo, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call("Lookup")(pages_pb2.LookupRequest(), timeout=5)
        error = from_rpc_error(caught.value)
        assert type(error) is errors.KeyLengthError
        assert (str(error), error.remedy) == ("no keys", "send 32 bytes, 100 %")

    with_server(body)


def test_a_method_that_is_missing_is_not_implemented_yet():
    async def body(call, echo, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call("Flush")(pages_pb2.FlushRequest(), timeout=5)
        assert type(from_rpc_error(caught.value)) is errors.NotImplementedYet
        assert rpc.implemented(rpc.PAGES, echo) == [
            "Pages.Lookup",
            "Pages.Put",
            "Pages.Get",
            "Pages.Watch",
        ]

    with_server(body)


@pytest.mark.parametrize("path", ["Lookup", "Get", "Put"])
def test_garbage_is_an_invalid_argument(path):
    async def body(call, echo, channel):
        garbage = b"\x12\x05\x0a"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            if path == "Put":
                await channel.stream_unary(f"/{rpc.PAGES}/{path}")(iter([garbage]), timeout=5)
            elif path == "Get":
                async for _ in channel.unary_stream(f"/{rpc.PAGES}/{path}")(garbage, timeout=5):
                    pass
            else:
                await channel.unary_unary(f"/{rpc.PAGES}/{path}")(garbage, timeout=5)
        assert type(from_rpc_error(caught.value)) is errors.ChunkError

    with_server(body)


def test_a_cancelled_stream_is_closed_at_once():
    async def body(call, echo, channel):
        stream = call("Get")(transfer_pb2.GetRequest(lossy_ok=True), timeout=5)
        await stream.read()
        stream.cancel()
        await asyncio.wait_for(echo.closed.wait(), 2)

    with_server(body)
