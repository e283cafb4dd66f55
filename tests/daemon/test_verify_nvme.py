"""Verify and the quarantine of the NVMe tier, over a real connection."""

from __future__ import annotations

import os
import time
from pathlib import Path

from raw_calls import PAGE_BYTES, RawClient, key_of, payload_of, put_page

from kvtier.packing.record import HEADER_BYTES, decode_header, record_bytes
from kvtier.tiers.nvme_segment import SEGMENT_HEADER_BYTES
from kvtier.transfer.rpc import ADMIN
from kvtier.v1 import admin_pb2, page_pb2, transfer_pb2

NVME = 3
RECORD = record_bytes(PAGE_BYTES)


def put_durable(client: RawClient, opened, names) -> None:
    pages = [(key_of(name), payload_of(name)) for name in names]
    request = transfer_pb2.PutRequest(
        open=transfer_pb2.PutOpen(handle=opened.handle, durability=page_pb2.DURABILITY_NVME),
        pages=[put_page(opened, key, payload) for key, payload in pages],
        data=b"".join(payload for _, payload in pages),
    )
    answer = client.put_messages([request])
    assert set(answer.codes) <= {1, 2}, "stored, or there already"
    assert set(answer.reached) == {page_pb2.DURABILITY_NVME}


def records(directory: Path) -> dict[bytes, tuple[Path, int]]:
    """Where each key's record lies: a segment file, and the record's place in it."""
    found = {}
    for path in sorted(directory.glob("segment-*")):
        data = path.read_bytes()
        for at in range(SEGMENT_HEADER_BYTES, len(data) - RECORD + 1, RECORD):
            if any(data[at : at + 8]):
                found[decode_header(data[at : at + HEADER_BYTES]).key] = (path, at)
    return found


def flip(place: tuple[Path, int], at: int) -> None:
    path, start = place
    with path.open("r+b") as file:
        byte = os.pread(file.fileno(), 1, start + at)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 0x10]), start + at)


def verify(client: RawClient) -> admin_pb2.VerifyProgress:
    return list(client.stream("Verify", admin_pb2.VerifyRequest(tier=NVME), service=ADMIN))[-1]


def test_damage_on_disk_is_found_condemned_and_stays_so(make_daemon, base):
    disk = base / "disk"
    daemon = make_daemon(f"nvme.paths={disk}", "nvme.bytes=64MiB").start()
    with RawClient(daemon.url) as raw:
        opened = raw.open()
        put_durable(raw, opened, range(30))
        last = verify(raw)
        assert (last.pages_done, last.pages_total, last.pages_corrupt) == (30, 30, 0)
        assert last.bytes_done == 30 * PAGE_BYTES
        places = records(disk)
        flip(places[key_of(4)], HEADER_BYTES + 77)
        flip(places[key_of(9)], 50)
        last = verify(raw)
        assert (last.pages_done, last.pages_corrupt) == (30, 2)
        listing = raw.call("ListQuarantine", admin_pb2.ListQuarantineRequest(), service=ADMIN)
        assert {page.key for page in listing.pages} == {key_of(4), key_of(9)}
        (page,) = [page for page in listing.pages if page.key == key_of(4)]
        assert page.ref.tier == NVME
        assert listing.devices[page.device - 1] == str(disk)
        assert page.reason == "failed its checks in a scrub or verify"
        request = admin_pb2.ReadQuarantineRequest(ref=page.ref)
        stream = raw.stream("ReadQuarantine", request, service=ADMIN)
        record = b"".join(message.data for message in stream)
        damaged = bytearray(payload_of(4))
        damaged[77] ^= 0x10
        assert record[HEADER_BYTES:] == damaged
        assert decode_header(record).key == key_of(4)
        assert raw.get(opened, [key_of(4)]).payloads == {0: payload_of(4)}, "host has it"
        put_durable(raw, opened, [4, 9])  # returns when both are there again, whoever copies them
    daemon.kill()
    daemon.start()
    with RawClient(daemon.url) as raw:
        last = verify(raw)
        assert (last.pages_total, last.pages_corrupt) == (30, 0), "the condemned copies are not"


def test_a_condemned_copy_goes_down_again_by_itself(make_daemon, base):
    """It was called durable, and host memory has it."""
    disk = base / "disk"
    daemon = make_daemon(f"nvme.paths={disk}", "nvme.bytes=64MiB").start()
    with RawClient(daemon.url) as raw:
        opened = raw.open()
        put_durable(raw, opened, range(10))
        before = records(disk)
        for name in (4, 9):
            flip(before[key_of(name)], HEADER_BYTES + 77)
        assert verify(raw).pages_corrupt == 2
        limit = time.monotonic() + 30
        while (last := verify(raw)).pages_total < 10:
            assert time.monotonic() < limit
        assert (last.pages_total, last.pages_corrupt) == (10, 0)
    daemon.kill()
    daemon.start()
    with RawClient(daemon.url) as raw:
        assert verify(raw).pages_total == 10
        opened = raw.open()
        assert raw.get(opened, [key_of(4)]).payloads == {0: payload_of(4)}
