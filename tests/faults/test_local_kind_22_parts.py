"""Kind 22, INT32: the parts of the local plane by themselves, with numbers up to the last that
their fields hold. Whatever is equal in its lower 32 bits, or wraps to a place in the arena, is not
taken for it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import msgpack
import numpy as np
import pytest

from kvtier.client.buffers import FlatRows
from kvtier.client.local_channel import Grant, LocalChannel, Pages
from kvtier.client.local_lease import PagesInPlace, ViewSource
from kvtier.client.local_link import LocalLink
from kvtier.client.local_reads import LocalReads
from kvtier.client.reading import GetOptions, Reader
from kvtier.client.settings import Verify
from kvtier.core.page import NO_SUM, Codec, GetCode, PageMeta, PageRef, Tier
from kvtier.errors import InvalidFrame, LimitExceeded
from kvtier.packing.checksum import payload_sum
from kvtier.tiers.memfd import create_sealed
from kvtier.transfer.local import frames
from kvtier.transfer.local.arena_view import map_arena
from kvtier.transfer.local.directory import Directory
from kvtier.transfer.local.entry import (
    encode_columns,
    encode_entries,
    encode_entry,
    entry_fits,
    identities,
    key_words,
)
from kvtier.transfer.local.lookup import DirectoryView
from kvtier.transfer.planes.deadline import Deadline
from kvtier.transfer.planes.values import Hints
from tests.client.local_rig import key_of, opaque, opened_as
from tests.transfer.local.directory_parts import KERNELS, kernels_named

NUMBERS = [
    0, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 32) + 1, 1 << 48, (1 << 52) + 1,
    (1 << 63) - 1, 1 << 63, (1 << 64) - 1,
]  # fmt: skip
LENGTHS = [(1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 32) + 1, (1 << 48) - 1]
NAMESPACE, SHARD, GENERATION = (1 << 32) - 1, (1 << 16) - 1, 5
BOOT, NBYTES = 77, 8192
LAYOUT = opaque(NBYTES)
ARENA_BYTES = 5 << 30
#: Of an arena of 5 GiB, its number of 4 KiB.
FAR = (1 << 20) + 7
OPENED = opened_as(NAMESPACE, boot_id=BOOT, generation=GENERATION, nbytes=NBYTES)


def payload(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, NBYTES, np.uint8)


def entry(number: int, slot: int, generation: int, *, length: int = NBYTES, shard: int = 0):
    """That of page `number`, with the sum of `payload`."""
    made = payload_sum(
        payload(number).data,
        key=key_of(number),
        fingerprint=OPENED.fingerprint,
        namespace_generation=GENERATION,
        shard=0,
        codec=Codec.RAW,
        length=NBYTES,
    )
    meta = PageMeta(
        key=key_of(number), length=length, codec=Codec.RAW, payload_sum=made, origin_sum=NO_SUM
    )
    ref = PageRef(BOOT, Tier.HOST, slot, generation)
    return encode_entry(ref, meta, namespace=NAMESPACE, shard=shard)


@pytest.fixture(params=KERNELS)
def directory(request) -> Iterator[Directory]:
    kernels = kernels_named(request.param)
    with Directory(
        pages_max=64, namespaces_max=4, boot_id=BOOT, hash_seed=1, kernels=kernels
    ) as made:
        made.set_namespace(NAMESPACE, GENERATION)
        yield made


def view_of(directory: Directory) -> DirectoryView:
    return DirectoryView(directory.fd, boot_id=BOOT, kernels=kernels_named(directory.kernels))


@pytest.mark.parametrize("by_columns", [False, True])
def test_kind_22_int32_entries_hold_every_number_whole(directory, by_columns):
    count = len(NUMBERS)
    lengths = (LENGTHS * 2)[:count]
    generations = NUMBERS[::-1]
    keys = [key_of(number) for number in range(count)]
    if by_columns:
        rows = encode_columns(
            key_words(keys).reshape(-1, 4),
            namespace=np.full(count, NAMESPACE, np.uint32),
            shard=np.full(count, SHARD, np.uint16),
            tier=Tier.HOST,
            generation=np.array(generations, np.uint64),
            slot=np.array(NUMBERS, np.uint64),
            length=np.array(lengths, np.uint64),
            codec=np.full(count, Codec.FP8, np.uint8),
            lossy=np.ones(count, np.uint8),
        )
    else:
        rows = encode_entries(
            [
                entry(number, slot, generation, length=length, shard=SHARD)
                for number, (slot, generation, length) in enumerate(
                    zip(NUMBERS, generations, lengths, strict=True)
                )
            ]
        )
    assert directory.put_many(rows).all()
    with view_of(directory) as view:
        found = view.lookup(keys, namespace=NAMESPACE, shard=SHARD)
        assert found.hits.all()
        assert found.slots.tolist() == NUMBERS
        assert found.generations.tolist() == generations
        assert found.lengths.tolist() == lengths
        assert set(found.codecs.tolist()) == {Codec.FP8 if by_columns else Codec.RAW}
        assert found.lossy.tolist() == [int(by_columns)] * count
        assert view.recheck(found).all()
        # Nothing of it is a page in an arena of 32 TiB but what lies there.
        fits = entry_fits(found.entries, 1 << 45)
        inside = [slot * 4096 + 4096 + length <= 1 << 45
                  for slot, length in zip(NUMBERS, lengths, strict=True)]  # fmt: skip
        assert fits.tolist() == ([False] * count if by_columns else inside)
        assert sum(inside) == 5


@pytest.mark.parametrize("high", [1 << 31, 1 << 32, 1 << 48, 1 << 63])
def test_kind_22_int32_entries_differ_by_high_bits_alone(directory, high):
    """Of generation or slot: it is another entry."""
    directory.put_many(encode_entries([entry(1, 3, 9)]))
    with view_of(directory) as view:
        found = view.lookup([key_of(1)], namespace=NAMESPACE, shard=0)
        for slot, generation in ((3, 9 + high), (3 + high, 9)):
            directory.put_many(encode_entries([entry(1, slot, generation)]))
            assert not view.recheck(found).any()
            stale = identities(
                [key_of(1)], namespaces=NAMESPACE, shards=0, generations=generation ^ high
            )
            assert not directory.remove_many(stale).any()
        directory.put_many(encode_entries([entry(1, 3, 9)]))
        assert view.recheck(found).all()
        assert view.namespace_is_current(NAMESPACE, GENERATION)
        assert not view.namespace_is_current(NAMESPACE, GENERATION + high)
        assert not view.namespace_is_current(NAMESPACE + high, GENERATION)
        with pytest.raises(LimitExceeded):
            view.lookup([key_of(1)], namespace=NAMESPACE + high, shard=0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"length": 1 << 48},
        {"length": 1 << 64},
        {"slot": 1 << 64},
        {"generation": 1 << 64},
        {"shard": 1 << 16},
    ],
)
def test_kind_22_int32_entries_do_not_cut_numbers(wrong):
    with pytest.raises(LimitExceeded, match="does not fit its field"):
        entry(1, **{"slot": 3, "generation": 9, **wrong})


class Rig:
    """What a client has, over an arena of 5 GiB without memory; owner of both."""

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self.fd = create_sealed("kvtier-arena", ARENA_BYTES, tier=Tier.HOST)
        self.ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ends[0].setblocking(False)
        self.arena = map_arena(self.fd, ARENA_BYTES, writable=True)
        self.link = LocalLink(self.ends[0], self.arena, view_of(directory))
        self.reads = LocalReads(self.link, lambda: None, lambda: None)

    def write(self, number: int, slot: int) -> None:
        os.pwrite(self.fd, payload(number).data, (slot + 1) * 4096)

    def get(self, numbers: range) -> tuple[list[int], list[int], np.ndarray]:
        """(codes, indices left to the daemon, bytes)"""
        out = np.zeros((len(numbers), NBYTES), np.uint8)
        keys = [key_of(number) for number in numbers]
        rows = FlatRows(out.reshape(-1).data, NBYTES)
        reader = Reader(LAYOUT, keys, rows, verify=Verify.ALWAYS)
        options = GetOptions(accept=(Codec.RAW,), lossy_ok=False, hints=Hints())
        steps = self.reads.get(reader, options, OPENED, Deadline.after(10))
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return list(reader.codes), end.value, out

    def close(self) -> None:
        self.link.close()
        self.ends[1].close()
        os.close(self.fd)
        del self.arena, self.link, self.reads  # pytest keeps what it gave


@pytest.fixture
def rig(directory: Directory) -> Iterator[Rig]:
    made = Rig(directory)
    yield made
    made.close()


#: (where the bytes of pages 1, 2, ... lie, what their entries say: slot, length)
PLACES = [
    (FAR, FAR, NBYTES),
    (11, 11 + (1 << 20), NBYTES),  # 4 GiB off, in the arena
    (20, 20 + (1 << 52), NBYTES),  # the same byte, modulo 2**64
    (30, 30 + (1 << 51), NBYTES),
    (40, 40 + (1 << 32), NBYTES),
    (50, 50, NBYTES + (1 << 32)),
    ((5 << 18) - 3, (5 << 18) - 3, NBYTES),  # the last of the arena
    ((5 << 18) - 3, (5 << 18) - 2, NBYTES),
]
IN_REACH = [1, 7]


def test_kind_22_int32_gets_follow_no_place_that_wraps(rig):
    for number, (at, slot, length) in enumerate(PLACES, 1):
        rig.write(number, at)
        made = entry(number, slot, (1 << 40) + number, length=length)
        assert rig.directory.put_many(encode_entries([made])).all()
    rig.write(7, (5 << 18) - 3)  # page 8 says that it lies behind that, half outside
    numbers = range(1, len(PLACES) + 1)
    codes, left, out = rig.get(numbers)
    assert [at + 1 for at, code in enumerate(codes) if code == GetCode.HIT] == IN_REACH
    assert [at + 1 for at in left] == [number for number in numbers if number not in IN_REACH]
    for number in IN_REACH:
        assert np.array_equal(out[number - 1], payload(number))
    # Page 2's place has other bytes; the others were not followed at all.
    assert (rig.reads.counts.hits, rig.reads.counts.sums_failed) == (2, 1)
    keys = [key_of(number) for number in numbers]
    found = PagesInPlace(rig.reads, LAYOUT, OPENED, keys=keys, lossy_ok=False)
    views = {number: found.sources[number - 1] is ViewSource.IN_PLACE for number in numbers}
    assert [number for number in numbers if views[number]] == [1, 2, 7]
    whole = dict(pair for part in found.sums() for pair in part)
    assert whole == {0: True, 1: False, 6: True}
    assert found.views[0] == payload(1).data
    del found


PAGES = Pages(
    session_id=1, namespace=NAMESPACE, shard=0, length=NBYTES, session="", ttl_ms=0, priority=0
)


@pytest.mark.parametrize(
    "slot", [FAR, (5 << 18) - 3, (5 << 18) - 2, 1 << 32, FAR + (1 << 51), 3 + (1 << 52), 1 << 63]
)
def test_kind_22_int32_grants_lie_in_the_arena(slot):
    """A slot beyond 4 GiB is written to there, and one outside is refused, wherever it wraps to."""
    fd = create_sealed("kvtier-arena", ARENA_BYTES, tier=Tier.HOST)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = LocalChannel(ours, map_arena(fd, ARENA_BYTES, writable=True), BOOT)
    generation = (1 << 64) - 1
    try:
        number = channel.send(PAGES, Deadline.after(5), wanted=1)
        answer = frames.Written(
            number=number,
            codes=b"",
            slots=slot.to_bytes(8, "little"),
            generations=generation.to_bytes(8, "little"),
            grant_ms=10_000,
            follows=0,
        )
        theirs.send(frames.encode(answer))
        if slot * 4096 + 4096 + NBYTES > ARENA_BYTES:
            with pytest.raises(InvalidFrame, match=f"slot {slot} lies behind the arena"):
                channel.receive(Deadline.after(5))
            assert not channel.holds
            return
        channel.receive(Deadline.after(5))
        (grant,) = channel.take(NBYTES, 9)
        assert (grant.slot, grant.generation) == (slot, generation)
        place = int(channel.targets([grant], NBYTES)[0]) - channel._address
        assert place == (slot + 1) * 4096 > 1 << 32
        short = NBYTES - 1
        channel._arena[place : place + NBYTES] = 0xEE
        again = channel.targets([Grant(slot, generation, 0.0)], short)
        assert again.tolist() == [channel._address + place]
        assert os.pread(fd, NBYTES, place) == b"\xee" * short + b"\0"
        assert os.lseek(fd, 0, os.SEEK_DATA) > place - (64 << 10)
    finally:
        channel.close()
        theirs.close()
        os.close(fd)
        del channel


def test_kind_22_int32_frames_cut_no_number():
    """Each number of a WRITE comes as it was sent, or not at all."""
    most = {
        "number": (1 << 63) - 1,
        "session_id": (1 << 64) - 1,
        "namespace": (1 << 32) - 1,
        "shard": (1 << 16) - 1,
        "length": 1 << 48,
        "ttl_ms": (1 << 63) - 1,
        "priority": (1 << 31) - 1,
    }
    empty = dict.fromkeys(("keys", "parents", "depths", "sums", "generations", "known"), b"")
    frame = frames.Write(**most, **empty, session="", returned=b"", wanted=0)
    assert frames.decode(frames.encode(frame)) == frame
    fields = msgpack.unpackb(frames.encode(frame))
    for name, value in most.items():
        for fewer in ((1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 47):
            if fewer <= value:
                found = frames.decode(msgpack.packb({**fields, name: fewer}))
                assert getattr(found, name) == fewer
        for more in (value + 1, (1 << 64) - 1, -1 - (1 << 31)):
            if more <= value and name == "session_id":
                continue
            if more >> 64 == 0 or more < 0:
                with pytest.raises(InvalidFrame):
                    frames.decode(msgpack.packb({**fields, name: more}))
