"""Puts by shared memory against a real daemon: what is stored, what is left to gRPC, and what the
daemon keeps count of."""

from __future__ import annotations

import asyncio
import os
import threading
import time

import numpy as np
import pytest

import kvtier
from kvtier.client.local_puts import PutCounts
from kvtier.core.page import Tier
from kvtier.packing.record import record_bytes
from tests.client.local_puts_rig import header_of, opened, remote
from tests.client.local_rig import NBYTES, arena_fd, opaque, pages_of, separate_keys
from tests.forks import daemon_of_its_own

GetCode, PutCode = kvtier.GetCode, kvtier.PutCode
METRICS = "daemon.metrics_listen=127.0.0.1:0"
ARENA = 64 << 20


@pytest.fixture(scope="module")
def shared(forker):
    """One daemon for the tests that leave it as it was; each has a tenant of its own."""
    with daemon_of_its_own(forker, f"host.bytes={ARENA}", METRICS) as running:
        yield running


@pytest.fixture
def local(shared, request):
    with opened(shared, tenant=request.node.name[:60]) as pair:
        yield pair


def test_pages_are_stored_and_found_by_everybody(shared, local):
    kv, ns = local
    keys = ns.keys(range(50))  # a client has 18 slots at a time
    pages = pages_of(keys, NBYTES)
    put = ns.put(keys, pages)
    assert put.reasons == [PutCode.STORED] * 50
    assert kv.local.puts == PutCounts(stored=50)
    assert kv.local.not_writing == ""
    got = ns.get(keys)
    assert got.pages == [bytearray(page) for page in pages]
    assert [item.ref for item in put] == [item.ref for item in got]
    assert len({item.ref.slot for item in put}) == 50
    assert put[0].ref.tier is Tier.HOST
    with remote(shared, ns) as far:
        again = far.get(keys)
        assert again.pages == got.pages
        assert [item.ref for item in again] == [item.ref for item in put]


def test_what_is_there_is_not_copied_again(shared, local):
    kv, ns = local
    keys = ns.keys(range(40))
    pages = pages_of(keys, NBYTES)
    ns.put(keys[:20], pages[:20]).raise_for_refused()
    put = ns.put(keys, pages)
    assert put.reasons == [PutCode.EXISTS] * 20 + [PutCode.STORED] * 20
    assert [item.ref is None for item in put] == [True] * 20 + [False] * 20
    assert kv.local.puts == PutCounts(stored=40, existed=20)
    with remote(shared, ns) as far:
        more = far.keys(range(100, 104))
        far.put(more, pages_of(more, NBYTES)).raise_for_refused()
        assert ns.put(more, pages_of(more, NBYTES)).reasons == [PutCode.EXISTS] * 4
        assert far.put(keys, pages).reasons == [PutCode.EXISTS] * 40
    assert kv.local.puts == PutCounts(stored=40, existed=24)


def test_a_page_twice_in_one_batch(local):
    """The first of them counts, and no slot is kept for the others."""
    kv, ns = local
    first, second = separate_keys(ns, 0, 2)
    keys = [first, second, first, first, second]
    pages = pages_of(keys, NBYTES)
    pages[2:] ^= 0xFF
    put = ns.put(keys, pages, chain=False)
    assert put.reasons == [PutCode.STORED] * 2 + [PutCode.EXISTS] * 3
    assert ns.get([first, second]).pages == [bytearray(page) for page in pages[:2]]
    assert kv.local.puts == PutCounts(stored=2, existed=3)


def test_all_that_is_said_of_a_page_lies_in_its_record(shared, local):
    _, ns = local
    head = ns.keys([7])
    keys = ns.keys(range(3), head)
    options = {"session": "séance", "ttl": 90.0, "priority": -4}
    put = ns.put(keys, pages_of(keys, NBYTES), parent=head[0], depth=1, **options)
    assert put.stored == 3
    for i, key in enumerate(keys):
        header = header_of(shared, put[i].ref)
        assert header.key == key
        assert header.parent == (head[0] if i == 0 else keys[i - 1])
        assert header.depth == 1 + i
        assert (header.session, header.ttl_ms, header.priority) == ("séance", 90_000, -4)
        assert (header.length, header.shard, header.lossy) == (NBYTES, 0, False)
        assert header.fingerprint == ns.fingerprint
        assert (header.slot, header.generation) == (put[i].ref.slot, put[i].ref.generation)


@pytest.mark.parametrize("nbytes", [1, 4097])
def test_the_rest_of_a_slot_is_zero(shared, nbytes):
    """Slots that held other pages before: all of the arena did."""
    size = record_bytes(nbytes)
    with opened(shared, nbytes=size - 4096, tenant="old") as (kv, ns):
        count = ARENA // size
        old = np.broadcast_to(np.full(size - 4096, 0xEE, np.uint8), (count, size - 4096))
        for at in range(0, count, 1024):
            keys = [os.urandom(32) for _ in range(at, min(at + 1024, count))]
            assert ns.put(keys, old[: len(keys)], chain=False).stored == len(keys)
        assert kv.local.puts.left == 0
    with opened(shared, nbytes=nbytes, tenant="new") as (kv, ns):
        keys = separate_keys(ns, 0, 12)
        new = ns.put(keys, pages_of(keys, nbytes), chain=False)
        assert kv.local.puts.stored == 12
        with open(arena_fd(shared.pid), "rb") as arena:
            for item, page in zip(new, pages_of(keys, nbytes), strict=True):
                arena.seek(item.ref.slot * 4096 + 4096)
                assert arena.read(size - 4096) == page.tobytes().ljust(size - 4096, b"\0")
        ns.delete(keys)


def test_pages_in_every_kind_of_memory(local):
    kv, ns = local
    keys = ns.keys(range(4))
    pages = pages_of(keys, NBYTES)
    wide = np.zeros((4, 2 * NBYTES), np.uint8)
    wide[:, ::2] = pages
    apart = np.zeros((9, NBYTES), np.uint8)
    apart[[7, 0, 3, 5]] = pages
    forms = [
        (pages,),
        (pages.tobytes(),),
        ([bytes(page) for page in pages],),
        (memoryview(b"x" + pages.tobytes())[1:],),
        (wide[:, ::2],),
        (np.asfortranarray(pages),),
        (apart, [7, 0, 3, 5]),
    ]
    for number, (form, *at) in enumerate(forms, 1):
        put = ns.put(keys, form, at=at[0] if at else None)
        assert put.reasons == [PutCode.STORED] * 4
        assert ns.get(keys).pages == [bytearray(page) for page in pages]
        assert kv.local.puts == PutCounts(stored=4 * number)
        ns.delete(keys)


def test_tensors(local):
    torch = pytest.importorskip("torch")
    kv, ns = local
    keys = ns.keys(range(4))
    pool = torch.arange(8 * NBYTES, dtype=torch.int64).to(torch.uint8).reshape(8, NBYTES)
    strided = torch.stack([pool, pool], dim=2)[:, :, 1]
    for number, (form, at) in enumerate(
        [(pool[:4], None), (pool, [6, 1, 0, 3]), (strided[2:6], None)]
    ):
        assert ns.put(keys, form, at=at).reasons == [PutCode.STORED] * 4
        rows = pool[at] if at else (pool[:4] if number == 0 else pool[2:6])
        assert ns.get(keys).pages == [bytearray(row.numpy()) for row in rows]
        ns.delete(keys)
    assert kv.local.puts == PutCounts(stored=12)


def test_an_asyncio_client_puts_here_too(shared):
    async def run() -> None:
        async with kvtier.aio.connect(shared.url, deadline=10) as kv:
            ns = await kv.namespace(opaque(NBYTES), tenant="aio")
            deadline = time.monotonic() + 20
            while not kv.local.is_attached:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)
            keys = separate_keys(ns, 0, 80)
            puts = [
                ns.put(keys[at : at + 20], pages_of(keys[at : at + 20], NBYTES), chain=False)
                for at in range(0, 80, 20)
            ]
            for put in await asyncio.gather(*puts):
                assert put.reasons == [PutCode.STORED] * 20
            assert kv.local.puts == PutCounts(stored=80)
            assert (await ns.get(keys)).prefix == 80

    asyncio.run(run())


def test_threads_of_one_connection(local):
    kv, ns = local
    wrong = []

    def work(number: int) -> None:
        for turn in range(5):
            keys = separate_keys(ns, 1000 * number + 10 * turn, 10)
            pages = pages_of(keys, NBYTES)
            put = ns.put(keys, pages, chain=False)
            got = ns.get(keys)
            if put.reasons != [PutCode.STORED] * 10 or got.pages != [bytearray(p) for p in pages]:
                wrong.append((number, turn, put.reasons, got.reasons))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []
    assert kv.local.puts == PutCounts(stored=300)


def test_more_pages_than_there_is_room(local):
    """What nobody uses gives way, as for puts over gRPC."""
    kv, ns = local
    for batch in range(4):
        keys = separate_keys(ns, 1000 * batch, 400)
        pages = pages_of(keys, NBYTES)
        assert ns.put(keys, pages, chain=False).reasons == [PutCode.STORED] * 400
        got = ns.get(keys)
        assert set(got.reasons) <= {GetCode.HIT, GetCode.MISS}
        assert got.hits > 100
        for item, page, right in zip(got, got.pages, pages, strict=True):
            assert item.reason is GetCode.MISS or page == bytearray(right)
    assert kv.local.puts == PutCounts(stored=1600)
