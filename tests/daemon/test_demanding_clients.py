"""Clients that are greedy, slow or dead: bounded, and nothing lost for the others."""

from __future__ import annotations

import queue
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from raw_calls import (
    PAGE_BYTES,
    RawClient,
    error_of,
    failure,
    key_of,
    opaque_layout,
    payload_of,
    put_stream,
    settled,
)

from kvtier.packing.layout import Shard
from kvtier.transfer.rpc import METHODS, PAGES
from kvtier.v1 import pages_pb2, transfer_pb2

INVALID = grpc.StatusCode.INVALID_ARGUMENT


# -- greedy ---------------------------------------------------------------------------------------


def test_limits_are_named(make_daemon):
    daemon = make_daemon(
        "limits.keys_per_call_max=4",
        "limits.pages_per_put_max=2",
        "limits.bytes_per_call_max=128KiB",
        "limits.message_bytes_max=192KiB",
        "limits.chunk_bytes=64KiB",
        "limits.sessions_max=1",
        "limits.handles_per_session_max=4",
        "limits.namespaces_max=2",
    ).start()
    with RawClient(daemon.url) as raw, RawClient(daemon.url) as second:
        opened = raw.open()
        pages = [(key_of(i), payload_of(i)) for i in range(3)]
        assert failure(lambda: raw.lookup(opened, [key_of(i) for i in range(5)]))[2].count("keys_")
        assert "2 pages" in failure(lambda: raw.put(opened, pages))[2]
        assert failure(second.open)[:2] == (INVALID, "LimitExceeded")
        second_tenant = raw.open(tenant="2")
        assert "namespaces" in failure(lambda: raw.open(tenant="3"))[2]
        for _ in range(5):
            raw.open()
        assert [session.handles for session in raw.status().sessions] == [2]
        shards = [
            opaque_layout(shard_count=9, shard=Shard(index=index, layers=(0, 1), heads=(0, 64)))
            for index in range(4)
        ]
        raw.call(
            "DeleteNamespace",
            pages_pb2.DeleteNamespaceRequest(fingerprint=second_tenant.fingerprint),
        )
        # That of the deleted namespace makes room.
        for shard in shards[:3]:
            raw.open(shard)
        assert "handles_per_session_max" in failure(lambda: raw.open(shards[3]))[2]
        large = raw.put_messages
        big = transfer_pb2.PutRequest(
            open=transfer_pb2.PutOpen(handle=opened.handle), data=bytes(200 << 10)
        )
        assert failure(lambda: large([big]))[:2] == (INVALID, "LimitExceeded")
        assert list(raw.put(opened, pages[:2]).codes) == [1, 1]
        assert list(raw.put(opened, pages[2:]).codes) == [1]
        got = raw.get(opened, [key_of(i) for i in range(3)])
        assert got.codes == [1, 1, 5], "over bytes_per_call_max: BUSY for that page alone"


def test_a_stock_client_can_read_pages_over_4_mib(client):
    opened = client.open(opaque_layout(6 << 20))
    payload = payload_of("big", 6 << 20)
    assert list(client.put(opened, [(key_of("big"), payload)]).codes) == [1]
    assert client.get(opened, [key_of("big")]).payloads[0] == payload


def test_hanging_streams_do_not_keep_short_calls_out(make_daemon):
    daemon = make_daemon("limits.streams_max=4").start()
    with RawClient(daemon.url) as raw:
        opened = raw.open()
        ends: list[queue.Queue] = [queue.Queue() for _ in range(9)]
        opening = transfer_pb2.PutRequest(open=transfer_pb2.PutOpen(handle=opened.handle))

        def hang(end):
            def messages():
                yield opening
                end.get(timeout=20)

            try:
                return raw.put_messages(messages(), timeout=20), None
            except grpc.RpcError as error:
                return None, error_of(error)[:2]

        with ThreadPoolExecutor(len(ends)) as pool:
            puts = [pool.submit(hang, end) for end in ends]
            deadline = time.monotonic() + 5
            while sum(put.done() for put in puts) < 5 and time.monotonic() < deadline:
                time.sleep(0.01)
            began = time.monotonic()
            assert list(raw.lookup(opened, [key_of(1)]).codes) == [2]
            health = health_pb2_grpc.HealthStub(raw.channel)
            assert health.Check(health_pb2.HealthCheckRequest(), timeout=5).status == 1
            assert time.monotonic() - began < 0.5
            refused = [put.result()[1] for put in puts if put.done()]
            assert refused == [(grpc.StatusCode.RESOURCE_EXHAUSTED, "Busy")] * 5
            for end in ends:
                end.put(None)
            assert sum(put.result()[1] is None for put in puts) == 4
        assert list(raw.put(opened, [(key_of(1), payload_of(1))]).codes) == [1]


def test_bytes_under_way_are_bounded_and_given_back(make_daemon):
    daemon = make_daemon(
        "limits.bytes_under_way_max=256KiB", "limits.bytes_per_call_max=256KiB"
    ).start()
    with RawClient(daemon.url) as raw:
        opened = raw.open()
        go = threading.Event()
        pages = [(key_of(i), payload_of(i)) for i in range(3)]

        def messages():
            whole = list(put_stream(opened, pages, chunk_bytes=len(pages[0][1])))
            yield from whole[:2]
            assert go.wait(10)
            yield from whole[2:]

        with ThreadPoolExecutor(1) as pool:
            slow = pool.submit(raw.put_messages, messages())
            deadline = time.monotonic() + 5
            # Once its first page is there, all of its bytes are counted.
            while list(raw.lookup(opened, [key_of(0)]).codes) != [1]:
                assert time.monotonic() < deadline
            with pytest.raises(grpc.RpcError) as refused:
                raw.put(opened, [(key_of((9, i)), payload_of(i)) for i in range(2)])
            assert error_of(refused.value)[:2] == (grpc.StatusCode.RESOURCE_EXHAUSTED, "Busy")
            go.set()
            assert list(slow.result().codes) == [1, 1, 1]
        for i in range(20):  # nothing stays counted
            page = (key_of((i, 0)), payload_of(i))
            assert list(raw.put(opened, [page] * 4).codes) == [1, 2, 2, 2]
            assert raw.get(opened, [key_of(0)] * 4).codes == [1] * 4


def test_a_full_tier_evicts_the_coldest(client):
    opened = client.open()
    count = 400  # 16 MiB hold 240
    for start in range(0, count, 50):
        pages = [(key_of(i), payload_of(i)) for i in range(start, start + 50)]
        assert list(client.put(opened, pages).codes) == [1] * 50
    codes = client.get(opened, [key_of(i) for i in range(count)]).codes
    first_hit = codes.index(1)
    assert codes[first_hit:] == [1] * (count - first_hit)
    assert 200 <= count - first_hit <= 250


# -- many, slow and dead --------------------------------------------------------------------------


def test_32_clients_put_one_key(daemon):
    clients = [RawClient(daemon.url) for _ in range(32)]
    try:
        opened = [client.open() for client in clients]
        barrier = threading.Barrier(32)

        def put(i):
            barrier.wait(10)
            answer = clients[i].put(opened[i], [(key_of("one"), payload_of("one"))])
            return next(iter(answer.codes))

        with ThreadPoolExecutor(32) as pool:
            codes = sorted(pool.map(put, range(32)))
        assert codes == [1] + [2] * 31
        assert settled(clients[0]).pages_sealed == 1
        assert clients[0].get(opened[0], [key_of("one")]).payloads[0] == payload_of("one")
    finally:
        for client in clients:
            client.close()


def test_a_silent_put_is_ended(make_daemon):
    daemon = make_daemon("limits.put_idle_ms=100").start()
    with RawClient(daemon.url) as raw:
        opened = raw.open()
        stop = threading.Event()

        def messages():
            yield from list(put_stream(opened, [(key_of(1), payload_of(1))]))[:1]
            stop.wait(10)

        found = failure(lambda: raw.put_messages(messages()))
        stop.set()
        assert found[:2] == (grpc.StatusCode.DEADLINE_EXCEEDED, "DeadlineExceeded")
        assert "put_idle_ms" in found[2]
        settled(raw)


def test_a_reader_that_stands_still_is_cut_off(make_daemon):
    daemon = make_daemon("limits.get_idle_ms=200").start()
    with RawClient(daemon.url) as slow, RawClient(daemon.url) as raw:
        opened = raw.open()
        raw.put(opened, [(key_of(i), payload_of(i)) for i in range(100)])
        # More than the buffers between the two ever hold.
        keys = b"".join(key_of(i) for i in range(100)) * 40
        stream = slow.stream("Get", transfer_pb2.GetRequest(handle=opened.handle, keys=keys))
        next(stream)
        time.sleep(1.0)
        assert raw.get(opened, [key_of(5)]).codes == [1], "others are served meanwhile"
        with pytest.raises(grpc.RpcError) as error:
            for _ in stream:
                pass
        assert error_of(error.value)[:2] == (
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "DeadlineExceeded",
        )
        settled(raw)


@pytest.mark.parametrize("seed", range(3))
def test_cancelled_calls_give_everything_back(client, seed):
    rng = random.Random(seed)
    opened = client.open()
    client.put(opened, [(key_of(i), payload_of(i)) for i in range(100)])
    keys = b"".join(key_of(i) for i in range(100))
    put = client.channel.stream_unary(
        METHODS[PAGES]["Put"].path,
        request_serializer=transfer_pb2.PutRequest.SerializeToString,
    )
    for round_no in range(10):
        get = client.stream("Get", transfer_pb2.GetRequest(handle=opened.handle, keys=keys))
        pages = [(key_of((seed, round_no, i)), payload_of(i)) for i in range(20)]
        call = put.future(put_stream(opened, pages, 10_000), timeout=10)
        for _ in range(rng.randrange(3)):
            next(get, None)
        time.sleep(rng.uniform(0, 0.01))
        get.cancel()
        call.cancel()
    host = settled(client)
    assert host.used_bytes == (host.pages_sealed + host.pages_quarantined) * (PAGE_BYTES + 4096)
    assert client.get(opened, [key_of(0)]).codes == [1], f"seed {seed}"


DYING = """
import sys
sys.path.insert(0, sys.argv[2])
from raw_calls import *
raw = RawClient(sys.argv[1])
opened = raw.open()
raw.put(opened, [(key_of(i), payload_of(i)) for i in range(50)])
keys = b"".join(key_of(i) for i in range(50))
raw.call("Pin", pages_pb2.PinRequest(handle=opened.handle, keys=keys, ttl_ms=600_000))
def messages():
    yield next(put_stream(opened, [(key_of("half"), payload_of("half"))]))
    yield transfer_pb2.PutRequest(data=payload_of("half")[:1000])
    print("half way", flush=True)
    import time; time.sleep(60)
raw.put_messages(messages(), timeout=60)
"""


def test_sigkill_of_a_client_frees_what_it_held(make_daemon, repo):
    daemon = make_daemon("limits.session_ttl_s=0.5").start()
    script = [sys.executable, "-c", DYING, daemon.url, str(repo / "tests" / "daemon")]
    with subprocess.Popen(script, stdout=subprocess.PIPE) as process, RawClient(daemon.url) as raw:
        assert process.stdout is not None
        assert process.stdout.readline() == b"half way\n"
        host = raw.status().tiers[0]
        assert (host.pages_pinned, host.pages_filling) == (50, 1)
        process.kill()
        process.wait(10)
        settled(raw)
        assert not raw.status().sessions
        opened = raw.open()
        assert list(raw.put(opened, [(key_of("half"), payload_of("half"))]).codes) == [1]


def test_pings_without_calls_are_no_abuse(daemon):
    options = {
        "grpc.keepalive_time_ms": 1000,
        "grpc.keepalive_timeout_ms": 1000,
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.http2.max_pings_without_data": 0,
    }
    with RawClient(daemon.url, **options) as raw:
        states: list[grpc.ChannelConnectivity] = []
        raw.status()
        raw.channel.subscribe(states.append)
        time.sleep(5)
        raw.status()
        lost = {grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.TRANSIENT_FAILURE}
        assert not lost & set(states), states
