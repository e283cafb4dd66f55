"""The hand-made messages are protobuf: whatever one side builds, the other one reads, and garbage
is refused.
"""

from __future__ import annotations

import random
import resource
from contextlib import suppress
from pathlib import Path

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.errors import ChunkError
from kvtier.transfer import wire
from kvtier.v1 import transfer_pb2 as pb

GOLDEN = Path(__file__).parent.parent / "golden"
KEY = bytes(range(32))
SUM = bytes(range(16))

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
enum = st.integers(0, 127)
opens = st.builds(
    pb.PutOpen,
    handle=u64,
    durability=enum,
    session=st.text(max_size=20),
    ttl_ms=u64,
    priority=st.integers(-(2**31), 2**31 - 1),
    traceparent=st.text(max_size=60),
)
put_pages = st.builds(
    pb.PutPage,
    key=st.binary(max_size=40),
    length=u64,
    codec=enum,
    payload_sum=st.binary(max_size=16),
    origin_sum=st.binary(max_size=16),
    lossy=st.booleans(),
    parent=st.binary(max_size=32),
    depth=u32,
)
get_pages = st.builds(
    pb.GetPage,
    code=enum,
    tier=enum,
    codec=enum,
    lossy=st.booleans(),
    length=u64,
    payload_sum=st.binary(max_size=16),
    origin_sum=st.binary(max_size=16),
    slot=u64,
    generation=u64,
)
pieces = st.lists(st.binary(max_size=300), max_size=4)


@given(open_=st.none() | opens, pages=st.lists(put_pages, max_size=5), offset=u64, data=pieces)
def test_put_equals_protobuf_both_ways(open_, pages, offset, data):
    head = pb.PutRequest(open=open_, pages=pages, offset=offset)
    plain = pb.PutRequest(open=open_, pages=pages, offset=offset, data=b"".join(data))

    assert pb.PutRequest.FromString(wire.encode_put(head, data)) == plain

    message = wire.parse_put(plain.SerializeToString())
    assert message.open == open_
    assert list(message.pages) == pages
    assert message.offset == offset
    assert message.data == b"".join(data)


@given(pages=st.lists(get_pages, max_size=5), offset=u64, data=pieces)
def test_get_equals_protobuf_both_ways(pages, offset, data):
    head = pb.GetResponse(pages=pages, offset=offset)
    plain = pb.GetResponse(pages=pages, offset=offset, data=b"".join(data))

    assert pb.GetResponse.FromString(wire.encode_get(head, data)) == plain

    message = wire.parse_get(plain.SerializeToString())
    assert list(message.pages) == pages
    assert message.offset == offset
    assert message.data == b"".join(data)


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, (1 << 21) - 1, 1 << 21])
def test_every_length_of_a_length(size):
    data = random.Random(size).randbytes(size)
    raw = wire.encode_get(pb.GetResponse(offset=3), [memoryview(data)])
    assert raw == pb.GetResponse(offset=3, data=data).SerializeToString()
    assert wire.parse_get(raw).data == data


def test_the_data_is_a_view_of_what_was_received():
    raw = wire.encode_put(pb.PutRequest(offset=1), [b"x" * 1000])
    assert wire.parse_put(raw).data.obj is raw


def test_pieces_may_be_any_contiguous_buffer():
    import numpy as np

    numbers = np.arange(6, dtype=np.float32)
    raw = wire.encode_get(pb.GetResponse(), [numbers, bytearray(b"ab"), b"", memoryview(b"cd")])
    assert wire.parse_get(raw).data == numbers.tobytes() + b"abcd"


def test_fields_in_any_order_unknown_fields_and_groups_are_skipped():
    page = pb.PutPage(key=KEY, length=7).SerializeToString()
    raw = b"".join(
        [
            b"\x22\x03old",  # data, replaced by the later one
            b"\x18\x09",  # offset
            b"\xfa\x3f\x02??",  # unknown bytes, field 1023
            b"\xf8\x3f\xff\x01",  # unknown varint
            b"\xf9\x3f" + bytes(8),  # unknown fixed64
            b"\xfd\x3f" + bytes(4),  # unknown fixed32
            b"\xfb\x3f\x22\x01!\x0b\x0c\xfc\x3f",  # unknown group with a look-alike of data
            b"\x12" + bytes([len(page)]) + page,
            b"\x22\x03new",
            b"\x0a\x02\x08\x05",  # open.handle = 5
        ]
    )
    message = wire.parse_put(raw)
    plain = pb.PutRequest.FromString(raw)
    assert message.data == plain.data == b"new"
    assert message.offset == plain.offset == 9
    assert message.open == plain.open
    assert message.open is not None
    assert message.open.handle == 5
    assert list(message.pages) == list(plain.pages) == [pb.PutPage(key=KEY, length=7)]


@pytest.mark.parametrize(
    "raw",
    [
        b"\x22",  # a tag without a length
        b"\x22\x05abc",  # data cut off
        b"\x12\x05\x0a",  # page cut off
        b"\x22\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # a length near 2^64
        b"\x18" + b"\xff" * 11,  # a number that does not end
        b"\x18",
        b"\x19\x00",  # fixed64 cut off
        b"\x02\x00",  # field number 0
        b"\x0e",  # wire type 6
        b"\x0f",  # wire type 7
        b"\x0c",  # the end of no group
        b"\x0b\x14",  # the end of another group
        b"\x0b",  # a group without an end
        b"\x0b" * 200,  # groups too deep
        b"\x12\x02\x0a\x05",  # a page whose key is cut off
        b"\x0a\x04\x1a\x02\xff\xfe",  # open.session is not UTF-8
        b"\x80\x80\x80\x80\x80\x01\x00",  # a tag over 32 bits
    ],
)
def test_garbage_is_a_chunk_error(raw):
    with pytest.raises(ChunkError) as caught:
        wire.parse_put(raw)
    assert caught.value.remedy


def test_too_many_announcements_are_refused_before_they_are_parsed():
    wire.parse_put(b"\x12\x00" * wire.PAGES_PER_MESSAGE_MAX)
    with pytest.raises(ChunkError, match=f"{wire.PAGES_PER_MESSAGE_MAX + 1} pages"):
        wire.parse_put(b"\x12\x00" * (wire.PAGES_PER_MESSAGE_MAX + 1))


@pytest.mark.parametrize("seed", range(4))
def test_fuzz_random_and_mutated_messages(seed):
    """25,000 messages a seed: each is parsed as protobuf parses it, or is a ChunkError."""
    rng = random.Random(seed)
    put = pb.PutRequest(
        open=pb.PutOpen(handle=7, session="s", ttl_ms=9, priority=-1),
        pages=[pb.PutPage(key=KEY, length=64, codec=1, payload_sum=SUM, parent=KEY, depth=3)] * 3,
        offset=300,
        data=rng.randbytes(40),
    ).SerializeToString()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for round_no in range(25_000):
        if round_no % 2:
            raw = rng.randbytes(rng.randrange(48))
        else:
            mutated = bytearray(put)
            for _ in range(rng.randrange(1, 5)):
                mutated[rng.randrange(len(mutated))] = rng.randrange(256)
            raw = bytes(mutated[: rng.choice((len(mutated), rng.randrange(len(mutated))))])
        try:
            expected = pb.PutRequest.FromString(raw)
        except DecodeError:
            expected = None
        try:
            message = wire.parse_put(raw)
        except ChunkError:
            message = None
        where = f"seed {seed}, round {round_no}, {raw.hex()}"
        if expected is None:
            assert message is None, where
        if message is not None and expected is not None:
            assert message.data == expected.data, where
            assert list(message.pages) == list(expected.pages), where
            assert message.offset == expected.offset, where
        with suppress(ChunkError):
            wire.parse_get(raw)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 64 << 10, f"seed {seed}: memory grew by {grown_kib} KiB"


@settings(max_examples=300)
@given(raw=st.binary(max_size=200))
def test_what_protobuf_accepts_is_accepted(raw):
    try:
        expected = pb.GetResponse.FromString(raw)
    except DecodeError:
        with pytest.raises(ChunkError):
            wire.parse_get(raw)
        return
    message = wire.parse_get(raw)
    assert message.data == expected.data
    assert list(message.pages) == list(expected.pages)


def golden_put() -> bytes:
    head = pb.PutRequest(
        open=pb.PutOpen(
            handle=0x0102030405060708, durability=2, session="s1", ttl_ms=600_000, priority=-2
        ),
        pages=[
            pb.PutPage(key=KEY, length=5, codec=1, payload_sum=SUM),
            pb.PutPage(
                key=KEY[::-1],
                length=3,
                codec=2,
                payload_sum=SUM[::-1],
                origin_sum=SUM,
                lossy=True,
                parent=KEY,
                depth=1,
            ),
        ],
        offset=70_000,
    )
    return wire.encode_put(head, [b"\x00\x01\x02\x03\x04", b"\xa5\xa5\xa5"])


def golden_get() -> bytes:
    head = pb.GetResponse(
        pages=[
            pb.GetPage(
                code=1,
                tier=2,
                codec=1,
                length=5,
                payload_sum=SUM,
                slot=4096,
                generation=1 << 40,
            ),
            pb.GetPage(code=2),
            pb.GetPage(
                code=1, tier=3, codec=2, lossy=True, length=3, payload_sum=SUM, origin_sum=SUM
            ),
        ],
        offset=1 << 33,
    )
    return wire.encode_get(head, [b"\x00\x01\x02\x03\x04\xff\xfe\xfd"])


@pytest.mark.parametrize(("name", "made"), [("put", golden_put()), ("get", golden_get())])
def test_golden_bytes(name, made):
    assert made == (GOLDEN / f"wire_{name}.bin").read_bytes()
