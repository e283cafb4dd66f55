"""The scrub's process from the inside: its rate, its messages, and what it refuses to read."""

from __future__ import annotations

import random
from pathlib import Path

import msgpack
import pytest

from kvtier.core.page import Codec, Tier
from kvtier.daemon import scrub_protocol
from kvtier.daemon.scrub_protocol import Answer, Batch, Finding, Hello, Item, Setup, decode, encode
from kvtier.daemon.scrub_worker import Checker, Pacer
from kvtier.testing.sim_clock import SimClock
from kvtier.tiers.direct_file import DirectMode

ITEM = Item(
    tier=Tier.NVME,
    slot=1 << 50,
    record_bytes=8192,
    length=100,
    generation=1 << 60,
    boot_id=0,
    key=b"k" * 32,
    fingerprint=b"f" * 32,
    namespace_generation=1 << 40,
    shard=3,
    codec=Codec.FP8,
)
SETUP = Setup(
    parent_pid=77,
    arena_fd=-1,
    arena_bytes=1 << 40,
    segment_bytes=1 << 20,
    direct=DirectMode.REQUIRED,
    bytes_per_second=1 << 20,
)
BATCH = Batch(number=5, items=(ITEM, ITEM), segments={1 << 38: Path("/a/\udcff b")})
ANSWER = Answer(
    number=5, corrupt=(Finding(1, "bad"),), io_errors=(Finding(0, "worse"),), owed_s=0.25
)
HELLO = Hello(nice=19, io_idle=False, problems=("idle I/O class: no",))
MESSAGES = [
    pytest.param(SETUP, Setup.from_wire, id="setup"),
    pytest.param(BATCH, Batch.from_wire, id="batch"),
    pytest.param(ANSWER, lambda message: Answer.from_wire(message, BATCH), id="answer"),
    pytest.param(HELLO, Hello.from_wire, id="hello"),
]


@pytest.mark.parametrize(("message", "parse"), MESSAGES)
def test_messages_come_back_as_they_were(message, parse):
    frame = encode(message.to_wire())
    assert scrub_protocol.LENGTH.unpack(frame[:4]) == (len(frame) - 4,)
    assert parse(decode(frame[4:])) == message


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("message", "parse"), MESSAGES)
def test_a_damaged_message_is_refused_or_another_good_one(message, parse, seed):
    """Bytes changed, cut or added: a ValueError and nothing else, never a value out of range."""
    chance = random.Random(seed)
    body = encode(message.to_wire())[4:]
    refused = 0
    for _ in range(500):
        damaged = bytearray(body)
        for _ in range(chance.randrange(1, 4)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        if chance.random() < 0.2:
            del damaged[chance.randrange(len(damaged)) :]
        try:
            parse(decode(bytes(damaged)))
        except ValueError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(("message", "parse"), MESSAGES)
def test_every_field_is_needed_and_has_one_type(message, parse):
    wire = message.to_wire()
    for name in wire:
        with pytest.raises(ValueError, match=r"."):
            parse({field: value for field, value in wire.items() if field != name})
        for wrong in (None, True, -77, "text", [None], b"bytes", {}):
            if type(wrong) is not type(wire[name]) or wrong == -77 or wrong == [None]:
                with pytest.raises(ValueError, match=r"."):
                    parse(wire | {name: wrong})


def test_limits_of_a_batch():
    items = [ITEM.to_wire()] * (scrub_protocol.PAGES_MAX + 1)
    with pytest.raises(ValueError, match="65 items"):
        Batch.from_wire({"number": 1, "segments": [], "items": items})
    with pytest.raises(ValueError, match="at most"):
        encode({"text": "x" * scrub_protocol.FRAME_BYTES_MAX})
    item = ITEM.to_wire()
    item[2] = 4096  # record_bytes
    with pytest.raises(ValueError, match="a record of 4096 bytes with a payload of 100"):
        Item.from_wire(item)


def test_bodies_that_are_no_map():
    for body in (b"", b"\xc1", msgpack.packb([1]), msgpack.packb({"a": 1}) + b"x"):
        with pytest.raises(ValueError, match=r"."):
            decode(body)


# -- the rate -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("read_bytes", [512, 4096, 1 << 20, 1 << 26])
def test_the_rate_is_kept(read_bytes, seed):
    """Whatever the size of a read, and however long it takes by itself."""
    clock, chance = SimClock(seed=seed), random.Random(seed)
    rate = 1 << 22
    pacer = Pacer(rate, clock=clock.monotonic, sleep=clock.sleep)
    began, count = clock.monotonic(), max(50, rate // read_bytes // 10)
    for _ in range(count):
        pacer.take(read_bytes)
        clock.advance(chance.random() * read_bytes / rate)
    clock.advance(pacer.owed_s)
    spent = clock.monotonic() - began
    assert spent == pytest.approx(count * read_bytes / rate, abs=0.06, rel=0.01)


def test_time_not_used_is_not_saved_up():
    clock = SimClock(seed=0)
    pacer = Pacer(1000, clock=clock.monotonic, sleep=clock.sleep)
    clock.advance(3600)
    pacer.take(1000)
    assert 0.9 <= pacer.owed_s <= 1.0
    before = clock.monotonic()
    pacer.take(1)
    assert 0.9 <= clock.monotonic() - before <= 1.0
    assert pacer.owed_s == 0.0


# -- what it refuses ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ({"tier": Tier.HOST}, "cannot be read here"),
        ({"tier": Tier.DEVICE}, "cannot be read here"),
        ({"slot": 255}, "leaves its segment"),
        ({"slot": 1024}, "no file is named for slab 4"),
    ],
)
def test_a_page_outside_its_tier_is_the_daemons_mistake(item, words):
    fields = {name: getattr(ITEM, name) for name in Item.__slots__} | item
    batch = Batch(number=1, items=(Item(**fields),), segments={})
    with Checker(SETUP, Pacer(1 << 20)) as checker, pytest.raises(ValueError, match=words):
        checker.check(batch)


def test_without_an_nvme_tier_none_of_its_pages_can_be_read():
    setup = Setup(
        parent_pid=1,
        arena_fd=-1,
        arena_bytes=0,
        segment_bytes=0,
        direct=DirectMode.OFF,
        bytes_per_second=1 << 20,
    )
    with Checker(setup, Pacer(1 << 20)) as checker, pytest.raises(ValueError, match="leaves"):
        checker.check(BATCH)
