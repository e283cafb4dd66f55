"""What `verify` says of views when something happens to the page, the lease, the namespace or the
daemon meanwhile."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from pathlib import Path

import pytest

import kvtier
from tests.client.local_rig import NBYTES, arena_fd, attached, flip, opaque, pages_of

GetCode = kvtier.GetCode


def is_arena_mapped() -> bool:
    return "/memfd:kvtier-arena" in Path("/proc/self/maps").read_text(encoding="ascii")


@pytest.fixture
def stored(local_ns):
    """Four keys, of which three have pages."""
    keys = local_ns.keys(range(4))
    pages = pages_of(keys, NBYTES)
    local_ns.put(keys[:3], pages[:3]).raise_for_refused()
    return keys, pages


async def until_attached(kv):
    deadline = time.monotonic() + 60
    while not kv.local.is_attached:
        assert time.monotonic() < deadline, kv.local.reason
        await asyncio.sleep(0.02)


def test_a_lease_that_ran_out_is_unavailable(local_ns, stored):
    keys, pages = stored
    with local_ns.lease(keys, ttl=0.1) as held:
        views = held.views()
        assert held.verify()[:3] == [GetCode.HIT] * 3
        time.sleep(0.12)
        assert held.verify() == [GetCode.UNAVAILABLE] * 3 + [GetCode.MISS]
        assert held.views() == [None] * 4
        assert bytes(views[0]) == pages[0].tobytes()  # nobody needed the room
    with local_ns.lease(keys, ttl=0.3) as held:
        held.views()
        held.renew(30.0)
        time.sleep(0.35)
        assert held.verify()[:3] == [GetCode.HIT] * 3


def test_a_page_that_is_deleted_meanwhile_is_gone(local_ns, stored):
    keys, pages = stored
    with local_ns.lease(keys) as held:
        views = held.views()
        assert local_ns.delete(keys[1:2]).deleted == 1
        assert held.verify() == [GetCode.HIT, GetCode.MISS, GetCode.HIT, GetCode.MISS]
        # Its slot is not given to another page before the lease ends.
        local_ns.put(keys[1:2], pages[1:2]).raise_for_refused()
        assert bytes(views[1]) == pages[1].tobytes()
        # The page is there again, but not the one that is held.
        assert held.verify() == [GetCode.HIT, GetCode.MISS, GetCode.HIT, GetCode.MISS]


def test_a_bump_while_held_is_stale(process, local_ns, stored):
    keys, pages = stored
    with local_ns.lease(keys) as held:
        views = held.views()
        with kvtier.connect(process.url, deadline=10, plane="grpc") as other:
            other.namespace(opaque(NBYTES)).bump()
        assert held.verify() == [GetCode.STALE] * 3 + [GetCode.MISS]
        assert bytes(views[0]) == pages[0].tobytes()


def test_views_outlive_a_daemon_that_was_killed(process, local_kv, local_ns, stored):
    keys, pages = stored
    with local_ns.lease(keys) as held:
        views = held.views()
        process.kill()
        began = time.monotonic()
        assert held.verify() == [GetCode.UNAVAILABLE] * 3 + [GetCode.MISS]
        assert time.monotonic() - began < 1
        deadline = time.monotonic() + 5
        while local_kv.local.is_attached:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert [bytes(view) for view in views[:3]] == [page.tobytes() for page in pages[:3]]
        assert held.verify() == [GetCode.UNAVAILABLE] * 3 + [GetCode.MISS]
    assert bytes(views[2]) == pages[2].tobytes()
    del views
    while is_arena_mapped():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_daemon_that_has_just_ended_is_unavailable(process):
    """Before the event loop hears of it."""

    async def run() -> None:
        async with kvtier.aio.connect(process.url, deadline=10) as kv:
            ns = await kv.namespace(opaque(NBYTES))
            await until_attached(kv)
            keys = ns.keys(range(2))
            (await ns.put(keys, pages_of(keys, NBYTES))).raise_for_refused()
            async with ns.lease(keys) as held:
                await held.views()
                process.kill()
                assert await held.verify() == [GetCode.UNAVAILABLE] * 2

    asyncio.run(run())


class SlowSummer:
    def __init__(self, summer, seconds):
        self._summer = summer
        self._seconds = seconds

    def sums(self, sources, nbytes, blocks):
        time.sleep(self._seconds)
        return self._summer.sums(sources, nbytes, blocks)


def test_what_ends_while_verify_reads(process):
    """Its deadline, or the lease."""

    async def run() -> None:
        async with kvtier.aio.connect(process.url, deadline=10) as kv:
            ns = await kv.namespace(opaque(NBYTES))
            await until_attached(kv)
            keys = ns.keys(range(300))  # 256 are read between two looks at the clock
            (await ns.put(keys, pages_of(keys, NBYTES))).raise_for_refused()
            link = kv.link.local.reads((await kv.status()).boot_id).link
            async with ns.lease(keys, ttl=1.0) as held:
                await held.views()
                summer, link.summer = link.summer, SlowSummer(link.summer, 0.1)
                assert await held.verify(deadline=0.05) == (
                    [GetCode.HIT] * 256 + [GetCode.TIMEOUT] * 44
                )
                link.summer = summer
                assert await held.verify() == [GetCode.HIT] * 300
                link.summer = SlowSummer(summer, 0.6)
                assert await held.verify() == [GetCode.UNAVAILABLE] * 300

    asyncio.run(run())


def test_views_outlive_their_connection(process):
    with kvtier.connect(process.url, deadline=10) as kv:
        ns = kv.namespace(opaque(NBYTES))
        attached(kv)
        keys = ns.keys(range(2))
        pages = pages_of(keys, NBYTES)
        ns.put(keys, pages).raise_for_refused()
        held = ns.lease(keys)
        held.__enter__()
        views = held.views()
    with pytest.raises(kvtier.errors.ClientClosed):
        held.verify()
    assert [bytes(view) for view in views] == [page.tobytes() for page in pages]


def test_damage_is_seen_by_verify_and_taken_out(process, local_kv, local_ns):
    keys = local_ns.keys(range(4))
    pages = pages_of(keys, NBYTES)
    put = local_ns.put(keys, pages)
    with local_ns.lease(keys) as held:
        held.views()
        expected = [GetCode.HIT] * 4
        assert held.verify() == expected
        for i, at in enumerate((0, NBYTES // 2, NBYTES - 1)):
            flip(process.pid, put[i].ref.slot, at)
            expected[i] = GetCode.CORRUPT
            assert held.verify() == expected
            assert local_kv.status().counters["condemned"] == i + 1
            expected[i] = GetCode.MISS
            assert held.verify() == expected
    assert local_ns.put(keys[:3], pages[:3]).stored == 3
    assert local_ns.get(keys).prefix == 4


def test_a_whole_page_in_the_place_of_another_is_seen(process, local_ns):
    keys = local_ns.keys(range(2))
    pages = pages_of(keys, NBYTES)
    put = local_ns.put(keys, pages)
    with local_ns.lease(keys) as held:
        views = held.views()
        fd = arena_fd(process.pid)
        os.pwrite(fd, pages[1].tobytes(), 4096 * (put[0].ref.slot + 1))
        os.close(fd)
        assert bytes(views[0]) == pages[1].tobytes()
        assert held.verify() == [GetCode.CORRUPT, GetCode.HIT]


def test_a_lease_over_a_restart_is_unavailable(ns, daemon, make_pages):
    keys = ns.keys(range(8))
    ns.put(keys[:1], make_pages(1))
    with ns.lease(keys) as held:
        held.views()
        assert held.verify() == [GetCode.HIT, GetCode.MISS]
        daemon.boot()
        assert held.verify() == [GetCode.UNAVAILABLE, GetCode.MISS]
        ns.lookup(keys)
        assert held.verify() == [GetCode.UNAVAILABLE, GetCode.MISS]


def test_a_copy_that_could_not_be_had_is_asked_for_again(ns, daemon, make_pages):
    pages = make_pages(1)
    keys = ns.keys(range(4))
    ns.put(keys, pages)
    with ns.lease(keys) as held:
        daemon.raise_in["get"] = kvtier.errors.Busy("no", remedy="none")
        assert held.views() == [None]
        assert held.verify() == [GetCode.BUSY]
        daemon.raise_in.clear()
        assert held.views() == pages
        assert held.verify() == [GetCode.HIT]


def in_child(held, views, queue):
    for call in (held.views, held.verify, held.renew, held.release):
        try:
            call()
        except kvtier.errors.ForkedClient as error:
            queue.put(type(error).__name__)
    del views  # does not unmap what else may lie there now
    os._exit(0)


def test_a_forked_child_is_refused_and_the_parents_lease_goes_on(local_ns, stored):
    keys, pages = stored
    context = multiprocessing.get_context("fork")
    with local_ns.lease(keys) as held:
        views = held.views()
        queue = context.SimpleQueue()
        child = context.Process(target=in_child, args=(held, views, queue))
        child.start()
        child.join(10)
        assert child.exitcode == 0
        assert [queue.get() for _ in range(4)] == ["ForkedClient"] * 4
        queue.close()
        child.close()
        assert bytes(views[0]) == pages[0].tobytes()
        assert held.verify()[:3] == [GetCode.HIT] * 3
