"""The local plane against a real daemon: what is read without asking, and what happens when the two
sides do not agree."""

from __future__ import annotations

import asyncio
import signal
import time

import numpy as np
import pytest

import kvtier
from kvtier.client.local_reads import LocalCounts
from kvtier.core.page import Tier
from tests.client.local_rig import NBYTES, attached, opaque, pages_of, separate_keys
from tests.forks import ForkedDaemon

GetCode, PutCode = kvtier.GetCode, kvtier.PutCode


def test_lookups_and_gets_need_no_call(process, local_kv, local_ns):
    """The daemon is stopped: whoever asked it would wait in vain."""
    keys = local_ns.keys(range(8))
    pages = pages_of(keys, NBYTES)
    put = local_ns.put(keys[:6], pages[:6])
    put.raise_for_refused()
    process.signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        found = local_ns.lookup(keys)
        assert found.reasons == [GetCode.HIT] * 6 + [GetCode.MISS] * 2
        assert found[0].tier is Tier.HOST
        assert found[7].tier is None
        out = np.zeros_like(pages)
        got = local_ns.get(keys, out=out)
        assert time.monotonic() - began < 2
    finally:
        process.signal(signal.SIGCONT)
    assert got.reasons == [GetCode.HIT] * 6 + [GetCode.MISS] * 2
    assert np.array_equal(out[:6], pages[:6])
    assert not out[6:].any()
    assert [got[i].ref for i in range(6)] == [put[i].ref for i in range(6)]
    assert got[0].tier is Tier.HOST
    assert got[0].codec is kvtier.Codec.RAW
    assert not got[0].lossy
    assert local_kv.local.counts == LocalCounts(lookups=8, hits=6, misses=2)


def test_the_daemon_hears_of_it_within_a_second(local_kv, local_ns):
    keys = local_ns.keys(range(4))
    local_ns.put(keys[:3], pages_of(keys[:3], NBYTES)).raise_for_refused()
    local_ns.lookup(keys)
    local_ns.get(keys)
    deadline = time.monotonic() + 5
    while (counters := local_kv.status().counters).get("hit_host", 0) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert counters["get_hit"] == 3
    assert counters["get_miss"] == 1
    assert (counters["lookup_hits"], counters["lookup_misses"]) == (3, 1)


def test_what_is_read_is_used(local_kv, local_ns):
    """A page that is read here stays, and others give way for it."""
    kept = local_ns.keys(range(8))
    local_ns.put(kept, pages_of(kept, NBYTES), chain=False).raise_for_refused()
    hits = 0
    for batch in range(5):  # the arena has room for some 960 pages
        keys = separate_keys(local_ns, 1000 + 450 * batch, 450)
        local_ns.put(keys, pages_of(keys, NBYTES), chain=False).raise_for_refused()
        assert local_ns.get(kept).prefix == 8, f"after {batch + 1} batches"
        hits += 8
        deadline = time.monotonic() + 5
        while local_kv.status().counters.get("get_hit", 0) < hits:
            assert time.monotonic() < deadline, "the daemon was not told"
            time.sleep(0.02)
    assert local_kv.status().counters["evicted"] > 1000


@pytest.mark.parametrize("nbytes", [1, 64, 240, 241, 4095, 4097, 1 << 20, (4 << 20) + 1])
def test_pages_of_every_size_in_every_kind_of_memory(local_kv, nbytes):
    ns = local_kv.namespace(opaque(nbytes))
    attached(local_kv)
    keys = ns.keys(range(3))
    pages = pages_of(keys, nbytes)
    ns.put(keys, pages).raise_for_refused()
    before = local_kv.local.counts.hits
    apart = np.zeros((6, nbytes), np.uint8)
    strided = np.zeros((3, 2 * nbytes), np.uint8)
    odd = bytearray(3 * nbytes + 1)
    each = [bytearray(nbytes) for _ in keys]
    columns = np.zeros((nbytes, 3), np.uint8)
    assert ns.get(keys, out=apart, at=[4, 0, 2]).prefix == 3
    assert ns.get(keys, out=strided[:, ::2]).prefix == 3
    assert ns.get(keys, out=memoryview(odd)[1:]).prefix == 3
    assert ns.get(keys, out=each).prefix == 3
    assert ns.get(keys, out=columns.T).prefix == 3
    assert ns.get(keys).pages == [bytearray(page) for page in pages]
    assert np.array_equal(apart[[4, 0, 2]], pages)
    assert not apart[[1, 3, 5]].any()
    assert np.array_equal(strided[:, ::2], pages)
    assert not strided[:, 1::2].any()
    assert bytes(odd[1:]) == pages.tobytes()
    assert odd[0] == 0
    assert b"".join(each) == pages.tobytes()
    assert np.array_equal(columns.T, pages)
    assert local_kv.local.counts.hits - before == 18


def test_a_delete_holds_for_every_call_that_begins_after_it(local_kv, local_ns):
    keys = local_ns.keys(range(4))
    local_ns.put(keys, pages_of(keys, NBYTES)).raise_for_refused()
    assert local_ns.get(keys).prefix == 4
    assert local_ns.delete(keys[1:3]).deleted == 2
    assert local_ns.lookup(keys).reasons == [GetCode.HIT, GetCode.MISS, GetCode.MISS, GetCode.HIT]
    assert local_ns.get(keys).reasons == [GetCode.HIT, GetCode.MISS, GetCode.MISS, GetCode.HIT]
    local_ns.put(keys[1:3], pages_of(keys[1:3], NBYTES)).raise_for_refused()
    assert local_ns.get(keys).prefix == 4


def test_a_bump_by_another_ends_everything_at_once(process, local_kv, local_ns):
    keys = local_ns.keys(range(4))
    local_ns.put(keys, pages_of(keys, NBYTES)).raise_for_refused()
    with kvtier.connect(process.url, deadline=10, plane="grpc") as other:
        other.namespace(opaque(NBYTES)).bump()
    assert local_ns.get(keys).reasons == [GetCode.STALE] * 4
    assert local_ns.lookup(keys).reasons == [GetCode.STALE] * 4
    assert local_ns.is_stale
    local_ns.reopen()
    assert local_ns.get(keys).reasons == [GetCode.MISS] * 4
    local_ns.put(keys, pages_of(keys, NBYTES)).raise_for_refused()
    before = local_kv.local.counts.hits
    assert local_ns.get(keys).prefix == 4
    assert local_kv.local.counts.hits - before == 4


def test_a_page_of_another_shard_is_needed_for_a_hit_of_lookup(local_kv):
    layouts = [opaque(NBYTES, shard=shard, shards=2) for shard in range(2)]
    first, second = (local_kv.namespace(layout) for layout in layouts)
    attached(local_kv)
    keys = first.keys(range(2))
    first.put(keys, pages_of(keys, NBYTES)).raise_for_refused()
    assert first.lookup(keys).reasons == [GetCode.MISS] * 2
    assert first.get(keys).prefix == 2
    second.put(keys[:1], pages_of(keys[:1], NBYTES)).raise_for_refused()
    assert first.lookup(keys).reasons == [GetCode.HIT, GetCode.MISS]
    assert second.lookup(keys).reasons == [GetCode.HIT, GetCode.MISS]
    assert local_kv.local.counts.lookups == 6


def test_tenants_do_not_meet(local_kv):
    spaces = [local_kv.namespace(opaque(NBYTES), tenant=tenant) for tenant in ("a", "b")]
    attached(local_kv)
    keys = spaces[0].keys(range(2))
    spaces[0].put(keys, pages_of(keys, NBYTES)).raise_for_refused()
    assert spaces[0].get(keys).prefix == 2
    assert spaces[1].get(keys).reasons == [GetCode.MISS] * 2


def test_who_asks_for_grpc_is_not_attached(process):
    with kvtier.connect(process.url, deadline=10, plane="grpc") as kv:
        ns = kv.namespace(opaque(NBYTES))
        keys = ns.keys(range(2))
        ns.put(keys, pages_of(keys, NBYTES)).raise_for_refused()
        assert ns.get(keys).prefix == 2
        assert not kv.local.is_attached
        assert "grpc" in kv.local.reason
        assert kv.local.counts == LocalCounts()
    with pytest.raises(kvtier.errors.InvalidConfigValue, match="plane"):
        kvtier.connect(process.url, plane="shared")


def test_a_daemon_without_the_plane_says_so(tmp_path, forker):
    with ForkedDaemon(forker, tmp_path, "host.bytes=64MiB", "local.plane=off") as process:
        with kvtier.connect(process.url, deadline=10) as kv:
            ns = kv.namespace(opaque(NBYTES))
            keys = ns.keys(range(2))
            ns.put(keys, pages_of(keys, NBYTES)).raise_for_refused()
            assert ns.get(keys).prefix == 2
            assert "local.plane" in kv.local.reason
            assert kv.status().planes == ("grpc",)
        assert not list(tmp_path.rglob("*local*"))


def test_the_planes_of_a_daemon_are_seen(process, local_kv, local_ns):
    assert local_kv.status().planes == ("grpc", "local")
    assert f"unix://{local_kv.capabilities().local_socket}" == process.url + ".local"


def test_pages_of_a_lower_tier_come_through_the_daemon_and_are_then_read_here(tmp_path, forker):
    settings = ("host.bytes=8MiB", f"nvme.paths={tmp_path}/nvme", "nvme.bytes=64MiB")
    (tmp_path / "nvme").mkdir(mode=0o700)
    with (
        ForkedDaemon(forker, tmp_path, *settings) as process,
        kvtier.connect(process.url, deadline=20) as kv,
    ):
        ns = kv.namespace(opaque(NBYTES))
        attached(kv)
        keys = separate_keys(ns, 0, 256)
        pages = pages_of(keys, NBYTES)
        for at in range(0, 256, 32):
            put = ns.put(keys[at : at + 32], pages[at : at + 32], chain=False, durable="nvme")
            assert put.durable == 32
        tiers = [item.tier for item in ns.lookup(keys)]
        assert tiers.count(Tier.NVME) > 100
        out = np.zeros_like(pages[:16])
        got = ns.get(keys[:16], out=out)
        assert [item.tier for item in got] == [Tier.NVME] * 16
        assert np.array_equal(out, pages[:16])
        assert kv.local.counts.left == 16
        again = ns.get(keys[:16], out=out)
        assert [item.tier for item in again] == [Tier.HOST] * 16
        assert kv.local.counts.hits == 16
        process.kill()
        process.start()
        deadline = time.monotonic() + 10
        while ns.get(keys[:1]).hits == 0:
            assert time.monotonic() < deadline
        attached(kv)
        assert [item.tier for item in ns.lookup(keys)].count(Tier.NVME) > 200


def test_an_asyncio_client_reads_here_too(process):
    async def run() -> None:
        async with kvtier.aio.connect(process.url, deadline=10) as kv:
            ns = await kv.namespace(opaque(NBYTES))
            deadline = time.monotonic() + 20
            while not kv.local.is_attached:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.02)
            keys = ns.keys(range(4))
            (await ns.put(keys, pages_of(keys, NBYTES))).raise_for_refused()
            assert (await ns.get(keys)).prefix == 4
            assert (await ns.lookup(keys)).prefix == 4
            assert kv.local.counts == LocalCounts(lookups=4, hits=4)

    asyncio.run(run())
