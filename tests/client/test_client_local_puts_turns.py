"""Puts by shared memory that wait for each other, are cancelled, interrupted or out of bounds."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest

import kvtier
from kvtier.client import local_puts
from kvtier.core.page import GetCode, PutCode
from kvtier.testing.daemon_process import stop_process
from tests.client.local_rig import NBYTES, attached, opaque, pages_of, separate_keys
from tests.forks import ForkedDaemon

MIB = 1 << 20


@pytest.fixture
def served(process):
    """A connection that has put something by shared memory, and its namespace."""
    with kvtier.connect(process.url, deadline=20) as kv:
        ns = kv.namespace(opaque(NBYTES))
        attached(kv)
        put(ns, 0)
        assert kv.local.puts.stored == 2
        yield process, kv, ns


def put(ns, first, count=2, **options):
    keys = separate_keys(ns, first, count)
    return ns.put(keys, pages_of(keys, NBYTES), chain=False, **options)


async def is_attached(kv):
    deadline = time.monotonic() + 60
    while not kv.local.is_attached:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


# -- cancelled ------------------------------------------------------------------------------------


def test_memory_is_let_go_of_however_often_a_put_is_cancelled(process):
    """What is written to it afterwards is not in the cache."""

    async def run() -> None:
        async with kvtier.aio.connect(process.url, deadline=10) as kv:
            ns = await kv.namespace(opaque(MIB))
            await is_attached(kv)
            for trial in range(4):
                keys = [ns.keys([1000 * trial + n])[0] for n in range(40)]
                pages = np.full((40, MIB), 1, np.uint8)
                putting = asyncio.ensure_future(ns.put(keys, pages, chain=False))
                await asyncio.sleep(0.003 * trial)
                for _ in range(3):
                    putting.cancel()
                    await asyncio.sleep(0)
                with suppress(asyncio.CancelledError):
                    await putting
                pages[:] = 2
                got = await ns.get(keys)
                hits = [page for item, page in zip(got, got.pages, strict=True) if page is not None]
                assert all(page.count(1) == MIB for page in hits)
                assert all(item.reason in (GetCode.HIT, GetCode.MISS) for item in got)

    asyncio.run(run())


def test_a_cancel_ends_that_put_alone(process):
    async def run() -> None:
        async with kvtier.aio.connect(process.url, deadline=10) as kv:
            ns = await kv.namespace(opaque(NBYTES))
            await is_attached(kv)
            keys = [ns.keys([n])[0] for n in range(30)]
            pages = pages_of(keys, NBYTES)
            await ns.put(keys[:2], pages[:2], chain=False)
            stop_process(process.pid)
            first = asyncio.ensure_future(ns.put(keys[10:12], pages[10:12], chain=False))
            await asyncio.sleep(0.2)
            second = asyncio.ensure_future(ns.put(keys[20:22], pages[20:22], chain=False))
            await asyncio.sleep(0.2)
            second.cancel()
            began = time.monotonic()
            with pytest.raises(asyncio.CancelledError):
                await second
            assert time.monotonic() - began < 0.5
            assert not first.done()
            os.kill(process.pid, signal.SIGCONT)
            assert (await first).reasons == [PutCode.STORED] * 2

    asyncio.run(run())


def test_a_put_does_not_wait_for_the_applications_own_threads(process):
    async def run() -> None:
        async with kvtier.aio.connect(process.url, deadline=10) as kv:
            ns = await kv.namespace(opaque(NBYTES))
            await is_attached(kv)
            free = threading.Event()
            busy = [asyncio.ensure_future(asyncio.to_thread(free.wait, 20)) for _ in range(64)]
            keys = [ns.keys([n])[0] for n in range(2)]
            began = time.monotonic()
            done = await ns.put(keys, pages_of(keys, NBYTES), chain=False)
            assert time.monotonic() - began < 5
            assert done.reasons == [PutCode.STORED] * 2
            assert kv.local.puts.stored == 2
            free.set()
            await asyncio.gather(*busy)

    asyncio.run(run())


# -- interrupted ----------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interrupt_costs_no_later_put(served, monkeypatch, at):
    """Also where a put takes its turn and where it gives it back."""
    _, kv, ns = served
    looks = iter(range(1, 100))

    def monotonic() -> float:
        if next(looks) == at:
            monkeypatch.setattr(local_puts, "time", time)
            signal.raise_signal(signal.SIGINT)
        return time.monotonic()

    monkeypatch.setattr(local_puts, "time", SimpleNamespace(monotonic=monotonic))
    with pytest.raises(KeyboardInterrupt):
        put(ns, 100)
    before = kv.local.puts.stored
    deadline = time.monotonic() + 10
    first = 200
    while kv.local.puts.stored == before:
        assert put(ns, first).reasons == [PutCode.STORED] * 2
        assert time.monotonic() < deadline, kv.local.not_writing
        first += 2
        time.sleep(0.1)


# -- in turn --------------------------------------------------------------------------------------


def test_a_long_put_does_not_make_others_late(served):
    """Whose turn does not come goes over gRPC."""
    _, kv, ns = served
    many = separate_keys(ns, 1000, 4000)
    pool = pages_of(many[:1], NBYTES)
    ends = []

    def long() -> None:
        ends.append(ns.put(many, pool, at=[0] * len(many), chain=False))

    thread = threading.Thread(target=long)
    thread.start()
    shorter = []
    while thread.is_alive():
        shorter += put(ns, 100 + 2 * len(shorter), deadline=0.5).reasons
    thread.join()
    assert len(shorter) >= 2
    assert set(shorter) == {PutCode.STORED}
    assert ends[0].stored == 4000
    assert kv.local.puts.timed_out == 0


def test_a_stopped_daemon_costs_no_more_than_over_grpc(served):
    """Once it is known that it does not answer, nobody waits for it."""
    process, kv, ns = served
    stop_process(process.pid)
    try:
        for first in range(100, 120, 2):
            put(ns, first, deadline=0.3)
        assert "does not answer" in kv.local.not_writing
        took = []
        for first in range(200, 220, 2):
            began = time.monotonic()
            assert put(ns, first, deadline=0.3).reasons == [PutCode.UNAVAILABLE] * 2
            took.append(time.monotonic() - began)
        assert sorted(took)[5] < 0.03
    finally:
        os.kill(process.pid, signal.SIGCONT)
    deadline = time.monotonic() + 10
    before, first = kv.local.puts.stored, 300
    while kv.local.puts.stored == before:
        put(ns, first)
        assert time.monotonic() < deadline, kv.local.not_writing
        first += 2
        time.sleep(0.05)
    assert kv.local.not_writing == ""


def test_counts_outlive_an_attachment(served):
    process, kv, _ = served
    before = kv.local.puts
    process.kill()
    deadline = time.monotonic() + 10
    while kv.local.is_attached:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert kv.local.puts == before


# -- out of bounds --------------------------------------------------------------------------------


def test_very_many_known_pages(process):
    with kvtier.connect(process.url, deadline=30) as kv:
        ns = kv.namespace(opaque(1024))
        attached(kv)
        keys = separate_keys(ns, 0, 8000)
        page = np.zeros((1, 1024), np.uint8)
        assert ns.put(keys, page, at=[0] * 8000, chain=False).stored == 8000
        again = ns.put(keys * 12, page, at=[0] * 96_000, chain=False)
        assert again.counts() == {PutCode.EXISTS: 96_000}
        assert kv.local.puts.existed == 96_000
        assert kv.local.not_writing == ""


def test_a_page_that_lives_for_years(served):
    _, kv, ns = served
    before = kv.local.puts.stored
    assert put(ns, 100, ttl=1e9).reasons == [PutCode.STORED] * 2
    assert kv.local.puts.stored == before + 2


def test_two_lengths_share_what_is_granted(tmp_path, forker):
    with (
        ForkedDaemon(forker, tmp_path, "host.bytes=256MiB") as process,
        kvtier.connect(process.url, deadline=20) as kv,
    ):
        small, large = kv.namespace(opaque(MIB)), kv.namespace(opaque(4 * MIB))
        attached(kv)
        for n in range(3):
            for ns, nbytes in ((small, MIB), (large, 4 * MIB)):
                keys = separate_keys(ns, 10 * n, 3)
                ns.put(keys, pages_of(keys, nbytes), chain=False).raise_for_refused()
        assert (kv.local.puts.stored, kv.local.puts.left) == (18, 0)


def test_pages_are_not_put_under_other_weights(served, monkeypatch):
    """The namespace is bumped before the daemon sees them, and opened anew before gRPC does."""
    process, _, ns = served
    keys = separate_keys(ns, 100, 2)
    real = local_puts.LocalPut.run

    def run(self) -> None:
        with kvtier.connect(process.url, plane="grpc") as other:
            other.namespace(opaque(NBYTES)).bump()
        real(self)
        ns.reopen()

    monkeypatch.setattr(local_puts.LocalPut, "run", run)
    done = ns.put(keys, pages_of(keys, NBYTES), chain=False)
    assert done.reasons == [PutCode.STALE_GENERATION] * 2
    monkeypatch.undo()
    assert ns.get(keys).reasons == [GetCode.MISS] * 2
    assert ns.put(keys, pages_of(keys, NBYTES), chain=False).stored == 2


def test_pages_that_fill_the_arena_stay(process):
    """No room is made for more of them before there are more."""
    nbytes = 15 * MIB  # four fit
    with kvtier.connect(process.url, deadline=20) as kv:
        ns = kv.namespace(opaque(nbytes))
        attached(kv)
        for n in range(4):
            keys = separate_keys(ns, 10 * n, 4)
            pages = np.full((4, nbytes), n, np.uint8)
            assert ns.put(keys, pages, chain=False).reasons == [PutCode.STORED] * 4
            time.sleep(0.1)
            # Not by a get: it would make these pages younger than the next ones, a moment later.
            assert ns.lookup(keys).hits == 4
        assert ns.get(keys).reasons == [GetCode.HIT] * 4
        assert kv.local.puts.stored == 16
