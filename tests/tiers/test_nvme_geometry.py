"""Numbers of slots, slabs and devices; what fits under the cap; the bytes of a segment's header."""

from __future__ import annotations

import random
import re
import struct
import textwrap
from pathlib import Path

import msgpack
import pytest
import xxhash

from kvtier.errors import CorruptRecord, DirectoryError, InvalidConfigValue
from kvtier.tiers.nvme_geometry import (
    CHECKPOINT_BYTES_PER_PAGE,
    SEGMENT_BYTES_MIN,
    Geometry,
    first_segment_bytes,
    journal_bytes_max,
    load_geometry,
    plan,
    save_geometry,
    segment_file_bytes,
    slab_number,
    split_slab,
)
from kvtier.tiers.nvme_segment import (
    SEGMENT_HEADER_BYTES,
    SegmentHeader,
    decode_segment_header,
    encode_segment_header,
    segment_name,
    segment_number,
)
from kvtier.tiers.sealed_file import write_sealed

GOLDEN = Path(__file__).parent.parent / "golden" / "segment_header_v1.hex"
KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

GEOMETRY = Geometry(
    directory_id=bytes(range(16)),
    segment_bytes=4 * MIB,
    devices=((0, Path("/mnt/a")), (3, Path("/mnt/é"))),
)


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "local", "slab"),
    [(0, 0, 0), (0, 7, 7), (1, 0, 1 << 20), (15, (1 << 20) - 1, (1 << 24) - 1)],
)
def test_a_slab_is_a_device_and_a_local_number(device, local, slab):
    assert slab_number(device, local) == slab
    assert split_slab(slab) == (device, local)


def test_kind_22_int32_the_last_slot_fits_a_record_and_numpy():
    """2^24 slabs of 256 MiB: slot numbers below 2^40, bytes below 2^52, both far beyond 32 bits."""
    units = 256 * MIB // 4096
    last_slot = slab_number(15, (1 << 20) - 1) * units + units - 1
    assert last_slot == (1 << 40) - 1
    assert split_slab(last_slot // units) == (15, (1 << 20) - 1)


# -- what fits -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cap", "devices", "expected"),
    [
        (4 * MIB, 1, 256 * KIB),
        (100_000_000, 1, 6_250_000 // 4096 * 4096),
        (4 * GIB, 1, 256 * MIB),
        (64 * TIB, 1, 256 * MIB),
        (1 * MIB, 1, SEGMENT_BYTES_MIN),
        (1 * GIB, 1, 64 * MIB),
        (1 * GIB, 4, 16 * MIB),
        (64 * GIB, 16, 256 * MIB),
    ],
)
def test_the_first_segment_bytes(cap, devices, expected):
    assert first_segment_bytes(cap, devices=devices) == expected


@pytest.mark.parametrize(
    ("cap", "expected"),
    [(4 * MIB, 64 * KIB), (32 * MIB, 128 * KIB), (GIB, 4 * MIB), (TIB, 16 * MIB)],
)
def test_journal_bytes(cap, expected):
    assert journal_bytes_max(cap) == expected


def everything_bytes(cap, devices, segment_bytes, pages_max, segments):
    """All that may be on disk at once, counted anew."""
    data = devices * segments * segment_bytes
    pages = min(pages_max, data // 8192)
    headers = devices * segments * 4096
    return data + headers + 3 * CHECKPOINT_BYTES_PER_PAGE * pages + journal_bytes_max(cap)


@pytest.mark.parametrize("pages_max", [1024, 16_777_216])
@pytest.mark.parametrize("devices", [1, 2, 16])
def test_a_plan_stays_within_the_cap_and_uses_it(devices, pages_max):
    source = random.Random(7 * devices)
    for _ in range(200):
        cap = int(4 * MIB * 2 ** (source.random() * 24))
        segment_bytes = first_segment_bytes(cap, devices=devices)
        found = plan(cap, devices=devices, segment_bytes=segment_bytes, pages_max=pages_max)
        segments = found.segments_per_device
        row = devices * segment_file_bytes(segment_bytes)
        assert segments * row + found.metadata_bytes <= cap
        assert everything_bytes(cap, devices, segment_bytes, pages_max, segments) <= cap
        if segments < 1 << 20:
            more = row + 3 * CHECKPOINT_BYTES_PER_PAGE * (devices * segment_bytes // 8192 + 1)
            assert segments * row + found.metadata_bytes + more > cap, "one more would fit"


def test_a_plan_in_numbers():
    found = plan(64 * GIB, devices=2, segment_bytes=256 * MIB, pages_max=1_000_000)
    file = 256 * MIB + 4096 + 64 * KIB
    assert segment_file_bytes(256 * MIB) == file
    assert found.metadata_bytes == 240 * 1_000_000 + 3 * 16 * MIB + 256 * KIB
    assert found.segments_per_device == (64 * GIB - found.metadata_bytes) // (2 * file) == 127


def test_a_device_has_no_more_than_2_20_segments():
    found = plan(4096 * TIB, devices=1, segment_bytes=256 * MIB, pages_max=1024)
    assert found.segments_per_device == 1 << 20


@pytest.mark.parametrize(
    ("cap", "devices", "segment_bytes"),
    [(4 * MIB, 1, 4 * MIB), (4 * MIB, 16, 256 * KIB), (20 * GIB, 16, 2 * GIB), (4096, 1, 64 * KIB)],
)
def test_when_nothing_fits_the_remedy_names_a_cap_that_does(cap, devices, segment_bytes):
    with pytest.raises(InvalidConfigValue, match=rf"nvme\.bytes = {cap} bytes has no") as caught:
        plan(cap, devices=devices, segment_bytes=segment_bytes, pages_max=1 << 24)
    enough = int(re.search(r"nvme\.bytes to (\d+)MiB or more", caught.value.remedy)[1]) * MIB
    found = plan(enough, devices=devices, segment_bytes=segment_bytes, pages_max=1 << 24)
    assert found.segments_per_device >= 1
    with pytest.raises(InvalidConfigValue):
        lower = min(enough - MIB, enough * 98 // 100)
        plan(lower, devices=devices, segment_bytes=segment_bytes, pages_max=1 << 24)


# -- the geometry file -----------------------------------------------------------------------------


def test_the_geometry_comes_back(tmp_path):
    assert load_geometry(tmp_path) is None
    save_geometry(tmp_path, GEOMETRY)
    assert load_geometry(tmp_path) == GEOMETRY
    assert [path.name for path in tmp_path.iterdir()] == ["geometry"]


def document(**change):
    found = {
        "version": 1,
        "directory_id": bytes(16),
        "segment_bytes": MIB,
        "devices": [[0, "/mnt/a"]],
    }
    return {key: value for key, value in (found | change).items() if value is not None}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"version": 2}, "has version 2, this daemon knows 1"),
        ({"version": None}, "has version None"),
        ({"directory_id": bytes(15)}, "does not hold a geometry"),
        ({"directory_id": "0123456789abcdef"}, "does not hold a geometry"),
        ({"segment_bytes": None}, "does not hold a geometry"),
        ({"segment_bytes": MIB + 1}, "has segments of"),
        ({"segment_bytes": 4096}, "has segments of 4096 bytes"),
        ({"segment_bytes": -MIB}, "has segments of"),
        ({"devices": [[0, "/a"], [0, "/b"]]}, "has devices"),
        ({"devices": [[16, "/a"]]}, "has devices"),
        ({"devices": [[-1, "/a"]]}, "has devices"),
        ({"devices": [["0", "/a"]]}, "has devices"),
        ({"devices": [[0, "/a", 1]]}, "has devices"),
    ],
)
def test_another_geometry_is_refused(tmp_path, change, named):
    write_sealed(tmp_path / "geometry", b"geom", msgpack.packb(document(**change)))
    with pytest.raises(DirectoryError, match=named) as caught:
        load_geometry(tmp_path)
    assert "--discard-cache" in caught.value.remedy


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93\x01", msgpack.packb([1, 2])])
def test_a_geometry_that_is_no_map_is_refused(tmp_path, payload):
    write_sealed(tmp_path / "geometry", b"geom", payload)
    with pytest.raises(DirectoryError, match=r"cannot be read|does not hold a geometry"):
        load_geometry(tmp_path)


def test_damage_anywhere_is_found(tmp_path):
    save_geometry(tmp_path, GEOMETRY)
    whole = (tmp_path / "geometry").read_bytes()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 0x10
        (tmp_path / "geometry").write_bytes(damaged)
        with pytest.raises(DirectoryError):
            load_geometry(tmp_path)
    for cut in range(len(whole)):
        (tmp_path / "geometry").write_bytes(whole[:cut])
        with pytest.raises(DirectoryError):
            load_geometry(tmp_path)


# -- a segment's header ----------------------------------------------------------------------------


def header(**change):
    values = {"directory_id": bytes(range(100, 116)), "device": 5, "local": 70_000}
    return SegmentHeader(**({"segment_bytes": 5 << 30} | values | change))


def test_golden_bytes():
    """These bytes lie on disks: a difference means a new SEGMENT_VERSION, not a new file."""
    golden = bytes.fromhex(GOLDEN.read_text())
    assert len(golden) == SEGMENT_HEADER_BYTES
    assert encode_segment_header(header()) == golden
    assert decode_segment_header(golden) == header()


def test_the_diagram_is_right():
    block = encode_segment_header(header())
    at = {
        0: b"\x89KVTSEG\n",
        8: struct.pack("<II", 1, 4096),
        16: header().directory_id,
        32: struct.pack("<II", 5, 70_000),
        40: struct.pack("<Q", 5 << 30),
        48: bytes(4040),
        4088: struct.pack("<Q", xxhash.xxh3_64_intdigest(block[:4088])),
    }
    assert sum(map(len, at.values())) == SEGMENT_HEADER_BYTES == len(block)
    for offset, data in at.items():
        assert block[offset : offset + len(data)] == data, offset


def test_any_flipped_bit_of_a_header_is_found():
    block = encode_segment_header(header())
    for at in [*range(64), *range(64, 4088, 37), *range(4088, 4096)]:
        damaged = bytearray(block)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(CorruptRecord):
            decode_segment_header(damaged)


@pytest.mark.parametrize(
    ("at", "data", "named"),
    [
        (0, b"\x89KVTREC\n", "does not start as a segment"),
        (8, struct.pack("<I", 2), "version 2, this build knows version 1"),
        (12, struct.pack("<I", 8192), "its header has 8192 bytes"),
    ],
)
def test_a_sealed_header_of_another_kind_is_named(at, data, named):
    block = bytearray(encode_segment_header(header()))
    block[at : at + len(data)] = data
    block[4088:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(block[:4088])))
    with pytest.raises(CorruptRecord, match=named):
        decode_segment_header(block)


def test_a_header_that_is_cut_off():
    with pytest.raises(CorruptRecord, match="cut off after 4095 bytes"):
        decode_segment_header(encode_segment_header(header())[:4095])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ""),
        ({"directory_id": bytes(16)}, "it belongs to another daemon directory"),
        ({"device": 4}, "it is segment 70000 of device 4"),
        ({"local": 69_999}, "it is segment 69999 of device 5"),
        ({"segment_bytes": 4096}, "its slots take 4096 bytes, not 5368709120"),
    ],
)
def test_differences_in_words(change, words):
    assert header().difference(header(**change)) == words


def test_names():
    assert segment_name(70_000) == "segment-00070000"
    assert segment_number("segment-00070000") == 70_000
    others = ["segment-1", "segment-00070000.tmp", "segment-0007000x", "Segment-00070000"]
    others += ["segment-00070000\n", "x/segment-00070000", "segment-" + 8 * chr(0x661)]
    assert [segment_number(other) for other in others] == [None] * len(others)


def write_golden() -> None:
    """How the golden file was made; kept so that the next version can be made alike."""
    block = encode_segment_header(header()).hex()
    GOLDEN.write_text("\n".join(textwrap.wrap(block, 64)) + "\n")
