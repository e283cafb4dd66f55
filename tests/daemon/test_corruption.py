"""A flipped bit in the real arena: never delivered, condemned once, the key free for a new page."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from raw_calls import RawClient, key_of, opaque_layout, payload_of

import kvtier
from kvtier.testing.daemon_process import DaemonProcess
from kvtier.transfer.rpc import ADMIN
from kvtier.v1 import admin_pb2

HIT, MISS, CORRUPT = 1, 2, 4
SLOT_BYTES = HEADER_BYTES = 4096


def flip(daemon: DaemonProcess, slot: int, at: int) -> None:
    """Changes one bit of the daemon's arena, `at` bytes after the start of the slot."""
    arena = os.open(arena_of(daemon.pid), os.O_RDWR)
    try:
        place = slot * SLOT_BYTES + at
        byte = os.pread(arena, 1, place)
        os.pwrite(arena, bytes([byte[0] ^ 0x10]), place)
    finally:
        os.close(arena)


def arena_of(pid: int) -> Path:
    """The memfd, which any process of the daemon's user can open here."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            if os.readlink(entry).startswith("/memfd:kvtier-arena"):
                return entry
    raise AssertionError("no arena among the daemon's files")


@pytest.mark.parametrize("at", [0, 100, 4095, HEADER_BYTES, HEADER_BYTES + 65_535])
def test_a_get_never_delivers_damaged_bytes(daemon, client, at):
    opened = client.open()
    put = client.put(opened, [(key_of(i), payload_of(i)) for i in range(3)])
    flip(daemon, put.slots[1], at)
    got = client.get(opened, [key_of(i) for i in range(3)])
    assert got.codes == [HIT, CORRUPT, HIT]
    assert got.payloads == {0: payload_of(0), 2: payload_of(2)}
    assert client.get(opened, [key_of(1)]).codes == [MISS], "condemned at once"
    host = client.status().tiers[0]
    assert (host.pages_sealed, host.pages_quarantined) == (2, 1)
    assert client.status().counters["condemned"] == 1
    assert daemon.log.count("event=page.corrupt") == 1
    assert list(client.put(opened, [(key_of(1), payload_of(1))]).codes) == [1]
    assert client.get(opened, [key_of(1)]).payloads[0] == payload_of(1)


def test_verify_finds_and_condemns(daemon, client):
    opened = client.open()
    put = client.put(opened, [(key_of(i), payload_of(i)) for i in range(20)])
    flip(daemon, put.slots[3], HEADER_BYTES + 7)
    flip(daemon, put.slots[5], 50)
    last = list(client.stream("Verify", admin_pb2.VerifyRequest(tier=2), service=ADMIN))[-1]
    assert (last.pages_done, last.pages_corrupt) == (20, 2)
    codes = client.get(opened, [key_of(i) for i in range(20)]).codes
    assert [i for i, code in enumerate(codes) if code == MISS] == [3, 5]
    again = list(client.stream("Verify", admin_pb2.VerifyRequest(tier=2), service=ADMIN))[-1]
    assert (again.pages_done, again.pages_corrupt) == (18, 0)


def test_with_verify_off_the_sum_still_travels_to_the_reader(make_daemon):
    daemon = make_daemon("host.verify=off").start()
    with RawClient(daemon.url) as raw:
        opened = raw.open()
        put = raw.put(opened, [(key_of(1), payload_of(1))])
        flip(daemon, put.slots[0], HEADER_BYTES)
        got = raw.get(opened, [key_of(1)])
        assert got.codes == [HIT]
        assert got.payloads[0] != payload_of(1)
        assert len(got.pages[0].payload_sum) == 16, "which the reader compares"


def test_a_reader_that_verifies_gets_the_bytes_unread_and_has_its_doubts_judged(daemon, client):
    opened = client.open()
    put = client.put(opened, [(key_of(i), payload_of(i)) for i in range(2)])
    flip(daemon, put.slots[0], HEADER_BYTES + 9)
    flip(daemon, put.slots[1], 9)
    got = client.get(opened, [key_of(0), key_of(1)], reader_verifies=True)
    assert got.codes == [HIT, CORRUPT], "a header is always the daemon's to check"
    assert got.payloads[0] != payload_of(0)
    assert len(got.pages[0].payload_sum) == 16, "which the reader compares"
    assert client.get(opened, [key_of(0)]).codes == [CORRUPT]
    assert client.get(opened, [key_of(0)], reader_verifies=True).codes == [MISS], "condemned"


@pytest.mark.parametrize("verify", ["always", "off"])
def test_one_of_the_two_ends_has_verified_what_a_get_calls_a_hit(daemon, client, verify):
    """The client by default, which asks again when a sum is wrong; else the daemon."""
    with kvtier.connect(daemon.url, deadline=10, verify=verify, plane="grpc") as kv:
        ns = kv.namespace(opaque_layout())
        keys = [key_of(i) for i in range(3)]
        ns.put(keys, [payload_of(i) for i in range(3)]).raise_for_refused()
        flip(daemon, ns.get(keys)[1].ref.slot, HEADER_BYTES + 65_000)
        got = ns.get(keys)
        assert got.reasons == [kvtier.GetCode.HIT, kvtier.GetCode.CORRUPT, kvtier.GetCode.HIT]
        assert got.pages == [payload_of(0), None, payload_of(2)]
        assert ns.get(keys[1:2]).reasons == [kvtier.GetCode.MISS], "condemned"
    assert client.status().counters["condemned"] == 1
    assert daemon.log.count("event=page.corrupt") == 1
