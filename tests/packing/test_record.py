"""The header block: what is written comes back, and any damage is found and named."""

from __future__ import annotations

import dataclasses
import struct
import textwrap
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from packing_samples import header

from kvtier.core.page import NO_SUM, Codec, PageRef, Tier
from kvtier.errors import CorruptRecord, KeyLengthError, LimitExceeded
from kvtier.packing import record
from kvtier.packing.checksum import header_sum
from kvtier.packing.record import (
    HEADER_BYTES,
    RECORD_VERSION,
    RecordHeader,
    decode_header,
    encode_header,
    record_bytes,
)

GOLDEN = Path(__file__).parent.parent / "golden" / "record_v1.hex"


def resealed(block: bytes | bytearray) -> bytes:
    """The block with a right header_sum, as a writer with a fault of its own would leave it."""
    return bytes(block[:4088]) + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(block[:4088])))


def patched(offset: int, data: bytes) -> bytes:
    block = bytearray(encode_header(header()))
    block[offset : offset + len(data)] = data
    return bytes(block)


def test_golden_bytes():
    """These bytes lie on disks: a difference means a new RECORD_VERSION, not a new file."""
    golden = bytes.fromhex(GOLDEN.read_text())
    assert len(golden) == HEADER_BYTES
    assert encode_header(header()) == golden
    assert decode_header(golden) == header()


def test_the_diagram_is_right():
    block, h = encode_header(header()), header()
    at = {
        0: b"\x89KVTREC\n",
        8: struct.pack("<II", 1, 4096),
        16: h.fingerprint,
        48: h.key,
        80: h.parent,
        112: h.payload_sum,
        128: h.origin_sum,
        144: struct.pack("<QQ", h.namespace_generation, h.length),
        160: struct.pack("<QQQQ", h.boot_id, h.generation, h.sequence, h.slot),
        192: struct.pack("<QQ", h.created_ms, h.ttl_ms),
        208: struct.pack("<IIi", h.shard, h.depth, h.priority),
        220: struct.pack("<HHHH", 2, 3, 3, 9),
        228: bytes(4),
        232: "séance-1".encode().ljust(256, b"\0"),
        488: bytes(3600),
        4088: struct.pack("<Q", xxhash.xxh3_64_intdigest(block[:4088])),
    }
    assert sum(map(len, at.values())) == HEADER_BYTES == len(block)
    for offset, data in at.items():
        assert block[offset : offset + len(data)] == data, offset


u64, u32 = st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1)
sums, hashes = st.binary(min_size=16, max_size=16), st.binary(min_size=32, max_size=32)


@given(
    st.builds(
        RecordHeader,
        fingerprint=hashes,
        namespace_generation=u64,
        shard=u32,
        key=hashes,
        length=u64,
        codec=st.sampled_from(Codec),
        lossy=st.booleans(),
        payload_sum=sums,
        origin_sum=sums,
        generation=u64,
        sequence=u64,
        tier=st.sampled_from(Tier),
        slot=u64,
        parent=st.one_of(st.just(b""), st.just(bytes(32)), hashes),
        depth=u32,
        session=st.text(max_size=64),
        ttl_ms=u64,
        priority=st.integers(-(2**31), 2**31 - 1),
        boot_id=u64,
        created_ms=u64,
    )
)
def test_round_trip(written):
    block = encode_header(written)
    read = decode_header(block)
    assert read == written
    assert encode_header(read) == block
    assert read.ref == PageRef(written.boot_id, written.tier, written.slot, written.generation)
    assert type(read.codec) is Codec
    assert type(read.tier) is Tier


def test_every_field_is_written():
    base = encode_header(header())
    other = RecordHeader(
        fingerprint=bytes(32),
        namespace_generation=1,
        shard=1,
        key=bytes(32),
        length=1,
        codec=Codec.RAW,
        lossy=False,
        payload_sum=bytes(16),
        origin_sum=NO_SUM,
        generation=1,
        sequence=1,
        tier=Tier.HOST,
        slot=1,
        parent=b"",
        depth=1,
        session="other",
        ttl_ms=1,
        priority=1,
        boot_id=1,
        created_ms=1,
    )
    for field in dataclasses.fields(RecordHeader):
        changed = header(**{field.name: getattr(other, field.name)})
        assert encode_header(changed) != base, field.name
        assert decode_header(encode_header(changed)) == changed


def test_any_flipped_bit_is_found():
    block = bytearray(encode_header(header()))
    for bit in range(HEADER_BYTES * 8):
        block[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptRecord):
            decode_header(block)
        block[bit // 8] ^= 1 << bit % 8
    assert decode_header(block) == header()


@pytest.mark.parametrize("length", [0, 1, 8, 16, 488, 4088, 4095])
def test_a_short_buffer(length):
    with pytest.raises(CorruptRecord, match=f"cut off: {length} of 4096"):
        decode_header(encode_header(header())[:length])


def test_what_follows_the_header_does_not_matter():
    assert decode_header(encode_header(header()) + b"payload") == header()


@pytest.mark.parametrize("fill", [0x00, 0xA5, 0xFF])
def test_no_record(fill):
    with pytest.raises(CorruptRecord, match="no record here"):
        decode_header(bytes([fill]) * HEADER_BYTES)


@pytest.mark.parametrize("version", [0, 2, 2**32 - 1])
def test_another_version_is_refused_by_name(version):
    block = resealed(patched(8, struct.pack("<I", version)))
    with pytest.raises(CorruptRecord, match=f"record version {version}; this build reads version"):
        decode_header(block)
    assert RECORD_VERSION == 1


@pytest.mark.parametrize(
    ("offset", "data", "named"),
    [
        (12, struct.pack("<I", 8192), "header bytes 8192"),
        (220, struct.pack("<H", 0), "codec 0 or tier 3"),
        (220, struct.pack("<H", 3), "codec 3 or tier 3"),
        (222, struct.pack("<H", 5), "codec 2 or tier 5"),
        (224, struct.pack("<H", 7), "flags 0x0007"),
        (224, struct.pack("<H", 1), "a parent without its flag"),
        (226, struct.pack("<H", 257), "a session of 257 bytes"),
        (233, b"\xff", "the session is not UTF-8"),
    ],
)
def test_fields_that_make_no_sense_are_named_although_the_sum_is_right(offset, data, named):
    with pytest.raises(CorruptRecord, match=named):
        decode_header(resealed(patched(offset, data)))
    with pytest.raises(CorruptRecord, match="header_sum is"):
        decode_header(patched(offset, data))


def test_the_source_may_be_memory_that_changes():
    block = bytearray(encode_header(header()))
    read = decode_header(memoryview(block))
    block[:] = bytes(HEADER_BYTES)
    assert read == header()


def test_fields_and_sum_are_of_one_copy(monkeypatch):
    """Damaged when its fields are read and whole again when it is summed: still refused."""
    good = encode_header(header())
    shared = bytearray(patched(208, struct.pack("<I", 6)))

    def repaired_then_summed(block):
        shared[:] = good
        return header_sum(block)

    monkeypatch.setattr(record, "header_sum", repaired_then_summed)
    with pytest.raises(CorruptRecord, match="header_sum is"):
        decode_header(memoryview(shared))


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"key": bytes(31)}, KeyLengthError, "key has 31"),
        ({"key": b""}, KeyLengthError, "key has 0"),
        ({"parent": bytes(33)}, KeyLengthError, "parent 33"),
        ({"session": "x" * 257}, LimitExceeded, "257 bytes"),
        ({"session": "é" * 129}, LimitExceeded, "258 bytes"),
        ({"session": "\udfff"}, LimitExceeded, "not valid Unicode"),
        ({"length": -1}, LimitExceeded, "does not fit"),
        ({"generation": 2**64}, LimitExceeded, "does not fit"),
        ({"depth": 2**32}, LimitExceeded, "does not fit"),
        ({"priority": 2**31}, LimitExceeded, "does not fit"),
    ],
)
def test_what_does_not_fit_is_refused(change, error, named):
    with pytest.raises(error, match=named) as caught:
        encode_header(header(**change))
    assert caught.value.remedy


def test_a_session_of_256_bytes_fits():
    full = header(session="é" * 128)
    assert decode_header(encode_header(full)) == full


@pytest.mark.parametrize(
    ("payload", "total"),
    [(0, 4096), (1, 8192), (4096, 8192), (4097, 12288), (2**33 + 1, 2**33 + 8192)],
)
def test_record_bytes(payload, total):
    assert record_bytes(payload) == total


def write_golden() -> None:
    """How the golden file was made; kept so that the next version can be made alike."""
    GOLDEN.write_text("\n".join(textwrap.wrap(encode_header(header()).hex(), 64)) + "\n")
