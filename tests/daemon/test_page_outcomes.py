"""The outcomes a page or a key can have beside the plain ones, by raw calls to a real daemon."""

from __future__ import annotations

import struct
import time

import grpc
import numpy as np
import pytest
from raw_calls import (
    RawClient,
    failure,
    key_of,
    opaque_layout,
    payload_of,
    put_page,
    settled,
)

from kvtier.packing.layout import Layout, Role, ScaleRule, Segment
from kvtier.v1 import pages_pb2, transfer_pb2

HIT, MISS, STALE = 1, 2, 3
STORED, EXISTS, STALE_GENERATION, NONFINITE, BUSY, REFUSED = 1, 2, 3, 4, 6, 7
RELEASED, EXPIRED, UNKNOWN = 2, 3, 4
DELETE_STALE = 3
FP8 = 2
INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND


# -- single pages ---------------------------------------------------------------------------------


def test_pages_without_bytes_are_refused_and_hurt_no_neighbour(client):
    opened = client.open()
    sizes = {"first": 0, "a": 65_536, "middle": 0, "b": 65_536, "last": 0}
    pages = [(key_of(name), payload_of(name, size)) for name, size in sizes.items()]
    codes = [REFUSED, STORED, REFUSED, STORED, REFUSED]
    assert list(client.put(opened, pages).codes) == codes
    got = client.get(opened, [key for key, _ in pages])
    assert got.codes == [MISS, HIT, MISS, HIT, MISS]
    assert [got.payloads[1], got.payloads[3]] == [pages[1][1], pages[3][1]]
    assert list(client.put(opened, pages[:1]).codes) == [REFUSED], "a put of no bytes at all"
    assert settled(client).pages_sealed == 2


def half_layout() -> Layout:
    segment = Segment(
        name="k", role=Role.KEY, dtype="bfloat16", layers=1, heads=2, dim=64,
        scale_rule=ScaleRule.LAYER_HEAD,
    )  # fmt: skip
    return Layout.from_segments(
        [segment], model_id="m", revision="1", page_tokens=16, kv_compute="bfloat16"
    )


def packed(scale: float = 1.0, code: int = 0x38) -> bytes:
    """An fp8 payload of `half_layout`: every code alike, the second head's scale as given."""
    layout = half_layout()
    offset, count = layout.scales_span
    payload = bytearray(layout.fp8_bytes)
    payload[:offset] = bytes([code]) * offset
    payload[offset : offset + 4 * count] = struct.pack("<2f", 1.0, scale)
    return bytes(payload)


def put_fp8(client: RawClient, opened, name: object, payload: bytes, **fields) -> list[int]:
    fields = {"lossy": True, "origin_sum": bytes(range(16))} | fields
    page = put_page(opened, key_of(name), payload, codec=FP8, **fields)
    return list(client.put_pages(opened, [(page, payload)]).codes)


def test_fp8_pages_that_no_packer_makes(client):
    opened = client.open(half_layout())
    scales = {"0": 0.0, "-0": -0.0, "nan": np.nan, "-1": -1.0, "inf": np.inf, "-inf": -np.inf,
              "denormal": 2.0**-130, "beyond bfloat16": 3e38}  # fmt: skip
    for name, scale in scales.items():
        assert put_fp8(client, opened, name, packed(scale)) == [NONFINITE], name
    for code in (0x7F, 0xFF):
        assert put_fp8(client, opened, code, packed(code=code)) == [NONFINITE], "a NaN code"
    assert put_fp8(client, opened, "whole", packed()) == [STORED]
    host = settled(client)
    assert (host.pages_sealed, host.pages_quarantined) == (1, 0)


def test_fp8_pages_must_say_that_they_are_packed(client):
    opened = client.open(half_layout())
    assert put_fp8(client, opened, 1, packed(), lossy=False) == [REFUSED]
    assert put_fp8(client, opened, 1, packed(), origin_sum=b"") == [REFUSED]
    assert put_fp8(client, opened, 1, packed(), origin_sum=bytes(16)) == [REFUSED], "no sum"
    assert put_fp8(client, opened, 1, packed()[:-4]) == [REFUSED], "scales missing"
    assert put_fp8(client, opened, 1, packed()) == [STORED]
    plain = client.get(opened, [key_of(1)])
    assert plain.codes == [MISS], "a lossy page nobody asked for"
    got = client.get(opened, [key_of(1)], lossy_ok=True, accept=[FP8])
    assert (got.codes, got.payloads[0]) == ([HIT], packed())
    assert (got.pages[0].lossy, got.pages[0].origin_sum) == (True, bytes(range(16)))


# -- handles and limits ---------------------------------------------------------------------------


def test_unknown_handles(client):
    opened = client.open()
    unknown, keys = opened.handle ^ 1, key_of(1)
    calls = {
        "Get": lambda: list(
            client.stream("Get", transfer_pb2.GetRequest(handle=unknown, keys=keys))
        ),
        "Delete": lambda: client.call("Delete", pages_pb2.DeleteRequest(handle=unknown, keys=keys)),
        "Pin": lambda: client.call("Pin", pages_pb2.PinRequest(handle=unknown, keys=keys)),
        "Lookup": lambda: client.call("Lookup", pages_pb2.LookupRequest(handle=unknown, keys=keys)),
    }
    for name, call in calls.items():
        assert failure(call)[:2] == (NOT_FOUND, "UnknownHandle"), name


def test_stale_handles(client):
    old = client.open()
    page = (key_of(1), payload_of(1))
    assert list(client.put(old, [page]).codes) == [STORED]
    client.bump(old)
    new = client.open()
    assert list(client.put(new, [page]).codes) == [STORED]
    assert client.delete(old, [key_of(1), key_of("none")]) == [DELETE_STALE] * 2
    pinned = client.pin(old, [key_of(1), key_of("none")])
    assert (pinned.lease_id, list(pinned.codes), pinned.leading_run) == (0, [STALE] * 2, 0)
    assert list(client.put(old, [page]).codes) == [STALE_GENERATION]
    assert client.get(new, [key_of(1)]).codes == [HIT], "no old handle touches the new pages"


def test_batches_over_the_limit(make_daemon):
    daemon = make_daemon("limits.keys_per_call_max=4").start()
    with RawClient(daemon.url) as raw:
        opened = raw.open()
        raw.put(opened, [(key_of(1), payload_of(1))])
        lease = raw.pin(opened, [key_of(1)])
        keys, ids = [key_of(1)] * 5, [lease.lease_id] * 5
        renew = pages_pb2.RenewRequest(session_id=opened.session_id, lease_ids=ids)
        calls = {
            "Get": lambda: raw.get(opened, keys),
            "Delete": lambda: raw.delete(opened, keys),
            "Pin": lambda: raw.pin(opened, keys),
            "Renew": lambda: raw.call("Renew", renew),
            "Unpin": lambda: raw.unpin(opened, *ids),
        }
        for name, call in calls.items():
            status, kind, text = failure(call)
            assert (status, kind) == (INVALID, "LimitExceeded"), name
            assert "5 entries, the limit is 4" in text, name
        assert raw.get(opened, keys[:4]).codes == [HIT] * 4
        assert raw.status().tiers[0].pages_pinned == 1
        assert raw.unpin(opened, *ids[:2]) == [RELEASED, UNKNOWN]


# -- leases ---------------------------------------------------------------------------------------


def test_unpin_of_an_expired_lease(client):
    opened = client.open()
    client.put(opened, [(key_of(1), payload_of(1))])
    lease = client.pin(opened, [key_of(1)], ttl_ms=30)
    time.sleep(0.05)
    assert client.unpin(opened, lease.lease_id) == [EXPIRED], "also before the reaper has seen it"
    assert settled(client).pages_pinned == 0
    lease = client.pin(opened, [key_of(1)], ttl_ms=30)
    time.sleep(0.05)
    settled(client)
    assert client.unpin(opened, lease.lease_id) == [EXPIRED]


@pytest.mark.parametrize("end", ["unpin", "expiry", "session"])
def test_a_tier_full_of_pinned_pages_is_busy_until_they_are_let_go(daemon, client, end):
    size = (1 << 20) - 4096  # with its header 1 MiB: 16 fill the tier
    layout = opaque_layout(size)
    opened = client.open(layout)
    for i in range(16):
        assert list(client.put(opened, [(key_of(i), payload_of(i, size))]).codes) == [STORED]
    keys = [key_of(i) for i in range(16)]
    with RawClient(daemon.url) as second:
        holder = second.open(layout)
        lease = second.pin(holder, keys, ttl_ms=500 if end == "expiry" else 60_000)
        assert lease.leading_run == 16
        newer = (key_of("new"), payload_of("new", size))
        assert list(client.put(opened, [newer, newer]).codes) == [BUSY, BUSY]
        assert client.get(opened, keys).codes == [HIT] * 16, "nothing gave way"
        if end == "unpin":
            assert second.unpin(holder, lease.lease_id) == [RELEASED]
        elif end == "session":
            close = pages_pb2.CloseSessionRequest(session_id=holder.session_id)
            second.call("CloseSession", close)
        else:
            time.sleep(0.7)
        assert list(client.put(opened, [newer]).codes) == [STORED]
    host = settled(client)
    assert (host.pages_sealed, host.used_bytes) == (16, 16 << 20)
    assert client.get(opened, [key_of("new")]).payloads[0] == newer[1]
