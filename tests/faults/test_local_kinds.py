"""Kinds of faults that hurt users of such caches, on the local plane: each test asserts by
`kv.local` that shared memory was used.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import kvtier
from kvtier.packing.bulk_sums import load_summer
from tests.client.local_rig import arena_fd, flip, two_segments
from tests.faults.local_crew import client, store
from tests.faults.local_roles import PAGE, PAGES
from tests.forks import daemon_of_its_own

GetCode, PutCode = kvtier.GetCode, kvtier.PutCode
HIT, MISS, CORRUPT = GetCode.HIT, GetCode.MISS, GetCode.CORRUPT
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def serving(forker):
    """A daemon of 16 MiB, some 250 pages."""
    with daemon_of_its_own(forker, "local.grant_ms=1000") as running:
        yield running


@pytest.fixture
def local(serving):
    with client(serving) as pair:
        yield pair


class SlowSummer:
    """Copies late, now and then, as one that was not scheduled in between."""

    def __init__(self, seed: int, pause_s: float, share: float = 0.5) -> None:
        self._rng = random.Random(seed)
        self._pause_s, self._share = pause_s, share
        self.copies = 0

    def copy(self, *args):
        self.copies += 1
        if self._rng.random() < self._share:
            time.sleep(self._rng.random() * self._pause_s)
        return load_summer().copy(*args)


def slowed(kv, summer) -> None:
    kv._async.link.local._standing.attached.reads.link.summer = summer


def test_kind_02_reuse_slots_while_copies_are_slow(serving):
    """Ten times as many pages as there is room, by threads of two clients that copy late: no page
    has a cell of another one."""
    wrong: list[str] = []
    with client(serving) as (kv, ns), client(serving) as (kv2, ns2):
        for seed, one in enumerate((kv, kv2)):
            slowed(one, SlowSummer(seed, 0.004))
        until = time.monotonic() + 1.5
        hits = [0] * 6

        def work(number: int) -> None:
            rng, space = random.Random(number), (ns, ns2)[number % 2]
            try:
                while time.monotonic() < until:
                    some = rng.sample(range(2500), 8)
                    store(space, some)
                    hits[number] += PAGES.get(space, some + rng.sample(range(2500), 8)).count(HIT)
            except AssertionError as error:
                wrong.append(str(error))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert wrong == []
        assert min(hits) > 0
        assert min(kv.local.puts.stored, kv2.local.puts.stored) > 100
        assert min(kv.local.counts.hits, kv2.local.counts.hits) > 100


def test_kind_02_reuse_of_the_callers_memory(serving, local):
    """It is not read any more when the put has returned, nor when it was cancelled."""
    kv, ns = local
    buffer = np.zeros((4, PAGE), np.uint8)
    for number in range(4000, 4040, 4):
        some = range(number, number + 4)
        for row, page in zip(buffer, map(PAGES.page, some), strict=True):
            row[:] = np.frombuffer(page, np.uint8)
        put = ns.put(PAGES.keys(some), buffer, chain=False)
        buffer[:] = 0xEE
        assert put.reasons == [PutCode.STORED] * 4
        assert PAGES.get(ns, some) == [HIT] * 4
    assert kv.local.puts.stored == 40

    async def cancelled() -> None:
        async with kvtier.aio.connect(serving.url, deadline=10) as far:
            space = await far.namespace(PAGES.layout)
            while not far.local.is_attached:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            far.link.local._standing.attached.reads.link.summer = SlowSummer(3, 0.01, share=1.0)
            for number in range(4100, 4160, 4):
                some = range(number, number + 4)
                for row, page in zip(buffer, map(PAGES.page, some), strict=True):
                    row[:] = np.frombuffer(page, np.uint8)
                put = asyncio.ensure_future(space.put(PAGES.keys(some), buffer, chain=False))
                await asyncio.sleep(0.002 * (number % 5))
                put.cancel()
                await asyncio.wait([put])
                buffer[:] = 0xEE
                assert set(PAGES.get(ns, some)) <= {HIT, MISS}

    asyncio.run(cancelled())


def test_kind_04_fp8(serving):
    """A packed page is no hit for who wants the page as it was, and gives way to it."""
    layout = two_segments(layers=4, heads=4, dim=64)
    with client(serving, layout=layout) as (kv, ns):
        keys = ns.keys(range(24))
        rng = np.random.default_rng(4)
        numbers = rng.standard_normal((6, layout.raw_bytes // 2)).astype(np.float32)
        pages = (numbers.view(np.uint32) >> 16).astype(np.uint16)
        broken = pages.copy()
        broken[1, 5], broken[2, 7], broken[3, 9] = 0x7FC0, 0x7F80, 0xFF80  # NaN, inf, -inf
        data = [page.tobytes() for page in broken]
        packed = ns.put(keys, data, codec=kvtier.Codec.FP8)
        assert packed.reasons == [PutCode.STORED] + [PutCode.NONFINITE] * 3 + [PutCode.STORED] * 2
        assert kv.local.puts.left == 6
        assert ns.get(keys).hits == 0
        lossy = ns.get(keys, lossy_ok=True)
        assert [item.lossy for item in lossy if item.reason is HIT] == [True] * 3
        got = np.frombuffer(lossy.pages[0], np.uint16).astype(np.uint32) << 16
        was = pages[0].astype(np.uint32) << 16
        error = np.abs(got.view(np.float32) - was.view(np.float32)).max()
        assert 0 < error < 0.5
        # By shared memory everything is stored as it is, NaN too, over the packed ones.
        assert ns.put(keys, data).reasons == [PutCode.STORED] * 6
        assert kv.local.puts.stored == 6
        before = kv.local.counts.hits
        assert ns.get(keys).pages == [bytearray(page) for page in data]
        assert kv.local.counts.hits - before == 6


@pytest.mark.parametrize("seed", [1])
def test_kind_09_bitrot(serving, local, seed):
    """One byte, anywhere in a page that was put here: never a hit, and its neighbours are."""
    kv, ns = local
    rng = random.Random(seed)
    for number in range(6000, 6012):
        put = store(ns, [number, number + 100])
        assert kv.local.puts.left == 0
        flip(serving.pid, put[0].ref.slot, rng.choice([0, PAGE - 1, rng.randrange(PAGE)]))
        assert PAGES.get(ns, [number, number + 100]) == [CORRUPT, HIT]
        assert PAGES.get(ns, [number]) == [MISS]
        assert store(ns, [number]).reasons == [PutCode.STORED]
        assert PAGES.get(ns, [number]) == [HIT]
    assert kv.local.counts.sums_failed == 12


def test_kind_09_bitrot_between_the_copy_and_the_seal(serving, local, crew):
    kv, ns = local
    mate = crew.client(serving.url, "put_held", step="copied", first=6500, count=3)
    assert mate.heard() == "there"
    fd = arena_fd(serving.pid)
    try:
        arena = os.pread(fd, 16 << 20, 0)
        place = arena.index(PAGES.page(6504)[4096:8192])
        os.pwrite(fd, b"\xff" * 64, place)
    finally:
        os.close(fd)
    mate.tell()
    assert mate.heard()["stored"] == 3
    assert sorted(PAGES.get(ns, [6503, 6504, 6505])) == [HIT, HIT, CORRUPT]
    assert kv.local.counts.sums_failed == 1
    mate.kill()


def test_kind_18_hash_of_another_page(serving, local, crew):
    """Bytes and length of a page, and another one's key or namespace: no hit. Keys and sums that
    another process made are good here."""
    kv, ns = local
    first, second = (item.ref.slot for item in store(ns, [7000, 7001]))
    fd = arena_fd(serving.pid)
    try:
        places = [(slot + 1) * 4096 for slot in (first, second)]
        contents = [os.pread(fd, PAGE, place) for place in places]
        for place, content in zip(reversed(places), contents, strict=True):
            os.pwrite(fd, content, place)
    finally:
        os.close(fd)
    assert PAGES.get(ns, [7000, 7001]) == [CORRUPT] * 2
    other = kv.namespace(PAGES.layout, tenant="other")
    assert PAGES.get(other, [7000]) == [MISS]
    mate = crew.client(serving.url, "put_held", step="answered", first=7100, count=4)
    assert mate.heard() == "there"
    before = kv.local.counts.hits
    assert PAGES.get(ns, range(7100, 7108)) == [HIT] * 8
    assert kv.local.counts.hits - before == 8
    mate.kill()


def test_kind_03_evictrace(serving, local):
    """Found, then evicted and its slot filled anew before, while, and after it is copied."""
    kv, ns = local
    with client(serving) as (_, presser):
        store(ns, range(8000, 8008)).raise_for_refused()
        assert ns.lookup(PAGES.keys(range(8000, 8008))).hits == 8
        for at in range(8100, 9300, 100):
            store(presser, range(at, at + 100))
            if at == 8200:  # in use again: they stay longer
                PAGES.get(ns, range(8000, 8008))
        assert set(PAGES.get(ns, range(8000, 8008))) <= {HIT, MISS}
        summer = SlowSummer(1, 0.1, share=1.0)
        slowed(kv, summer)
        is_over = threading.Event()

        def press() -> None:
            at = 20_000
            while not is_over.is_set():
                store(presser, range(at, at + 50))
                at += 50

        thread = threading.Thread(target=press)
        thread.start()
        try:
            codes = []
            for at in range(9280, 9300):
                codes += PAGES.get(ns, [at])
        finally:
            is_over.set()
            thread.join(30)
        assert set(codes) <= {HIT, MISS}
        assert kv.local.counts.raced + codes.count(MISS) > 0
