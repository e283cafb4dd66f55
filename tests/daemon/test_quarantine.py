"""Condemned copies as an operator sees them: listed, read as they lie, cleared."""

from __future__ import annotations

import time

import grpc
from raw_calls import PAGE_BYTES, RawClient, fails, key_of, opaque_layout, payload_of, settled
from test_corruption import flip

from kvtier.packing.record import HEADER_BYTES, decode_header, record_bytes
from kvtier.transfer.rpc import ADMIN
from kvtier.v1 import admin_pb2, page_pb2

MISS, CORRUPT = 2, 4


def listed(client: RawClient) -> list[admin_pb2.QuarantinedPage]:
    return list(
        client.call("ListQuarantine", admin_pb2.ListQuarantineRequest(), service=ADMIN).pages
    )


def ageless(pages: list[admin_pb2.QuarantinedPage]) -> list[admin_pb2.QuarantinedPage]:
    """All that does not change by itself."""
    for page in pages:
        page.ClearField("age_ms")
    return pages


def read(client: RawClient, ref: page_pb2.PageRef) -> list[bytes]:
    request = admin_pb2.ReadQuarantineRequest(ref=ref)
    return [message.data for message in client.stream("ReadQuarantine", request, service=ADMIN)]


def clear(client: RawClient, *refs: page_pb2.PageRef) -> int:
    request = admin_pb2.ClearQuarantineRequest(refs=refs)
    return client.call("ClearQuarantine", request, service=ADMIN).pages


def condemned(daemon, client: RawClient, *names: object, at: int = HEADER_BYTES + 5):
    """Puts pages, damages them in the arena, and finds out by a get."""
    opened = client.open()
    put = client.put(opened, [(key_of(name), payload_of(name)) for name in names])
    for slot in put.slots:
        flip(daemon, slot, at)
    codes = client.get(opened, [key_of(name) for name in names]).codes
    assert codes == [CORRUPT] * len(names)
    return opened, put


def test_a_condemned_copy_is_listed_and_read_as_it_lies(daemon, client):
    before = time.monotonic()
    opened, put = condemned(daemon, client, "a", "b")
    pages = listed(client)
    for page in pages:
        assert (page.device, page.reason) == (0, "failed its checks in a get")
        assert 0 < page.age_ms <= (time.monotonic() - before) * 1000 + 1
    assert [page.key for page in pages] == [key_of("a"), key_of("b")], "oldest first"
    for page, slot, generation in zip(pages, put.slots, put.generations, strict=True):
        assert (page.ref.boot_id, page.ref.tier) == (put.boot_id, page_pb2.TIER_HOST)
        assert (page.ref.slot, page.ref.generation) == (slot, generation)
        assert (page.fingerprint, page.shard) == (opened.fingerprint, 0)
        assert (page.length, page.codec) == (PAGE_BYTES, page_pb2.CODEC_RAW)
        record = b"".join(read(client, page.ref))
        assert len(record) == record_bytes(PAGE_BYTES)
        header = decode_header(record)
        assert (header.key, header.slot, header.generation) == (page.key, slot, generation)
        payload = bytearray(record[HEADER_BYTES:])
        payload[5] ^= 0x10
        assert payload == payload_of("a" if page.key == key_of("a") else "b")
    assert ageless(listed(client)) == ageless(pages), "looking changes nothing"
    assert settled(client).pages_quarantined == 2


def test_a_damaged_header_can_be_read_too(daemon, client):
    condemned(daemon, client, "a", at=100)
    (page,) = listed(client)
    assert (page.key, page.length) == (key_of("a"), PAGE_BYTES)
    assert len(b"".join(read(client, page.ref))) == record_bytes(PAGE_BYTES)


def test_records_come_in_chunks(make_daemon):
    daemon = make_daemon("limits.chunk_bytes=20000").start()
    with RawClient(daemon.url) as raw:
        condemned(daemon, raw, "a")
        (page,) = listed(raw)
        assert [len(piece) for piece in read(raw, page.ref)] == [20_000, 20_000, 20_000, 9_632]


def test_clearing_frees_the_slots_of_those_named_or_of_all(daemon, client):
    names = ["a", "b", "c", "d"]
    opened, _ = condemned(daemon, client, *names)
    pages = listed(client)
    used = client.status().tiers[0].used_bytes
    assert clear(client, pages[1].ref, pages[1].ref) == 1, "once"
    assert [page.key for page in listed(client)] == [key_of(name) for name in "acd"]
    assert clear(client, pages[1].ref) == 0, "gone already"
    assert clear(client) == 3
    assert listed(client) == []
    assert clear(client) == 0
    host = settled(client)
    assert (host.pages_quarantined, host.used_bytes) == (0, used - 4 * record_bytes(PAGE_BYTES))
    fails(lambda: read(client, pages[0].ref), grpc.StatusCode.NOT_FOUND, "UnknownHandle")
    put = client.put(opened, [(key_of(name), payload_of(name)) for name in names])
    assert list(put.codes) == [1] * 4


def test_a_ref_of_nothing_is_not_found_and_clears_nothing(daemon, client):
    opened, _ = condemned(daemon, client, "a")
    (page,) = listed(client)
    served = client.put(opened, [(key_of("b"), payload_of("b"))])
    changes = [{"boot_id": 1}, {"tier": 3}, {"tier": 99}, {"slot": 1 << 40}, {"generation": 1}]
    # A page that is served is no quarantined copy either.
    changes += [{"slot": served.slots[0], "generation": served.generations[0]}]
    for change in changes:
        other = page_pb2.PageRef()
        other.CopyFrom(page.ref)
        for name, value in change.items():
            setattr(other, name, value)
        fails(lambda ref=other: read(client, ref), grpc.StatusCode.NOT_FOUND, "UnknownHandle")
        assert clear(client, other) == 0
    assert ageless(listed(client)) == ageless([page]), (
        "refs that are unknown are not the same as none"
    )
    assert client.get(opened, [key_of("b")]).codes == [1]


def test_a_call_that_names_too_many(make_daemon):
    daemon = make_daemon("limits.keys_per_call_max=2").start()
    with RawClient(daemon.url) as raw:
        refs = [page_pb2.PageRef(slot=i) for i in range(3)]
        fails(
            lambda: clear(raw, *refs),
            grpc.StatusCode.INVALID_ARGUMENT,
            "LimitExceeded",
            "keys_per_call_max",
        )


def test_what_is_being_read_stays_and_a_reader_that_stands_still_is_cut_off(make_daemon):
    settings = ("host.bytes=64MiB", "limits.get_idle_ms=1000", "limits.chunk_bytes=32KiB")
    daemon = make_daemon(*settings).start()
    window = {"grpc.http2.bdp_probe": 0, "grpc.http2.lookahead_bytes": 1 << 16}
    with RawClient(daemon.url) as raw, RawClient(daemon.url, **window) as slow:
        length = 3 << 20  # more than a connection holds, and under 5 % of the arena
        opened = raw.open(opaque_layout(length))
        put = raw.put(opened, [(key_of("a"), payload_of("a", length))])
        flip(daemon, put.slots[0], HEADER_BYTES)
        assert raw.get(opened, [key_of("a")]).codes == [CORRUPT]
        (page,) = listed(raw)
        request = admin_pb2.ReadQuarantineRequest(ref=page.ref)
        stream = slow.stream("ReadQuarantine", request, service=ADMIN)
        deadline = time.monotonic() + 5
        while raw.status().tiers[0].pages_pinned == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert clear(raw, page.ref) == 0
        assert clear(raw) == 0
        settled(raw)
        fails(lambda: list(stream), grpc.StatusCode.DEADLINE_EXCEEDED, "DeadlineExceeded")
        assert clear(raw) == 1
