"""The frames of the local plane's control socket: golden bytes, and whatever else may come."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import InvalidFrame
from kvtier.packing.record import SESSION_BYTES_MAX
from kvtier.transfer.local.document import page
from kvtier.transfer.local.frames import (
    FRAME_BYTES_MAX,
    GRANTS_PER_FRAME_MAX,
    KEYS_PER_FRAME_MAX,
    PAGES_PER_FRAME_MAX,
    Frame,
    Hello,
    Refused,
    Used,
    Welcome,
    Write,
    Written,
    decode,
    encode,
)

GOLDEN = Path(__file__).parents[2] / "golden" / "local_frames_v1.hex"

KEYS = bytes(range(32)) + bytes(range(32, 64))
FRAMES: tuple[Frame, ...] = (
    Hello(version=1, client="pid 1", writes=0),
    Welcome(version=1, boot_id=0x0102030405060708, arena_bytes=1 << 30),
    Refused(error="LimitExceeded", message="m", remedy="r"),
    Used(
        namespace=3,
        shard=1,
        keys=KEYS,
        lookup_hits=5,
        lookup_misses=6,
        get_hits=2,
        get_misses=3,
        get_bytes=1 << 21,
    ),
    Write(
        number=7,
        session_id=2**64 - 2,
        namespace=3,
        shard=1,
        length=1 << 20,
        keys=KEYS,
        parents=bytes(32) + KEYS[:32],
        depths=(4).to_bytes(4, "little") + (5).to_bytes(4, "little"),
        sums=bytes(range(32)),
        generations=(8).to_bytes(8, "little") + (9).to_bytes(8, "little"),
        session="chat 1",
        ttl_ms=60_000,
        priority=-1,
        known=KEYS[32:],
        returned=(10).to_bytes(8, "little"),
        wanted=3,
    ),
    Written(
        number=7,
        codes=bytes([1, 2]),
        slots=(256).to_bytes(8, "little"),
        generations=(11).to_bytes(8, "little"),
        grant_ms=5000,
        follows=1,
    ),
)


def write_golden() -> None:
    """How the golden file was made; kept so that the next version can be made alike."""
    GOLDEN.write_text("".join(encode(frame).hex() + "\n" for frame in FRAMES))


def test_golden_bytes() -> None:
    golden = [bytes.fromhex(line) for line in GOLDEN.read_text().split()]
    assert [encode(frame) for frame in FRAMES] == golden
    assert tuple(decode(packet) for packet in golden) == FRAMES


def test_a_field_of_a_later_version_is_passed_over() -> None:
    fields = msgpack.unpackb(encode(FRAMES[0]))
    assert decode(msgpack.packb({**fields, "colour": "blue"})) == FRAMES[0]


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_every_field_is_needed_and_has_its_type(frame: Frame) -> None:
    fields = msgpack.unpackb(encode(frame))
    for name in fields:
        missing = {other: value for other, value in fields.items() if other != name}
        with pytest.raises(InvalidFrame, match=name):
            decode(msgpack.packb(missing))
        for wrong in (None, 1.5, True, -(2**40), 2**64 - 1, [], {}, "x" * 5000):
            if type(wrong) is type(fields[name]) and wrong not in (-(2**40), 2**64 - 1, "x" * 5000):
                continue
            if (name, wrong) == ("session_id", 2**64 - 1):
                continue  # any 64 bits
            with pytest.raises(InvalidFrame):
                decode(msgpack.packb({**fields, name: wrong}))


@pytest.mark.parametrize("length", [1, 31, 33, 32 * (KEYS_PER_FRAME_MAX + 1)])
def test_keys_of_another_length_are_refused(length: int) -> None:
    fields = msgpack.unpackb(encode(FRAMES[3]))
    with pytest.raises(InvalidFrame, match="keys"):
        decode(msgpack.packb({**fields, "keys": bytes(length)}))


def test_the_longest_frame_is_taken() -> None:
    keys = bytes(32 * KEYS_PER_FRAME_MAX)
    most = Used(
        namespace=2**32 - 1,
        shard=2**16 - 1,
        keys=keys,
        lookup_hits=2**32,
        lookup_misses=2**32,
        get_hits=2**32,
        get_misses=2**32,
        get_bytes=2**48,
    )
    assert len(encode(most)) <= FRAME_BYTES_MAX
    assert decode(encode(most)) == most


COLUMNS = {"keys": 32, "parents": 32, "depths": 4, "sums": 16, "generations": 8}


def longest_write() -> Write:
    columns = {name: bytes(PAGES_PER_FRAME_MAX * width) for name, width in COLUMNS.items()}
    return Write(
        number=2**63 - 1,
        session_id=2**64 - 1,
        namespace=2**32 - 1,
        shard=2**16 - 1,
        length=2**48,
        **columns,
        session="s" * SESSION_BYTES_MAX,
        ttl_ms=2**32,
        priority=2**31 - 1,
        known=bytes(32 * PAGES_PER_FRAME_MAX),
        returned=bytes(8 * GRANTS_PER_FRAME_MAX),
        wanted=GRANTS_PER_FRAME_MAX,
    )


def test_the_longest_write_and_its_answer_are_taken() -> None:
    answer = Written(
        number=1,
        codes=bytes(PAGES_PER_FRAME_MAX),
        slots=bytes(8 * GRANTS_PER_FRAME_MAX),
        generations=bytes(8 * GRANTS_PER_FRAME_MAX),
        grant_ms=600_000,
        follows=0,
    )
    for frame in (longest_write(), answer):
        assert len(encode(frame)) <= FRAME_BYTES_MAX
        assert decode(encode(frame)) == frame


@pytest.mark.parametrize("name", [*COLUMNS, "known", "returned", "wanted", "session"])
def test_a_write_beyond_its_bounds_is_refused(name: str) -> None:
    fields = msgpack.unpackb(encode(longest_write()))
    value = fields[name]
    more = value + 1 if name == "wanted" else value + value[:32]
    with pytest.raises(InvalidFrame, match=name):
        decode(msgpack.packb({**fields, name: more}))


@pytest.mark.parametrize("name", [*COLUMNS, "known", "returned"])
def test_a_write_with_a_part_of_a_value_is_refused(name: str) -> None:
    """The daemon cuts them without looking."""
    fields = msgpack.unpackb(encode(longest_write()))
    for wrong in (fields[name][:-1], fields[name][:1]):
        with pytest.raises(InvalidFrame, match=name):
            decode(msgpack.packb({**fields, name: wrong}))


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_of_different_lengths_are_refused(name: str) -> None:
    fields = msgpack.unpackb(encode(FRAMES[4]))
    with pytest.raises(InvalidFrame):
        decode(msgpack.packb({**fields, name: fields[name][: COLUMNS[name]]}))
    with pytest.raises(InvalidFrame):
        decode(msgpack.packb({**fields, name: fields[name][:-1]}))


def test_an_answer_has_a_generation_for_each_slot() -> None:
    fields = msgpack.unpackb(encode(FRAMES[5]))
    with pytest.raises(InvalidFrame, match="generations"):
        decode(msgpack.packb({**fields, "generations": b""}))


@pytest.mark.parametrize(
    "name", ["lookup_hits", "lookup_misses", "get_hits", "get_misses", "get_bytes"]
)
def test_nobody_claims_more_than_can_be_added_up(name: str) -> None:
    fields = msgpack.unpackb(encode(FRAMES[3]))
    most = 2**48 if name == "get_bytes" else 2**32
    decode(msgpack.packb({**fields, name: most}))
    with pytest.raises(InvalidFrame, match="too much"):
        decode(msgpack.packb({**fields, name: most + 1}))


@given(st.binary(max_size=300))
def test_random_bytes_raise_nothing_else(packet: bytes) -> None:
    with suppress(InvalidFrame):
        decode(packet)


@given(st.data())
def test_a_damaged_frame_raises_nothing_else(data: st.DataObject) -> None:
    packet = bytearray(encode(data.draw(st.sampled_from(FRAMES))))
    packet[data.draw(st.integers(0, len(packet) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with suppress(InvalidFrame):
        decode(bytes(packet))


def test_the_page_is_that_of_the_modules() -> None:
    text = (GOLDEN.parents[2] / "docs" / "local-plane.md").read_text(encoding="utf-8")
    assert text == page(), "run `make docs`"
