"""FP8 at rest: twice the pages, rounded, for those alone who asked for it."""

from __future__ import annotations

import signal
import time
from dataclasses import replace

import pytest
import torch
from pool_rig import IDENTITY, PAGES, hashes, latent_pool, pool_with_heads, store_for

import kvtier
from kvtier.core.page import Tier
from kvtier.errors import InvalidConfigValue
from kvtier_sglang.options import Options
from tests.client.local_rig import flip
from tests.forks import daemon_of_its_own

pytestmark = pytest.mark.usefixtures("packing")

ALL = list(range(PAGES))
LAYOUTS = ["layer_first", "page_first", "page_first_direct", "page_head"]


def packed_store(kv, pool, **options):
    return store_for(kv, pool, at_rest="fp8", **options)


def rounding(pool, other):
    """The largest difference, in parts of the largest number of its layer and head."""
    return float((pool.kv_buffer.float() - other.kv_buffer.float()).abs().max()) / float(
        pool.kv_buffer.float().abs().max()
    )


@pytest.mark.parametrize("mem_layout", LAYOUTS)
def test_pages_come_back_rounded(kv, mem_layout):
    pool, other = pool_with_heads(mem_layout), pool_with_heads(mem_layout, seed=9)
    assert packed_store(kv, pool).set(hashes(PAGES), ALL) == [True] * PAGES
    reader = packed_store(kv, other)
    assert reader.exists(hashes(PAGES)) == PAGES
    assert reader.get(hashes(PAGES), ALL) == [True] * PAGES
    assert not torch.equal(pool.kv_buffer, other.kv_buffer)
    # Half a step of e4m3 at its coarsest: 2**-4 of the number.
    assert 0 < rounding(pool, other) <= 1 / 16
    # What was rounded once stays as it is.
    again = pool_with_heads(mem_layout, seed=4)
    assert all(reader.set(hashes(PAGES, prompt=1), ALL))
    assert all(packed_store(kv, again).get(hashes(PAGES, prompt=1), ALL))
    assert rounding(other, again) <= 1 / 16


def test_flat_pages_too(kv):
    pool = pool_with_heads("page_first_direct")
    store = packed_store(kv, pool)
    flat = [pool.kv_buffer[:, place].flatten() for place in (4, 2)]
    assert store.set_flat(hashes(2), flat) == [True, True]
    out = [torch.zeros_like(page) for page in flat]
    assert store.get_flat(hashes(2), out) == [True, True]
    for mine, page in zip(out, flat, strict=True):
        torch.testing.assert_close(mine, page, rtol=1 / 16, atol=0.02)


def test_who_did_not_ask_for_it_gets_no_rounded_page_and_the_other_way_round(kv):
    """Two attachments on one daemon: neither finds, gets, ends or deletes what the other stored."""
    pool = pool_with_heads("page_first_direct")
    raw, packed = store_for(kv, pool), packed_store(kv, pool)
    assert all(packed.set(hashes(4), ALL[:4]))
    assert raw.exists(hashes(4)) == 0
    assert raw.get(hashes(4), ALL[:4]) == [False] * 4
    assert all(raw.set(hashes(4), ALL[:4]))
    assert all(raw.set(hashes(2, prompt=1), ALL[:2]))
    assert packed.exists(hashes(2, prompt=1)) == 0
    assert packed.get(hashes(2, prompt=1), ALL[:2]) == [False] * 2
    exact = pool.kv_buffer.clone()
    assert all(raw.get(hashes(4), ALL[:4]))
    assert torch.equal(pool.kv_buffer, exact)
    packed.clear()
    assert raw.exists(hashes(4)) == 4


def test_an_arena_holds_more_of_them(forker):
    """Pages that stay in an arena of one size, raw and packed, of more than fit."""
    stay, count = {}, 400
    pool = pool_with_heads("page_first_direct", dim=4096, v_dim=4096)
    for at_rest in ("raw", "fp8"):
        with (
            daemon_of_its_own(forker, "host.bytes=64MiB") as daemon,
            kvtier.connect(daemon.url, deadline=5) as kv,
        ):
            store = store_for(kv, pool, at_rest=at_rest)
            for prompt in range(count // PAGES):
                store.set(hashes(PAGES, prompt=prompt), ALL)
            tiers = {tier.tier: tier for tier in kv.status(deadline=5).tiers}
            stay[at_rest] = tiers[Tier.HOST].pages_sealed // 2
    assert stay["fp8"] >= 1.7 * stay["raw"], stay


def test_a_changed_byte_is_a_miss(kv, daemon):
    """In the daemon's own memory: that page and what comes after it."""
    pool = pool_with_heads("page_first_direct")
    store = packed_store(kv, pool)
    assert all(store.set(hashes(3), ALL[:3]))
    part = store._parts[1].namespace
    (item,) = part.get(part.keys_from(hashes(2)[1:]), codec=kvtier.Codec.FP8)
    assert item.lossy
    flip(daemon.pid, item.ref.slot, 5)
    assert store.get(hashes(3), ALL[:3]) == [True, False, False]
    assert store.exists(hashes(3)) == 1


def test_a_number_that_cannot_be_packed_is_not_stored(kv):
    pool = pool_with_heads("page_first_direct")
    pool.kv_buffer[1, 1, 0, 0, 0, 0] = float("inf")
    store = packed_store(kv, pool)
    assert store.set(hashes(3), ALL[:3]) == [True, False, False]
    assert store.exists(hashes(3)) == 1


@pytest.mark.parametrize("kv_format", ["float8_e4m3fn", "float8_e5m2", "float32"])
def test_pools_of_other_numbers_are_refused_by_name(kv, kv_format):
    pool = pool_with_heads("page_first_direct")
    with pytest.raises(kvtier.LayoutError, match=f"the KV cache is {kv_format}"):
        packed_store(kv, pool, identity=replace(IDENTITY, kv_format=kv_format))


def test_latent_pools_are_refused_by_name(kv):
    with pytest.raises(kvtier.LayoutError, match="latent"):
        packed_store(kv, latent_pool("page_first_direct"))


def test_other_words_are_refused():
    with pytest.raises(InvalidConfigValue, match="kvtier_at_rest is 'fp4'"):
        Options.of({"kvtier_at_rest": "fp4"})


def test_calls_to_a_stopped_daemon_end_in_time(daemon):
    pool = pool_with_heads("page_first_direct")
    with kvtier.connect(daemon.url, deadline=5) as kv:
        store = packed_store(kv, pool, get_deadline=0.3, set_deadline=0.3)
        assert all(store.set(hashes(2), [0, 1]))
        daemon.signal(signal.SIGSTOP)
        try:
            for call in (
                lambda: store.get(hashes(2), [0, 1]),
                lambda: store.set(hashes(2), [0, 1]),
            ):
                began = time.monotonic()
                assert call() == [False, False]
                assert time.monotonic() - began < 1.0
        finally:
            daemon.signal(signal.SIGCONT)
        until = time.monotonic() + 10
        while not all(store.get(hashes(2), [0, 1])):
            assert time.monotonic() < until
