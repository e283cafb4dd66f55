"""Clients that break the protocol: a typed error for them, nothing left behind, no crash."""

from __future__ import annotations

import random

import grpc
import pytest
from raw_calls import (
    PAGE_BYTES,
    RawClient,
    failure,
    key_of,
    payload_of,
    put_page,
    put_stream,
    settled,
)

from kvtier.transfer.rpc import ADMIN, METHODS, PAGES, Kind
from kvtier.v1 import pages_pb2, transfer_pb2
from tests.forks import daemon_of_its_own

RPCS = [method for service in (PAGES, ADMIN) for method in METHODS[service].values()]
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/status") as status:
        line = next(line for line in status if line.startswith("RssAnon"))
    return int(line.split()[1]) << 10


# -- broken ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared(forker):
    """One daemon for the calls that leave it as it was."""
    with daemon_of_its_own(forker) as running:
        yield running


@pytest.mark.parametrize("method", RPCS, ids=lambda method: method.name)
def test_random_bytes(shared, request, method):
    daemon = request.getfixturevalue("daemon") if method.name == "Drain" else shared
    seed = f"{method.name} 4711"
    rng = random.Random(seed)
    blobs = [rng.randbytes(100_000) for _ in range(10)]
    blobs += [rng.randbytes(rng.randrange(64)) for _ in range(50)]
    if method.name == "Drain":
        blobs = [blob for blob in blobs if blob]  # an empty message is a valid Drain
    with RawClient(daemon.url) as raw:
        before = resident_bytes(daemon.pid)
        codes = set()
        for blob in blobs:
            try:
                send(raw, method, blob)
            except grpc.RpcError as error:
                codes.add(error.code())
        assert not codes & {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}, f"seed {seed}"
        if method.name != "Drain":
            assert raw.status().state == "ready", f"seed {seed}"
            settled(raw)
            assert resident_bytes(daemon.pid) < before + (32 << 20), f"seed {seed}"
    assert "crashed" not in daemon.log, f"seed {seed}"


def send(raw: RawClient, method, blob: bytes) -> None:
    if method.kind is Kind.UNARY:
        raw.channel.unary_unary(method.path)(blob, timeout=5)
    elif method.kind is Kind.STREAM_OUT:
        call = raw.channel.unary_stream(method.path)(blob, timeout=5)
        next(iter(call), None)
        call.cancel()
    else:
        raw.channel.stream_unary(method.path)(iter([blob, blob]), timeout=5)


def test_puts_that_break_the_rules_leave_nothing(client):
    opened = client.open()
    opening = transfer_pb2.PutOpen(handle=opened.handle)
    page = put_page(opened, key_of(1), payload_of(1))
    request = transfer_pb2.PutRequest
    half = payload_of(1)[: PAGE_BYTES // 2]

    def changed(**fields):
        announced = put_page(opened, key_of(1), payload_of(1))
        for field, value in fields.items():
            setattr(announced, field, value)
        return announced

    broken = {
        "no message": ([], "ChunkError"),
        "no open": ([request(pages=[page])], "ChunkError"),
        "second open": ([request(open=opening), request(open=opening)], "ChunkError"),
        "bytes missing": ([request(open=opening, pages=[page], data=half)], "ChunkError"),
        "no bytes": ([request(open=opening, pages=[page])], "ChunkError"),
        "too many bytes": (
            [request(open=opening, pages=[page], data=payload_of(1) + b"x")],
            "ChunkError",
        ),
        "nothing announced": ([request(open=opening, data=b"x")], "ChunkError"),
        "wrong offset": (
            [request(open=opening, pages=[page], data=half), request(offset=1, data=half)],
            "ChunkError",
        ),
        "repeated chunk": (
            [request(open=opening, pages=[page], data=half), request(offset=0, data=half)],
            "ChunkError",
        ),
        "short key": ([request(open=opening, pages=[changed(key=b"x")])], "KeyLengthError"),
        "short sum": ([request(open=opening, pages=[changed(payload_sum=b"x")])], "ChunkError"),
        "short origin": ([request(open=opening, pages=[changed(origin_sum=b"x")])], "ChunkError"),
        "codec": ([request(open=opening, pages=[changed(codec=99)])], "ChunkError"),
        "parent": ([request(open=opening, pages=[changed(parent=b"x")])], "KeyLengthError"),
        "session": (
            [request(open=transfer_pb2.PutOpen(handle=opened.handle, session="x" * 257))],
            "LimitExceeded",
        ),
        "durability": (
            [request(open=transfer_pb2.PutOpen(handle=opened.handle, durability=9))],
            "ChunkError",
        ),
        "huge": ([request(open=opening, pages=[changed(length=1 << 62)])], "LimitExceeded"),
    }
    for name, (messages, kind) in broken.items():
        found = failure(lambda m=messages: client.put_messages(m))
        assert found[:2] == (INVALID, kind), f"{name}: {found}"
        host = settled(client)
        assert (host.pages_sealed, host.used_bytes) == (0, 0), name
    unknown = transfer_pb2.PutOpen(handle=opened.handle ^ 1)
    found = failure(lambda: client.put_messages([request(open=unknown)]))
    assert found[:2] == (grpc.StatusCode.NOT_FOUND, "UnknownHandle")
    assert list(client.put(opened, [(key_of(1), payload_of(1))]).codes) == [1]


def test_pages_before_the_mistake_stay(client):
    """A status says nothing of any page; what was verified is there."""
    opened = client.open()
    messages = list(put_stream(opened, [(key_of(i), payload_of(i)) for i in range(3)], PAGE_BYTES))
    messages[-1].offset += 1
    failure(lambda: client.put_messages(messages))
    assert client.get(opened, [key_of(i) for i in range(3)]).codes == [1, 1, 2]
    assert settled(client).pages_sealed == 2


def test_key_lists_of_the_wrong_length(client):
    opened = client.open()
    for keys in (b"x", bytes(31), bytes(33)):
        request = pages_pb2.LookupRequest(handle=opened.handle, keys=keys)
        assert failure(lambda r=request: client.call("Lookup", r))[:2] == (
            INVALID,
            "KeyLengthError",
        )
        get = transfer_pb2.GetRequest(handle=opened.handle, keys=keys)
        assert failure(lambda g=get: list(client.stream("Get", g)))[:2] == (
            INVALID,
            "KeyLengthError",
        )
