"""Views of pages in the daemon's memory: what they are, when they are copies, when they count."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import kvtier
from kvtier.client.local_lease import ViewSource
from tests.client.local_rig import NBYTES, attached, flip, opaque, pages_of, separate_keys
from tests.forks import ForkedDaemon

GetCode = kvtier.GetCode
IN_PLACE, NOT_HELD = ViewSource.IN_PLACE, ViewSource.NOT_HELD


def address(view: memoryview) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


def arena_map() -> tuple[int, int, str]:
    """Where this process has the daemon's arena: begin, end, rights."""
    for line in Path("/proc/self/maps").read_text(encoding="ascii").splitlines():
        ends, rights = line.split()[:2]
        if "/memfd:kvtier-arena" in line and rights.startswith("r-"):
            begin, end = (int(part, 16) for part in ends.split("-"))
            return begin, end, rights
    raise AssertionError("no arena is mapped")


def until_told(kv, hits):
    deadline = time.monotonic() + 5
    while (counters := kv.status().counters).get("get_hit", 0) < hits:
        assert time.monotonic() < deadline, counters
        time.sleep(0.02)


async def until_attached(kv):
    deadline = time.monotonic() + 60
    while not kv.local.is_attached:
        assert time.monotonic() < deadline, kv.local.reason
        await asyncio.sleep(0.02)


@pytest.fixture
def stored(local_ns):
    """Four keys, of which three have pages."""
    keys = local_ns.keys(range(4))
    pages = pages_of(keys, NBYTES)
    local_ns.put(keys[:3], pages[:3]).raise_for_refused()
    return keys, pages


def test_views_are_the_daemons_memory(local_kv, local_ns, stored):
    keys, pages = stored
    refs = [item.ref for item in local_ns.get(keys)]
    before = local_kv.local.counts
    with local_ns.lease(keys) as held:
        assert held.sources == [NOT_HELD] * 4  # nobody asked for views
        views = held.views()
        assert held.sources == [IN_PLACE] * 3 + [NOT_HELD]
        assert held.in_place == [True] * 3 + [False]
        begin, end, rights = arena_map()
        assert rights == "r--s"
        for view, ref in zip(views[:3], refs, strict=False):
            assert address(view) == begin + 4096 * (ref.slot + 1)
            assert address(view) + view.nbytes <= end
        assert views[3] is None
        assert [bytes(view) for view in views[:3]] == [page.tobytes() for page in pages[:3]]
        assert held.verify() == [GetCode.HIT] * 3 + [GetCode.MISS]
        assert held.views() == views
    assert local_kv.local.counts == replace(before, hits=before.hits + 3)  # once, though seen twice


def test_nobody_can_write_to_a_view(local_ns, stored):
    with local_ns.lease(stored[0]) as held:
        view = held.views()[0]
        assert view.readonly
        assert (view.format, view.shape) == ("B", (NBYTES,))
        with pytest.raises(TypeError):
            view[0] = 1
        array = np.frombuffer(view, np.uint8)
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True


def test_the_daemon_hears_once_of_pages_that_were_used(local_kv, local_ns, stored):
    before = local_kv.status().counters.get("get_hit", 0)
    with local_ns.lease(stored[0]) as held:
        held.views()
        for _ in range(3):
            assert held.verify().count(GetCode.HIT) == 3
        until_told(local_kv, before + 3)
    time.sleep(0.6)
    assert local_kv.status().counters["get_hit"] == before + 3


def test_pages_that_are_held_outlive_any_pressure(process, local_ns, local_kv):
    kept = separate_keys(local_ns, 0, 8)
    pages = pages_of(kept, NBYTES)
    local_ns.put(kept, pages, chain=False).raise_for_refused()
    with (
        local_ns.lease(kept, ttl=60) as held,
        kvtier.connect(process.url, deadline=20, plane="grpc") as other,
    ):
        views = held.views()
        theirs = other.namespace(opaque(NBYTES))
        for batch in range(6):  # the arena has room for some 960 pages
            keys = separate_keys(theirs, 1000 + 400 * batch, 400)
            theirs.put(keys, pages_of(keys, NBYTES), chain=False)
        assert local_kv.status().counters["evicted"] > 1000
        assert np.array_equal(np.stack([np.frombuffer(view, np.uint8) for view in views]), pages)
        assert held.verify() == [GetCode.HIT] * 8


def test_entries_may_move_while_a_page_is_held(local_kv):
    """Neighbours in the directory go, so that others close up to where they hash to; then so many
    pages come that the table is made anew.
    """
    ns = local_kv.namespace(opaque(64))
    attached(local_kv)
    keys = separate_keys(ns, 0, 1800)  # the table begins with 4,096 entries
    for more in (keys, separate_keys(ns, 1800, 1800)):
        for at in range(0, 1800, 600):
            some = more[at : at + 600]
            ns.put(some, pages_of(some, 64), chain=False).raise_for_refused()
        if more is keys:
            held = ns.lease(keys[::2])
            held.__enter__()
            held.views()
            assert held.in_place == [True] * 900
            assert ns.delete(keys[1::2]).deleted == 900
        assert held.verify() == [GetCode.HIT] * 900
    held.release()


def test_after_release_nothing_counts(local_ns, stored):
    keys, pages = stored
    with local_ns.lease(keys) as held:
        views = held.views()
    assert held.verify() == [GetCode.UNAVAILABLE] * 3 + [GetCode.MISS]
    assert held.views() == [None] * 4
    assert bytes(views[0]) == pages[0].tobytes()


def test_packed_and_lossy_pages_are_copies_and_say_so(local_kv, layout, make_pages):
    ns = local_kv.namespace(layout)
    attached(local_kv)
    keys = ns.keys(range(8))
    pages = make_pages(2)
    ns.put(keys[:1], pages[:1]).raise_for_refused()
    ns.put(keys[1:], pages[1:], codec=kvtier.Codec.FP8).raise_for_refused()
    with ns.lease(keys) as held:
        first, second = held.views()
        assert held.sources == [IN_PLACE, ViewSource.PACKED]
        assert (bytes(first), second) == (pages[0], None)  # as a get without lossy_ok
        assert held.verify() == [GetCode.HIT, GetCode.MISS]
        again, second = held.views(lossy_ok=True)
        assert address(again) == address(first)
        assert (second.nbytes, second.readonly) == (layout.raw_bytes, True)
        assert held.sources == [IN_PLACE, ViewSource.PACKED]
        assert held.verify() == [GetCode.HIT, GetCode.HIT]


def test_pages_of_a_lower_tier_are_copies_and_say_so(tmp_path, forker):
    settings = ("host.bytes=8MiB", f"nvme.paths={tmp_path}/nvme", "nvme.bytes=64MiB")
    (tmp_path / "nvme").mkdir(mode=0o700)
    with (
        ForkedDaemon(forker, tmp_path, *settings) as process,
        kvtier.connect(process.url, deadline=20) as kv,
    ):
        ns = kv.namespace(opaque(NBYTES))
        attached(kv)
        keys = separate_keys(ns, 0, 192)
        pages = pages_of(keys, NBYTES)
        for at in range(0, 192, 32):
            ns.put(keys[at : at + 32], pages[at : at + 32], chain=False, durable="nvme")
        some = [*keys[:2], keys[-1]]
        with ns.lease(some) as held:
            views = held.views()
            assert held.sources == [ViewSource.LOWER_TIER] * 2 + [IN_PLACE]
            assert held.in_place == [False, False, True]
            assert [bytes(view) for view in views] == [
                page.tobytes() for page in (pages[0], pages[1], pages[-1])
            ]
            assert all(view.readonly for view in views)
            assert held.verify() == [GetCode.HIT] * 3
        late = ns.keys([1000])
        ns.put(late, pages[:1]).raise_for_refused()
        with ns.lease(late) as held:
            held.views()
            assert held.in_place == [True]
            assert ns.demote(late).hits == 1
            assert kv.flush(deadline=10).pages_lost == 0
            assert held.verify() == [GetCode.HIT]  # a copy further down changes nothing


def test_without_shared_memory_views_are_copies_and_say_so(process):
    with kvtier.connect(process.url, deadline=10, plane="grpc") as kv:
        ns = kv.namespace(opaque(NBYTES))
        keys = ns.keys(range(3))
        pages = pages_of(keys, NBYTES)
        ns.put(keys[:2], pages[:2]).raise_for_refused()
        with ns.lease(keys) as held:
            views = held.views()
            assert held.sources == [ViewSource.NOT_ATTACHED] * 2 + [NOT_HELD]
            assert held.in_place == [False] * 3
            assert [bytes(view) for view in views[:2]] == [page.tobytes() for page in pages[:2]]
            assert (views[0].readonly, views[2]) == (True, None)
            assert held.verify() == [GetCode.HIT] * 2 + [GetCode.MISS]
            with kvtier.connect(process.url, deadline=10, plane="grpc") as other:
                other.namespace(opaque(NBYTES)).bump()
            assert held.verify() == [GetCode.STALE] * 2 + [GetCode.MISS]
            assert ns.is_stale
        ns.reopen()
        ns.put(keys, pages).raise_for_refused()
        with ns.lease(keys, deadline=1.0) as held:
            held.views()
            process.kill()
            assert held.verify() == [GetCode.UNAVAILABLE] * 3


def test_nothing_held(local_ns):
    keys = local_ns.keys(range(2))
    for some in ([], keys):
        with local_ns.lease(some) as held:
            assert held.views() == [None] * len(some)
            assert held.verify() == [GetCode.MISS] * len(some)
            assert held.sources == [NOT_HELD] * len(some)


def test_tensors_are_over_the_same_memory(local_kv, layout, make_pages, recwarn):
    torch = pytest.importorskip("torch")
    ns = local_kv.namespace(layout)
    attached(local_kv)
    keys = ns.keys(range(12))
    pages = make_pages(2)
    ns.put(keys[:2], pages).raise_for_refused()
    with ns.lease(keys) as held:
        tensors = held.tensors()
        views = held.views()
        assert held.in_place == [True, True, False]
        assert tensors[2] is None
        for tensor, view, page in zip(tensors, views, pages, strict=False):
            assert tensor["k"].data_ptr() == address(view)
            assert tensor["v"].data_ptr() == address(view) + 512
            assert tensor["k"].dtype is torch.bfloat16
            both = torch.cat([tensor[name].reshape(-1).view(torch.uint8) for name in "kv"])
            assert both.numpy().tobytes() == page
        copy = torch.stack([tensor["k"] for tensor in tensors[:2]])
        assert held.verify() == [GetCode.HIT, GetCode.HIT, GetCode.MISS]
        assert torch.equal(copy[1], tensors[1]["k"])
        del views, view, tensor
    kept = tensors[0]["v"]
    del tensors
    assert kept.view(torch.uint8).numpy().tobytes() == pages[0][512:]
    assert not [w for w in recwarn if "writable" in str(w.message)]


def test_asyncio(process):
    async def run() -> None:
        async with kvtier.aio.connect(process.url, deadline=10) as kv:
            ns = await kv.namespace(opaque(NBYTES))
            await until_attached(kv)
            keys = ns.keys(range(3))
            pages = pages_of(keys, NBYTES)
            (await ns.put(keys, pages)).raise_for_refused()
            async with ns.lease(keys) as held:
                views = await held.views()
                assert held.in_place == [True] * 3
                assert [bytes(view) for view in views] == [page.tobytes() for page in pages]
                assert await held.verify() == [GetCode.HIT] * 3
                assert (await ns.delete(keys[:1])).deleted == 1
                assert await held.verify() == [GetCode.MISS] + [GetCode.HIT] * 2

    asyncio.run(run())


@pytest.mark.parametrize("sizes", [(1, 64, 240, 241), (4097,), ((4 << 20) + 1,)])
def test_pages_of_every_size(process, local_kv, sizes):
    for nbytes in sizes:
        ns = local_kv.namespace(opaque(nbytes))
        attached(local_kv)
        keys = ns.keys(range(3))
        pages = pages_of(keys, nbytes)
        put = ns.put(keys, pages)
        put.raise_for_refused()
        with ns.lease(keys) as held:
            assert [bytes(view) for view in held.views()] == [page.tobytes() for page in pages]
            assert held.in_place == [True] * 3
            assert held.verify() == [GetCode.HIT] * 3
            flip(process.pid, put[2].ref.slot, nbytes - 1)
            assert held.verify() == [GetCode.HIT, GetCode.HIT, GetCode.CORRUPT], nbytes
