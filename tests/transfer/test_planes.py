"""How bytes are cut into messages and put together again, and what an address means."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier import errors
from kvtier.core.page import Codec, Durability, GetCode
from kvtier.transfer import wire
from kvtier.transfer.planes.address import grpc_target
from kvtier.transfer.planes.deadline import DEADLINE_S_MAX, Deadline
from kvtier.transfer.planes.streams import CHUNK_BYTES, GetRun, put_messages
from kvtier.transfer.planes.values import Hints, OutgoingPage, PutOpening
from kvtier.v1 import transfer_pb2 as pb
from tests.seeds import seeds

SUM = bytes(range(16))


def opening(message_bytes_max=16 << 20):
    return PutOpening(
        handle=7,
        message_bytes_max=message_bytes_max,
        durability=Durability.HOST,
        hints=Hints(session="s", ttl_ms=5, priority=-1),
    )


def outgoing(datas):
    return [
        OutgoingPage(
            bytes([number % 256]) * 32,
            Codec.RAW,
            SUM,
            memoryview(data),
            parent=bytes(32),
            depth=2**31,
        )
        for number, data in enumerate(datas)
    ]


@given(
    sizes=st.lists(st.integers(1, 3000), max_size=12),
    chunk=st.sampled_from([1, 100, 128, 129, 1000, 4096, CHUNK_BYTES]),
)
def test_a_put_is_one_run_of_bytes_and_each_page_is_announced_in_time(sizes, chunk):
    rng = random.Random(1)
    datas = [rng.randbytes(size) for size in sizes]
    run, announced, room = b"", [], 0
    for number, raw in enumerate(put_messages(opening(), outgoing(datas), chunk)):
        message = wire.parse_put(raw)
        assert (message.open is not None) == (number == 0)
        if message.data:
            assert message.offset == len(run)
        assert len(message.data) <= chunk
        announced += message.pages
        room += sum(page.length for page in message.pages)
        run += message.data
        assert len(run) <= room
    assert run == b"".join(datas)
    assert [page.length for page in announced] == sizes
    assert [page.key for page in announced] == [page.key for page in outgoing(datas)]


@pytest.mark.parametrize("size", [1, 64, 1000, 5000])
def test_a_put_message_stays_under_the_limit_and_is_well_filled(size):
    limit = 8192
    datas = [bytes(size)] * 400
    lengths = [len(raw) for raw in put_messages(opening(limit), outgoing(datas))]
    assert max(lengths) <= limit
    assert min(lengths[:-1]) > limit // 2


def test_pages_are_taken_one_at_a_time():
    taken = []

    def pages():
        for page in outgoing([bytes(100)] * 10):
            taken.append(page)
            yield page

    messages = put_messages(opening(), pages(), 300)
    next(messages)
    assert len(taken) < 4


class Sink:
    def __init__(self, drop=()):
        self.drop = drop
        self.announced, self.done, self.room = {}, [], {}

    def announce(self, index, page):
        self.announced[index] = page

    def begin(self, index):
        if index in self.drop:
            return None
        self.room[index] = memoryview(bytearray(self.announced[index].length))
        return self.room[index]

    def complete(self, index):
        self.done.append(index)


def hit(length):
    return pb.GetPage(code=int(GetCode.HIT), tier=2, codec=1, length=length, payload_sum=SUM)


@pytest.mark.parametrize("seed", seeds(10, of=50))
def test_a_get_is_put_together_however_it_was_cut(seed):
    rng = random.Random(seed)
    datas = [rng.randbytes(rng.randrange(1, 500)) if rng.random() < 0.7 else None
             for _ in range(rng.randrange(1, 12))]  # fmt: skip
    drop = {n for n, data in enumerate(datas) if data and rng.random() < 0.2}
    bytes_run = b"".join(data for data in datas if data)
    pages = [hit(len(data)) if data else pb.GetPage(code=int(GetCode.MISS)) for data in datas]
    sink = Sink(drop)
    run = GetRun(sink, len(datas))
    announced = sent = 0
    while announced < len(pages) or sent < len(bytes_run):
        step = rng.randrange(1, 4)
        head = pb.GetResponse(pages=pages[announced : announced + step], offset=sent)
        announced = min(announced + step, len(pages))
        room = sum(page.length for page in pages[:announced]) - sent
        count = rng.randrange(room + 1) if announced < len(pages) else min(room, 200)
        run.feed(wire.parse_get(wire.encode_get(head, [bytes_run[sent : sent + count]])))
        sent += count
    run.finish()
    assert list(sink.announced) == list(range(len(datas))), f"seed {seed}"
    assert sink.done == [n for n, data in enumerate(datas) if data], f"seed {seed}"
    for index, room in sink.room.items():
        assert room == datas[index], f"seed {seed}, page {index}"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [pb.GetResponse(pages=[hit(4)])],
        [pb.GetResponse(pages=[hit(4)], data=b"abc")],
        [pb.GetResponse(pages=[hit(4)] * 3, data=b"abcd" * 3)],
        [pb.GetResponse(pages=[hit(4), hit(0)], data=b"abcd")],
        [pb.GetResponse(data=b"abcd")],
        [pb.GetResponse(pages=[hit(4), pb.GetPage(code=2)], data=b"abcde")],
        [pb.GetResponse(pages=[hit(4), hit(4)], data=b"abcd"), pb.GetResponse(offset=5, data=b"x")],
        [pb.GetResponse(pages=[hit(4), hit(4)], data=b"abcd"), pb.GetResponse(offset=0, data=b"x")],
    ],
)
def test_an_answer_that_breaks_the_rules(messages):
    run = GetRun(Sink(), 2)
    with pytest.raises(errors.DaemonUnavailable, match="breaks the protocol"):
        for message in messages:
            run.feed(wire.parse_get(message.SerializeToString()))
        run.finish()


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("unix:///run/kvtier/kvtier.sock", "unix:/run/kvtier/kvtier.sock"),
        ("grpc://127.0.0.1:7411", "ipv4:127.0.0.1:7411"),
        ("grpc://127.8.8.8:1", "ipv4:127.8.8.8:1"),
        ("grpc://localhost:7411", "dns:///localhost:7411"),
        ("grpc://[::1]:7411", "ipv6:[::1]:7411"),
    ],
)
def test_addresses(url, target):
    assert grpc_target(url) == target


@pytest.mark.parametrize(
    "url",
    ["", "x", "/run/x.sock", "unix:relative", "unix://host/x", "unix:///", "grpc://", "grpc://:1",
     "grpc://127.0.0.1:0", "grpc://127.0.0.1:x", "grpc://127.0.0.1:1/x", "grpc://[::1"],
)  # fmt: skip
def test_addresses_that_are_none(url):
    with pytest.raises(errors.InvalidConfigValue):
        grpc_target(url)


def test_deadlines_are_capped_and_run_out():
    now = time.monotonic()
    assert Deadline.after(1e9).at - now <= DEADLINE_S_MAX + 1
    short = Deadline.after(0.01)
    assert 0 < short.remaining() <= 0.01
    assert not short.has_passed
    time.sleep(0.02)
    assert short.has_passed
    with pytest.raises(errors.DeadlineExceeded):
        short.remaining()
