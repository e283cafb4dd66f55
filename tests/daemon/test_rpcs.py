"""What each rpc answers, over a real connection to a real daemon."""

from __future__ import annotations

import time

import grpc
import pytest
from raw_calls import (
    PAGE_BYTES,
    RawClient,
    error_of,
    fails,
    key_of,
    opaque_layout,
    payload_of,
    put_page,
    put_stream,
)

from kvtier.packing.layout import Shard
from kvtier.transfer.rpc import ADMIN, METHODS, PAGES
from kvtier.v1 import admin_pb2, page_pb2, pages_pb2, transfer_pb2

HIT, MISS, STALE = 1, 2, 3
STORED, EXISTS, STALE_GENERATION, REFUSED = 1, 2, 3, 7
RPCS = [method for service in (PAGES, ADMIN) for method in METHODS[service].values()]
MISSING = {"AdoptHandoff"}


# -- what is there --------------------------------------------------------------------------------


def test_every_rpc_of_the_protocol_answers(client):
    """None is unknown to the server: those that are missing say so as kvtier, not as gRPC."""
    for method in RPCS:
        if method.name in ("Put", "Get", "Watch", "Verify", "Drain"):
            continue
        kind = method.parse_request(b"")
        try:
            client.call(method.name, kind, service=method.service)
        except grpc.RpcError as error:
            code, name, _ = error_of(error)
            assert name, f"{method.name}: {code} without kvtier-error"
            assert (code is grpc.StatusCode.UNIMPLEMENTED) == (method.name in MISSING), method.name


@pytest.mark.parametrize("name", sorted(MISSING))
def test_what_is_not_there_yet(client, name):
    request = METHODS[PAGES][name].parse_request(b"")
    fails(lambda: client.call(name, request), grpc.StatusCode.UNIMPLEMENTED, "NotImplementedYet")


def test_without_an_nvme_tier_nothing_is_durable(client):
    opened = client.open()
    opening = transfer_pb2.PutOpen(handle=opened.handle, durability=2)
    fails(
        lambda: client.put_messages([transfer_pb2.PutRequest(open=opening)]),
        grpc.StatusCode.UNIMPLEMENTED,
        "NotImplementedYet",
        "NVME",
    )
    handle, keys = opened.handle, key_of(1)
    client.put(opened, [(keys, payload_of(1))])
    demoted = client.call("Demote", pages_pb2.DemoteRequest(handle=handle, keys=keys))
    assert (list(demoted.codes), demoted.leading_run) == ([9], 0)
    raised = client.call("Prefetch", pages_pb2.PrefetchRequest(handle=handle, keys=keys))
    assert (list(raised.codes), raised.leading_run) == ([HIT], 1)
    flushed = client.call("Flush", pages_pb2.FlushRequest(session_id=opened.session_id))
    assert (flushed.pages, flushed.pages_lost) == (0, 1)


def test_lru_heeds_no_hint_and_a_wrong_one_is_refused(client):
    opened = client.open()
    key = key_of(1)
    client.put(opened, [(key, payload_of(1))])
    request = pages_pb2.ExpectRequest(handle=opened.handle, key=key, ended=True)
    assert not client.call("Expect", request).heeded
    for wrong in (key[:5], key * 2):
        request = pages_pb2.ExpectRequest(handle=opened.handle, key=wrong)
        with pytest.raises(grpc.RpcError) as caught:
            client.call("Expect", request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_capabilities_are_the_configured_limits(make_daemon):
    limits = {
        "keys_per_call_max": 100,
        "pages_per_put_max": 50,
        "bytes_per_call_max": 1 << 22,
        "message_bytes_max": 1 << 20,
        "chunk_bytes": 1 << 16,
        "lease_ms_default": 77,
        "lease_ms_max": 7777,
        "sessions_max": 3,
        "namespaces_max": 5,
    }
    settings = [f"limits.{name}={value}" for name, value in limits.items()]
    daemon = make_daemon(*settings, "limits.session_ttl_s=1.5").start()
    with RawClient(daemon.url) as raw:
        found = raw.capabilities()
    assert {name: getattr(found, name) for name in limits} == limits
    assert found.session_ttl_ms == 1500
    assert list(found.tiers) == [page_pb2.TIER_HOST]
    assert list(found.planes) == ["grpc", "local"]
    assert found.local_socket == daemon.url.removeprefix("unix://") + ".local"
    assert found.page_bytes_max == (16 << 20) - 4096
    names = {f"{method.service.rpartition('.')[2]}.{method.name}" for method in RPCS}
    assert set(found.methods) == names - {f"Pages.{name}" for name in MISSING}


# -- pages ----------------------------------------------------------------------------------------


def test_the_whole_capacity_is_used_and_holds_one_page(make_daemon):
    """A capacity that is no whole number of slabs makes longer slabs, and so longer pages."""
    size = 100 << 20
    daemon = make_daemon(f"host.bytes={size}").start()
    with RawClient(daemon.url) as raw:
        assert raw.capabilities().page_bytes_max == size - 4096
        assert raw.status().tiers[0].capacity_bytes == size
        opened = raw.open(opaque_layout(size - 4096))
        payload = payload_of("large", size - 4096)
        assert list(raw.put(opened, [(key_of("large"), payload)]).codes) == [STORED]
        assert raw.get(opened, [key_of("large")]).payloads[0] == payload
        fails(lambda: raw.open(opaque_layout(size)), grpc.StatusCode.INVALID_ARGUMENT,
              "LayoutError", "page_bytes_max")  # fmt: skip


@pytest.mark.parametrize("length", [1, 4095, 4096, 65_536, 1 << 20, 5 << 20])
def test_pages_of_any_size_round_trip(client, length):
    layout = opaque_layout(length)
    opened = client.open(layout)
    pages = [(key_of((length, i)), payload_of((length, i), length)) for i in range(2)]
    put = client.put(opened, pages)
    assert list(put.codes) == [STORED, STORED]
    assert put.leading_run == 2
    assert put.boot_id == opened.boot_id
    got = client.get(opened, [key for key, _ in pages])
    assert got.codes == [HIT, HIT]
    assert [got.payloads[i] for i in range(2)] == [payload for _, payload in pages]
    assert [page.slot for page in got.pages] == list(put.slots)
    assert [page.generation for page in got.pages] == list(put.generations)
    assert all(page.tier == page_pb2.TIER_HOST for page in got.pages)


def test_outcomes_come_in_request_order_item_by_item(client):
    opened = client.open()
    good, again, damaged = key_of("good"), key_of("again"), key_of("damaged")
    assert list(client.put(opened, [(again, payload_of("again"))]).codes) == [STORED]
    payload = payload_of("good")
    pages = [
        put_page(opened, again, payload_of("again")),
        put_page(opened, damaged, payload),
        put_page(opened, good, payload),
        put_page(opened, good, payload),
        put_page(opened, key_of("short"), payload[:100]),
        put_page(opened, key_of("fp8"), payload, codec=2),
    ]
    pages[1].payload_sum = bytes(16)
    run = payload_of("again") + payload * 3 + payload[:100] + payload
    request = transfer_pb2.PutRequest(
        open=transfer_pb2.PutOpen(handle=opened.handle), pages=pages, data=run
    )
    put = client.put_messages([request])
    assert list(put.codes) == [EXISTS, REFUSED, STORED, EXISTS, REFUSED, REFUSED]
    assert put.leading_run == 1
    got = client.get(opened, [damaged, good, again, good])
    assert got.codes == [MISS, HIT, HIT, HIT]
    assert got.payloads[1] == got.payloads[3] == payload
    found = client.lookup(opened, [good, again, damaged, good])
    assert list(found.codes) == [HIT, HIT, MISS, HIT]
    assert list(found.tiers) == [2, 2, 0, 2]
    assert found.leading_run == 2


def test_empty_batches(client):
    opened = client.open()
    assert list(client.put(opened, []).codes) == []
    assert client.get(opened, []).codes == []
    found = client.lookup(opened, [])
    assert (list(found.codes), found.leading_run) == ([], 0)
    request = pages_pb2.DeleteRequest(handle=opened.handle)
    assert list(client.call("Delete", request).codes) == []


def test_delete(client):
    opened = client.open()
    client.put(opened, [(key_of(i), payload_of(i)) for i in range(2)])
    keys = key_of(0) + key_of("none") + key_of(0)
    answer = client.call("Delete", pages_pb2.DeleteRequest(handle=opened.handle, keys=keys))
    assert sorted(answer.codes) == [1, 2, 2]
    assert answer.codes[1] == 2
    assert client.get(opened, [key_of(0), key_of(1)]).codes == [MISS, HIT]


def test_tenants_and_weights_do_not_meet(client):
    opened = client.open(tenant="a")
    client.put(opened, [(key_of(1), payload_of(1))])
    for other in (client.open(tenant="b"), client.open(opaque_layout(revision="2"), tenant="a")):
        assert client.get(other, [key_of(1)]).codes == [MISS]
        assert list(client.lookup(other, [key_of(1)]).codes) == [MISS]


def test_a_key_of_two_shards_is_a_hit_when_both_are_there(client):
    first, second = (
        client.open(
            opaque_layout(shard_count=2, shard=Shard(index=i, layers=(0, 1), heads=(0, 64)))
        )
        for i in range(2)
    )
    page = put_page(first, key_of(1), payload_of(1), shard=0)
    opening = transfer_pb2.PutOpen(handle=first.handle)
    client.put_messages([transfer_pb2.PutRequest(open=opening, pages=[page], data=payload_of(1))])
    assert list(client.lookup(first, [key_of(1)]).codes) == [MISS]
    page = put_page(second, key_of(1), payload_of(1), shard=1)
    opening = transfer_pb2.PutOpen(handle=second.handle)
    client.put_messages([transfer_pb2.PutRequest(open=opening, pages=[page], data=payload_of(1))])
    assert list(client.lookup(first, [key_of(1)]).codes) == [HIT]


# -- leases ---------------------------------------------------------------------------------------


def test_leases(client):
    opened = client.open()
    client.put(opened, [(key_of(i), payload_of(i)) for i in range(2)])
    pin = pages_pb2.PinRequest(
        handle=opened.handle, keys=key_of(0) + key_of("none") + key_of(1), ttl_ms=60_000
    )
    lease = client.call("Pin", pin)
    assert (list(lease.codes), lease.leading_run, lease.ttl_ms) == ([HIT, MISS, HIT], 1, 60_000)
    assert client.status().tiers[0].pages_pinned == 2
    ids = {"session_id": opened.session_id, "lease_ids": [lease.lease_id, 999]}
    assert list(client.call("Renew", pages_pb2.RenewRequest(**ids)).codes) == [1, 4]
    assert list(client.call("Unpin", pages_pb2.UnpinRequest(**ids)).codes) == [2, 4]
    assert list(client.call("Unpin", pages_pb2.UnpinRequest(**ids)).codes) == [4, 4]
    assert client.status().tiers[0].pages_pinned == 0


def test_leases_end_with_their_time_and_their_session(make_daemon):
    daemon = make_daemon("limits.session_ttl_s=0.4").start()
    with RawClient(daemon.url) as raw:
        opened = raw.open()
        raw.put(opened, [(key_of(1), payload_of(1))])
        short = pages_pb2.PinRequest(handle=opened.handle, keys=key_of(1), ttl_ms=50)
        lease = raw.call("Pin", short)
        time.sleep(0.3)
        assert raw.status().tiers[0].pages_pinned == 0
        renew = pages_pb2.RenewRequest(session_id=opened.session_id, lease_ids=[lease.lease_id])
        assert list(raw.call("Renew", renew).codes) == [3], "EXPIRED stays so"
        raw.call("Pin", pages_pb2.PinRequest(handle=opened.handle, keys=key_of(1)))
        assert raw.status().tiers[0].pages_pinned == 1
        time.sleep(0.8)
        status = raw.status()
        assert (status.tiers[0].pages_pinned, len(status.sessions)) == (0, 0)
        fails(lambda: raw.lookup(opened, [key_of(1)]), grpc.StatusCode.NOT_FOUND, "UnknownHandle")


def test_closing_a_session(client):
    opened = client.open()
    close = pages_pb2.CloseSessionRequest(session_id=opened.session_id)
    client.call("CloseSession", close)
    client.call("CloseSession", close)
    fails(lambda: client.lookup(opened, []), grpc.StatusCode.NOT_FOUND, "UnknownHandle")


# -- verify ---------------------------------------------------------------------------------------


def test_verify_reads_everything(client):
    opened = client.open()
    count = 100
    client.put_messages(put_stream(opened, [(key_of(i), payload_of(i)) for i in range(count)]))
    progress = list(client.stream("Verify", admin_pb2.VerifyRequest(tier=2), service=ADMIN))
    last = progress[-1]
    assert len(progress) > 1
    assert (last.pages_done, last.pages_total, last.pages_corrupt) == (count, count, 0)
    assert last.bytes_done == count * PAGE_BYTES
    fails(
        lambda: list(client.stream("Verify", admin_pb2.VerifyRequest(tier=3), service=ADMIN)),
        grpc.StatusCode.INVALID_ARGUMENT,
        "LimitExceeded",
    )


def test_delete_of_many_answers_in_request_order(client):
    opened = client.open(opaque_layout(1024))
    names = [i for i in range(3000) if i % 3]
    for start in range(0, len(names), 500):
        pages = [(key_of(i), payload_of(i, 1024)) for i in names[start : start + 500]]
        assert set(client.put(opened, pages).codes) == {STORED}
    keys = b"".join(key_of(i) for i in range(3000))
    answer = client.call("Delete", pages_pb2.DeleteRequest(handle=opened.handle, keys=keys))
    there = {i for i, code in enumerate(answer.codes) if code == 1}
    assert len(answer.codes) == 3000
    assert there == set(names)
