"""Every doubt of a local get, made to happen: directory and arena are ours, and change while the
get copies."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import pytest

from kvtier.client import local_get, local_link
from kvtier.client.buffers import FlatRows
from kvtier.client.local_link import LocalLink
from kvtier.client.local_reads import LocalReads
from kvtier.client.reading import GetOptions, Reader
from kvtier.client.settings import Verify
from kvtier.core.page import NO_SUM, Codec, GetCode, PageMeta, PageRef, Tier
from kvtier.packing.checksum import payload_sum
from kvtier.transfer.local.directory import Directory
from kvtier.transfer.local.entry import encode_entries, encode_entry, identities
from kvtier.transfer.local.frames import Refused, Used, decode, encode
from kvtier.transfer.local.lookup import DirectoryView
from kvtier.transfer.planes.deadline import Deadline
from kvtier.transfer.planes.values import Hints
from tests.client.local_rig import key_of, opaque, opened_as

BOOT, NUMBER, GENERATION, NBYTES = 77, 3, 5, 8192
RECORD = NBYTES + 4096
LAYOUT = opaque(NBYTES)
OPENED = opened_as(NUMBER, boot_id=BOOT, generation=GENERATION, nbytes=NBYTES)
OPTIONS = GetOptions(accept=(Codec.RAW,), lossy_ok=False, hints=Hints())


class Rig:
    """An arena of 16 slots and its directory, and the reads of a client."""

    def __init__(self) -> None:
        self.arena = np.zeros(16 * RECORD, np.uint8)
        self.directory = Directory(pages_max=64, namespaces_max=4, boot_id=BOOT, hash_seed=1)
        self.directory.set_namespace(NUMBER, GENERATION)
        self.ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ends[0].setblocking(False)
        view = DirectoryView(self.directory.fd, boot_id=BOOT)
        self.link = LocalLink(self.ends[0], self.arena, view)
        self.reads = LocalReads(self.link, lambda: None, self.ends_seen)
        self._copy = self.link.summer.copy
        self.link.summer = self  # type: ignore[assignment]
        self.meanwhile: list[Callable[[], None]] = []
        self.was_ended = False

    def ends_seen(self) -> None:
        self.was_ended = True

    # -- a summer whose copies take so long that something happens first ------------------------

    name = "test"

    def copy(self, *arguments: object) -> np.ndarray:
        if self.meanwhile:
            self.meanwhile.pop(0)()
        made: np.ndarray = self._copy(*arguments)  # type: ignore[arg-type]
        return made

    # -- the owner -----------------------------------------------------------------------------

    def payload(self, number: int, version: int) -> np.ndarray:
        return np.random.default_rng([number, version]).integers(0, 256, NBYTES, np.uint8)

    def write(self, number: int, version: int, slot: int) -> None:
        """The bytes of a page, and no word in the directory."""
        at = slot * RECORD + 4096
        self.arena[at : at + NBYTES] = self.payload(number, version)

    def list(
        self,
        number: int,
        version: int,
        slot: int,
        *,
        codec: Codec = Codec.RAW,
        lossy: bool = False,
        tier: Tier = Tier.HOST,
        length: int = NBYTES,
        has_sums: bool = True,
    ) -> None:
        made = payload_sum(
            self.payload(number, version).data,
            key=key_of(number),
            fingerprint=OPENED.fingerprint,
            namespace_generation=GENERATION,
            shard=0,
            codec=Codec.RAW,
            length=NBYTES,
        )
        meta = PageMeta(
            key=key_of(number),
            length=length,
            codec=codec,
            payload_sum=made,
            origin_sum=NO_SUM,
            lossy=lossy,
        )
        # Slots count blocks of 4,096 bytes.
        ref = PageRef(BOOT, tier, slot * RECORD // 4096, 100 * number + version)
        row = encode_entry(ref, meta, namespace=NUMBER, shard=0, has_sums=has_sums)
        self.directory.put_many(encode_entries([row]))

    def put(self, number: int, version: int, slot: int) -> None:
        self.write(number, version, slot)
        self.list(number, version, slot)

    def remove(self, number: int) -> None:
        self.directory.remove_many(identities([key_of(number)], namespaces=NUMBER, shards=0))

    # -- the client ----------------------------------------------------------------------------

    def get(self, *numbers: int) -> tuple[Reader, list[int], np.ndarray]:
        out = np.zeros((len(numbers), NBYTES), np.uint8)
        rows = FlatRows(out.reshape(-1).data, NBYTES)
        keys = [key_of(number) for number in numbers]
        reader = Reader(LAYOUT, keys, rows, verify=Verify.ALWAYS)
        return reader, self.run(reader), out

    def run(self, reader: Reader, deadline: Deadline | None = None) -> list[int]:
        steps = self.reads.get(reader, OPTIONS, OPENED, deadline or Deadline.after(10))
        self.slices = 0
        while True:
            try:
                next(steps)
            except StopIteration as end:
                left: list[int] = end.value
                return left
            self.slices += 1

    def close(self) -> None:
        self.link.close()
        self.directory.close()
        self.ends[1].close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def codes(reader: Reader) -> list[GetCode]:
    return [GetCode(code) for code in reader.codes]


def test_hits_and_misses(rig: Rig) -> None:
    rig.put(1, 1, 0)
    rig.put(2, 1, 1)
    reader, left, out = rig.get(1, 9, 2)
    assert left == []
    assert codes(reader) == [GetCode.HIT, GetCode.MISS, GetCode.HIT]
    assert np.array_equal(out[0], rig.payload(1, 1))
    assert np.array_equal(out[2], rig.payload(2, 1))
    columns = reader.columns()
    assert columns.slots == [0, 0, 3]
    assert columns.generations == [101, 0, 201]
    assert list(columns.tiers) == [Tier.HOST, 0, Tier.HOST]


def test_an_entry_that_changed_is_read_once_more(rig: Rig) -> None:
    """The page is put anew in another slot, and its old slot is given to another page, while it is
    copied."""
    rig.put(1, 1, 0)
    rig.put(2, 1, 1)
    rig.meanwhile = [lambda: (rig.put(1, 2, 5), rig.write(7, 1, 0))]
    reader, left, out = rig.get(1, 2)
    assert (codes(reader), left) == ([GetCode.HIT] * 2, [])
    assert np.array_equal(out[0], rig.payload(1, 2))
    assert np.array_equal(out[1], rig.payload(2, 1))
    counts = rig.reads.counts
    assert (counts.raced, counts.sums_failed, counts.hits, counts.left) == (1, 1, 2, 0)


def test_one_that_goes_on_changing_is_left_to_the_daemon(rig: Rig) -> None:
    rig.put(1, 1, 0)
    rig.meanwhile = [
        lambda: (rig.put(1, 2, 5), rig.write(7, 1, 0)),
        lambda: (rig.put(1, 3, 6), rig.write(8, 1, 5)),
    ]
    reader, left, _ = rig.get(1)
    assert left == [0]
    assert codes(reader) == [GetCode.UNAVAILABLE]
    assert (rig.reads.counts.raced, rig.reads.counts.left) == (2, 1)


def test_one_that_was_evicted_meanwhile_is_a_miss(rig: Rig) -> None:
    rig.put(1, 1, 0)
    rig.meanwhile = [lambda: (rig.remove(1), rig.write(7, 1, 0))]
    reader, left, _ = rig.get(1)
    assert (codes(reader), left) == ([GetCode.MISS], [])
    assert rig.reads.counts.raced == 1


def test_a_whole_copy_of_one_that_was_evicted_meanwhile_counts(rig: Rig) -> None:
    """It was there when the get began, and its bytes still were when they were copied."""
    rig.put(1, 1, 0)
    rig.meanwhile = [lambda: rig.remove(1)]
    reader, left, out = rig.get(1)
    assert (codes(reader), left) == ([GetCode.HIT], [])
    assert np.array_equal(out[0], rig.payload(1, 1))


def test_damage_under_an_unchanged_entry_is_the_daemons_to_judge(rig: Rig) -> None:
    rig.put(1, 1, 0)
    rig.put(2, 1, 1)
    rig.arena[4096 + 17] ^= 1
    reader, left, _ = rig.get(1, 2)
    assert left == [0]
    assert codes(reader) == [GetCode.UNAVAILABLE, GetCode.HIT]
    assert (rig.reads.counts.sums_failed, rig.reads.counts.raced) == (1, 0)


@pytest.mark.parametrize(
    "named",
    [
        {"codec": Codec.FP8},
        {"lossy": True},
        {"tier": Tier.NVME, "has_sums": False},
        {"has_sums": False},
        {"length": NBYTES - 1},
        {"slot": 16},
        {"slot": 2**50},
    ],
    ids=str,
)
def test_what_is_not_for_this_reader_is_left_to_the_daemon(rig: Rig, named: dict) -> None:
    rig.put(2, 1, 1)
    rig.list(1, 1, **{"slot": 0, **named})
    reader, left, _ = rig.get(1, 2)
    assert left == [0]
    assert codes(reader) == [GetCode.UNAVAILABLE, GetCode.HIT]


def test_a_namespace_that_ends_meanwhile_takes_everything_with_it(rig: Rig) -> None:
    rig.put(1, 1, 0)
    rig.meanwhile = [lambda: rig.directory.end_namespace(NUMBER)]
    reader, left, _ = rig.get(1, 9)
    assert left == [0, 1]
    assert codes(reader) == [GetCode.UNAVAILABLE] * 2
    assert rig.reads.counts.left == 2
    assert rig.reads.lookup(LAYOUT, OPENED, [key_of(1)]) is None


@pytest.mark.parametrize("how", ["the daemon is gone", "it refuses", "the directory is closed"])
def test_an_end_meanwhile_leaves_everything_to_the_daemon(rig: Rig, how: str) -> None:
    rig.put(1, 1, 0)
    rig.meanwhile = [
        {
            "the daemon is gone": rig.ends[1].close,
            "it refuses": lambda: rig.ends[1].send(b"no"),
            "the directory is closed": rig.directory.close,
        }[how]
    ]
    reader, left, _ = rig.get(1)
    assert left == [0]
    assert codes(reader) == [GetCode.UNAVAILABLE]
    assert rig.reads.lookup(LAYOUT, OPENED, [key_of(1)]) is None


def test_a_link_that_is_closed_meanwhile(rig: Rig) -> None:
    rig.put(1, 1, 0)
    rig.meanwhile = [rig.link.close]
    reader, left, _ = rig.get(1)
    assert left == [0]
    assert codes(reader) == [GetCode.UNAVAILABLE]


def test_what_the_daemon_is_too_busy_to_hear_is_dropped(rig: Rig) -> None:
    rig.put(1, 1, 0)
    shut = [rig.link.tell() for _ in range(3000) if rig.get(1)[1] == []]
    assert len(shut) == 3000, "gets go on"
    assert shut[0] is False
    assert shut[-1] is True, "something is left, for the next time"
    while rig.ends[1].recv(1 << 16, 0):
        if not rig.link.tell():
            break
    assert rig.link.untold == 0, "one page, however often, is one use"


def test_of_too_many_uses_the_newest_are_kept(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_link, "_KEYS_KEPT_MAX", 10)
    while not rig.link.note_get(NUMBER, 0, [key_of(0)], nbytes=1, misses=0) or not rig.link.tell():
        pass
    rig.link.note_get(NUMBER, 0, [key_of(n) for n in range(100)], nbytes=100, misses=7)
    assert rig.link.tell()
    assert rig.link.untold == 90
    told: list[Used] = []
    rig.ends[1].settimeout(0.2)
    with suppress(TimeoutError):
        while True:
            told.append(decode(rig.ends[1].recv(1 << 16)))
            rig.link.tell()
    assert told[-1].keys == b"".join(key_of(n) for n in range(90, 100))
    assert (told[-1].get_hits, told[-1].get_misses) == (101, 7)


def test_a_get_keeps_its_deadline_between_slices(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_get, "_SLICE_BYTES", 2 * NBYTES)
    for number in range(1, 6):
        rig.put(number, 1, number)
    reader, left, out = rig.get(1, 2, 3, 4, 5)
    assert (codes(reader), left, rig.slices) == ([GetCode.HIT] * 5, [], 3)
    reader = Reader(
        LAYOUT,
        [key_of(number) for number in range(1, 6)],
        FlatRows(out.reshape(-1).data, NBYTES),
        verify=Verify.ALWAYS,
    )
    assert rig.run(reader, Deadline(0.0)) == []
    assert codes(reader) == [GetCode.HIT] * 2 + [GetCode.TIMEOUT] * 3


def test_an_end_that_is_found_is_told(rig: Rig) -> None:
    rig.ends[1].send(encode(Refused(error="Busy", message="too many", remedy="r")))
    assert rig.get(1)[1] == [0]
    assert rig.was_ended
    assert "too many" in rig.link.farewell()
    rig.ends[1].close()
    assert rig.link.farewell() == "the daemon has ended"
