"""Handles, generations, leases and deadlines of one connection."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import torch

import kvtier
from kvtier.client import PutResult, codec_thread
from kvtier.config import DaemonConfig
from kvtier.transfer.planes.address import default_url

GetCode, PutCode, Codec = kvtier.GetCode, kvtier.PutCode, kvtier.Codec


def test_a_namespace_opened_often_has_one_handle(kv, daemon, layout, make_pages):
    keys = kv.namespace(layout).keys(range(8))
    for _ in range(50):
        assert kv.namespace(layout).put(keys, make_pages(2)).counts()
    assert len(daemon.handles) == 1


def test_each_object_reopens_by_itself(kv, daemon, layout):
    one, two = kv.namespace(layout), kv.namespace(layout)
    keys = one.keys(range(4))
    daemon.bump(one.fingerprint)
    assert one.lookup(keys).reasons == two.lookup(keys).reasons == [GetCode.STALE]
    assert one.reopen() == 2
    assert (one.is_stale, two.is_stale) == (False, True)
    assert two.lookup(keys).reasons == [GetCode.STALE]
    assert kv.namespace(layout).generation == 2
    assert two.reopen() == 2
    assert len(daemon.handles) == 2


def test_a_new_object_never_gets_a_stale_handle(kv, daemon, layout):
    kv.namespace(layout)
    daemon.bump(layout.fingerprint("default", b""))
    assert kv.namespace(layout).generation == 2
    kv.delete_namespace(layout)
    fresh = kv.namespace(layout)
    assert fresh.lookup(fresh.keys(range(4))).reasons == [GetCode.MISS]


def test_a_late_stale_answer_does_not_mark_a_reopened_namespace(daemon, layout):
    async def main():
        async with kvtier.aio.connect(daemon.url, deadline=5.0) as kv:
            ns = await kv.namespace(layout)
            keys = ns.keys(range(4))
            daemon.bump(ns.fingerprint)
            plane, entered, go = ns.link.plane, asyncio.Event(), asyncio.Event()
            lookup = plane.lookup

            async def late(*args, **options):
                found = await lookup(*args, **options)
                entered.set()
                await go.wait()
                return found

            plane.lookup = late
            slow = asyncio.create_task(ns.lookup(keys))
            await entered.wait()
            plane.lookup = lookup
            assert (await ns.lookup(keys)).reasons == [GetCode.STALE]
            assert await ns.reopen() == 2
            go.set()
            assert (await slow).reasons == [GetCode.STALE]
            assert not ns.is_stale
            assert (await ns.lookup(keys)).reasons == [GetCode.MISS]

    asyncio.run(main())


def test_bumping_back_to_the_weights_of_the_opener(kv, ns, daemon, layout):
    assert ns.bump("r2") == 2
    with pytest.raises(kvtier.NamespaceMismatch):
        ns.reopen()
    assert ns.bump("r1") == 3
    assert ns.reopen() == 3
    daemon.bump(ns.fingerprint, "r2")
    assert ns.lookup(ns.keys(range(4))).reasons == [GetCode.STALE]
    assert ns.bump("r1") == 5
    daemon.bump(ns.fingerprint, "r2")
    with pytest.raises(kvtier.NamespaceMismatch):
        kv.namespace(layout)
    assert kv.bump_namespace(layout, "r1") == 7
    assert kv.namespace(layout).generation == 7
    with pytest.raises(kvtier.UnknownNamespace):
        kv.bump_namespace(layout, tenant="nobody")


def test_a_session_survives_capabilities_that_do_not_come(daemon, layout):
    with kvtier.connect(daemon.url, deadline=0.1) as kv:
        daemon.stall.add("capabilities")
        for _ in range(2):
            kv.namespace(layout)
        daemon.stall.clear()
        ns = kv.namespace(layout, deadline=5.0)
        assert ns.generation == 1
        assert (len(daemon.sessions), len(daemon.handles)) == (1, 1)


def test_a_lease_over_a_restart_between_two_batches(ns, daemon, make_pages):
    keys = ns.keys(range(16))
    ns.put(keys, make_pages(4))
    daemon.limits["keys_per_call_max"] = 2
    daemon.boot()
    ns.lookup(keys[:1])  # the new limits
    at = {"pin": 0}

    class Restart(type(daemon.calls)):
        def __setitem__(self, name, value):
            super().__setitem__(name, value)
            if name == "pin":
                at["pin"] += 1
                if at["pin"] == 2:
                    daemon.boot()
                    daemon.leases.clear()

    daemon.calls = Restart()
    with ns.lease(keys) as held:
        assert held.reasons == [GetCode.HIT] * 4
        assert len(daemon.leases) == 2
        assert set(daemon.leases.values()) == daemon.sessions
        held.renew()


def test_a_lease_whose_session_died_and_did_not_come_back(daemon, layout, make_pages):
    daemon.limits["keys_per_call_max"] = 2
    with kvtier.connect(daemon.url, deadline=1.0) as kv:
        ns = kv.namespace(layout)
        keys = ns.keys(range(16))
        ns.put(keys, make_pages(4))

        class Restart(type(daemon.calls)):
            def __setitem__(self, name, value):
                super().__setitem__(name, value)
                if name == "pin" and value == 2:
                    daemon.boot()
                    daemon.raise_in["open"] = kvtier.DaemonUnavailable("no", remedy="none")

        daemon.calls = Restart()
        with ns.lease(keys) as held:
            assert held.reasons == [GetCode.UNAVAILABLE] * 4
            assert held.ttl == 0


def test_a_lease_tells_the_truth_after_a_restart(ns, daemon, make_pages):
    keys = ns.keys(range(8))
    ns.put(keys[:1], make_pages(1))
    with ns.lease(keys) as held:
        assert held.reasons == [GetCode.HIT, GetCode.MISS]
        daemon.boot()
        ns.lookup(keys)
        assert held.reasons == [GetCode.UNAVAILABLE, GetCode.MISS]
        assert (held.prefix, held.ttl) == (0, 0)
        with pytest.raises(kvtier.LeaseExpired):
            held.renew()
    with pytest.raises(kvtier.LeaseExpired, match="released"):
        held.renew()


def test_a_lease_is_not_held_after_its_deadline(ns, daemon, make_pages):
    keys = ns.keys(range(4))
    ns.put(keys, make_pages(1))
    with ns.lease(keys, ttl=0.05) as held:
        held.renew(30.0)
        time.sleep(0.06)
        assert (held.reasons, held.ttl) == ([GetCode.HIT], 30.0)
        held.renew(0.05)
        time.sleep(0.06)
        assert held.reasons == [GetCode.UNAVAILABLE]
        daemon.leases.clear()
        with pytest.raises(kvtier.LeaseExpired):
            held.renew()


async def until(condition):
    limit = time.monotonic() + 3
    while not condition() and time.monotonic() < limit:  # noqa: ASYNC110
        await asyncio.sleep(0.002)


def test_a_cancelled_take_leaves_no_lease(daemon, layout, make_pages):
    async def main():
        async with kvtier.aio.connect(daemon.url, deadline=5.0) as kv:
            ns = await kv.namespace(layout)
            keys = ns.keys(range(4))
            await ns.put(keys, make_pages(1))
            for cancelled_at in (0.0, 0.0005, 0.002):
                lease = ns.lease(keys)
                task = asyncio.create_task(lease.take())
                await asyncio.sleep(cancelled_at)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                if not task.cancelled():  # it was quicker
                    await lease.release()
                await until(lambda: daemon.calls["unpin"] == daemon.calls["pin"])
                assert daemon.leases == {}

    asyncio.run(main())


def test_a_cancelled_take_of_many_batches(daemon, layout, make_pages):
    daemon.limits["keys_per_call_max"] = 1

    async def main():
        async with kvtier.aio.connect(daemon.url, deadline=5.0) as kv:
            ns = await kv.namespace(layout)
            keys = ns.keys(range(80))
            await ns.put(keys, make_pages(20))
            task = asyncio.create_task(ns.lease(keys).take())
            await until(lambda: daemon.leases)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await until(lambda: daemon.calls["unpin"])
            assert daemon.leases == {}

    asyncio.run(main())


def test_the_time_in_the_queue_counts(kv, ns):
    """The loop is held up by something else."""
    keys = ns.keys(range(4))
    ns.lookup(keys)
    began = threading.Event()

    def block():
        began.set()
        time.sleep(0.3)

    kv._runner._loop.call_soon_threadsafe(block)
    began.wait()
    assert ns.get(keys, deadline=0.2).reasons == [GetCode.TIMEOUT]
    assert ns.lookup(keys).reasons == [GetCode.MISS]


def test_slow_packing_does_not_hold_up_other_calls(kv, ns, daemon, make_pages, monkeypatch):
    raw, packed = ns.keys(range(4)), ns.keys(range(4, 8))
    ns.put(raw, make_pages(1))
    encode, go = codec_thread.encode, threading.Event()

    def slow(*args):
        go.wait(5)
        return encode(*args)

    monkeypatch.setattr(codec_thread, "encode", slow)
    done = []
    page = bytearray(make_pages(1)[0])
    thread = threading.Thread(target=lambda: done.append(ns.put(packed, page, codec=Codec.FP8)))
    thread.start()
    time.sleep(0.05)
    began = time.monotonic()
    assert ns.get(raw, deadline=0.5).hits == 1
    assert time.monotonic() - began < 0.5
    began = time.monotonic()
    mine = bytearray(page)
    for _ in range(4):
        assert ns.put(packed, mine, codec=Codec.FP8, deadline=0.1).reasons == [PutCode.TIMEOUT]
    assert time.monotonic() - began < 4 * 0.12 + 0.1
    mine.append(0)  # nobody holds it any more
    assert ns.get(raw).hits == 1  # the daemon is not blamed for it
    go.set()
    thread.join()
    assert done[0].stored == 1


def test_unpacking_never_writes_after_the_call(ns, make_pages, monkeypatch):
    keys = ns.keys(range(4))
    ns.put(keys, make_pages(1), codec=Codec.FP8)
    decode, go, made = codec_thread.decode, threading.Event(), threading.Event()

    def slow(*args):
        go.wait(5)
        result = decode(*args)
        made.set()
        return result

    monkeypatch.setattr(codec_thread, "decode", slow)
    out = bytearray(1024)
    began = time.monotonic()
    assert ns.get(keys, out=out, lossy_ok=True, deadline=0.2).reasons == [GetCode.TIMEOUT]
    assert time.monotonic() - began < 0.2 * 1.2 + 0.1
    go.set()
    assert made.wait(5)
    time.sleep(0.05)
    assert out == bytes(1024)
    monkeypatch.undo()
    assert ns.get(keys, out=out, lossy_ok=True).hits == 1
    assert out != bytes(1024)


def test_closing_while_a_page_waits_to_be_packed(daemon, layout, make_pages, monkeypatch):
    encode, go = codec_thread.encode, threading.Event()

    def slow(*args):
        go.wait(5)
        return encode(*args)

    monkeypatch.setattr(codec_thread, "encode", slow)
    page = make_pages(1)[0]

    async def main():
        kv = kvtier.aio.connect(daemon.url, deadline=5.0)
        ns = await kv.namespace(layout)
        keys = ns.keys(range(8))
        puts = [
            asyncio.create_task(ns.put([key], page, codec=Codec.FP8)) for key in keys for _ in "ab"
        ]
        await asyncio.sleep(0.1)
        await kv.close()
        go.set()
        for ended in await asyncio.gather(*puts, return_exceptions=True):
            assert isinstance(ended, kvtier.ClientClosed | PutResult), repr(ended)
        with pytest.raises(kvtier.ClientClosed):
            await ns.put(keys[:1], page, codec=Codec.FP8)

    asyncio.run(main())


def test_an_fp8_page_is_lossy_whatever_the_daemon_says(ns, daemon, make_pages):
    keys = ns.keys(range(4))
    ns.put(keys, make_pages(1), codec=Codec.FP8)
    (stored,) = daemon.pages.values()
    assert stored.lossy
    assert len(stored.origin_sum) == 16
    stored.lossy = False
    assert ns.get(keys, codec=Codec.FP8, lossy_ok=False).reasons == [GetCode.MISS]
    for options in ({"codec": Codec.FP8}, {"lossy_ok": True}):
        got = ns.get(keys, **options)
        assert got.reasons == [GetCode.HIT]
        assert got[0].lossy
        assert got[0].codec is Codec.FP8


def test_many_packed_pages_in_one_message(ns, layout):
    generator = torch.Generator().manual_seed(300)
    pages = torch.randn((300, 512), generator=generator).to(torch.bfloat16)
    keys = ns.keys(range(1200))
    assert ns.put(keys, pages, codec=Codec.FP8).stored == 300
    out = torch.zeros_like(pages)
    assert ns.get(keys, out=out, lossy_ok=True).hits == 300
    assert ((out.float() - pages.float()).abs() <= 4 / 448 * 16 + pages.abs().float() / 16).all()


TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_traceparent_travels_with_lookup_get_and_put(ns, kv, daemon, make_pages):
    keys = ns.keys(range(4))
    seen = {}
    plane = kv._async.link.plane
    lookup, get = plane.lookup, plane.get

    async def spy_lookup(handle, some, hints, deadline, **options):
        seen["lookup"] = hints.traceparent
        return await lookup(handle, some, hints, deadline, **options)

    async def spy_get(query, sink, deadline):
        seen["get"] = query.hints.traceparent
        await get(query, sink, deadline)

    plane.lookup, plane.get = spy_lookup, spy_get
    ns.put(keys, make_pages(1), traceparent=TRACE)
    assert ns.get(keys, traceparent=TRACE).hits == 1
    assert ns.lookup(keys, traceparent=TRACE).hits == 1
    assert daemon.puts[-1].traceparent == TRACE
    assert seen == {"lookup": TRACE, "get": TRACE}
    for wrong in ("x" * 65, "é", "a\nb", 5):
        for call in (
            lambda w=wrong: ns.get(keys, traceparent=w),
            lambda w=wrong: ns.put(keys, make_pages(1), traceparent=w),
            lambda w=wrong: ns.lookup(keys, traceparent=w),
        ):
            with pytest.raises(kvtier.errors.LimitExceeded, match="traceparent"):
                call()


def test_the_default_url_is_where_a_daemon_listens(monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/5")
    for user in (0, 5):
        monkeypatch.setattr("os.geteuid", lambda user=user: user)
        assert default_url() == DaemonConfig().listen[0]
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_url() == DaemonConfig().listen[0] == "unix:///tmp/kvtier-5/kvtier.sock"
