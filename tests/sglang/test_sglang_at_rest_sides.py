"""FP8 at rest together with side pools: what can be packed is, all else is refused by name."""

from __future__ import annotations

from contextlib import closing
from functools import partial

import pytest
import torch
from pool_rig import (
    PAGES,
    hashes,
    index_pool,
    latent_pool,
    pool_with_heads,
    states_pool,
    store_for,
)
from sglang_standin import config, needs_wheel, stand_in
from side_rig import FIRST, MODEL, sides_for, transfer

import kvtier
from kvtier.core.page import Tier
from tests.client.local_rig import flip

pytestmark = pytest.mark.usefixtures("packing")

PACKED = ("swa", "draft", "draft_swa")


def packed_sides(kv, *, at_rest="fp8", seed=0, names=PACKED, **sizes):
    """Side pools of keys and values, and what holds them."""
    pools = {name: (partial(pool_with_heads, FIRST, **sizes), MODEL) for name in PACKED}
    return sides_for(kv, *names, seed=seed, pools=pools, at_rest=at_rest)


def all_of(keys, places):
    return [transfer(name, keys, places) for name in PACKED]


def test_pages_of_every_pool_come_back_rounded_to_their_places(kv):
    one, pools = packed_sides(kv)
    other, others = packed_sides(kv, seed=5)
    before = {name: pool.kv_buffer.clone() for name, pool in others.items()}
    assert one.set(all_of(hashes(3), [6, 1, 3])) == {name: [True] * 3 for name in PACKED}
    asked = all_of(hashes(4), [5, 1, 2, 0])
    assert other.get(asked) == {name: [True, True, True, False] for name in PACKED}
    for name in PACKED:
        mine, theirs = pools[name].kv_buffer[:, [6, 1, 3]], others[name].kv_buffer[:, [5, 1, 2]]
        difference = float((mine.float() - theirs.float()).abs().max())
        # Half a step of e4m3 at its coarsest, and not the very bytes: they were packed.
        assert 0 < difference <= float(mine.float().abs().max()) / 16
        untouched = [3, 4, 6, 7]
        assert torch.equal(others[name].kv_buffer[:, untouched], before[name][:, untouched])


def test_who_did_not_ask_for_it_finds_none_and_the_other_way_round(kv):
    packed, _ = packed_sides(kv)
    raw, _ = packed_sides(kv, at_rest="raw")
    missed, there = ({name: [hit] * 2 for name in PACKED} for hit in (False, True))
    packed.set(all_of(hashes(2), [0, 1]))
    assert raw.get(all_of(hashes(2), [4, 5])) == missed
    raw.set(all_of(hashes(2, prompt=1), [0, 1]))
    assert packed.get(all_of(hashes(2, prompt=1), [4, 5])) == missed
    for store in packed.stores:
        store.clear()
    assert packed.get(all_of(hashes(2), [4, 5])) == missed
    assert raw.get(all_of(hashes(2, prompt=1), [4, 5])) == there


def test_prefixes_are_what_all_pools_can_restore(kv):
    primary = store_for(kv, pool_with_heads(FIRST), at_rest="fp8", exists_deadline=5.0)
    sides, _ = packed_sides(kv)
    assert all(primary.set(hashes(5), list(range(5))))
    sides.set([transfer("swa", hashes(4), list(range(4)))])
    sides.set([transfer("draft", hashes(5), list(range(5)))])
    window = transfer("swa", ["", ""], policy="trailing_pages")
    found = sides.exists(primary, hashes(5), [window, transfer("draft", None)])
    assert (found.lengths, found.by_pool) == ([1, 2, 3, 4], {"kv": 5, "swa": 4, "draft": 5})


def test_a_changed_byte_of_a_packed_side_page_makes_prefixes_shorter(kv, daemon):
    primary = store_for(kv, pool_with_heads(FIRST), at_rest="fp8", exists_deadline=5.0)
    sides, _ = packed_sides(kv, names=("swa",))
    assert all(primary.set(hashes(3), [0, 1, 2]))
    sides.set([transfer("swa", hashes(3), [0, 1, 2])])
    part = sides.stores[0]._parts[1].namespace
    (item,) = part.get(part.keys_from(hashes(2)[1:]), codec=kvtier.Codec.FP8)
    assert item.lossy
    flip(daemon.pid, item.ref.slot, 5)
    assert sides.get([transfer("swa", hashes(3), [3, 4, 5])]) == {"swa": [True, False, False]}
    whole = transfer("swa", None)
    assert sides.exists(primary, hashes(3), [whole]).lengths == [1]


def test_they_take_half_the_room(kv):
    sizes = {"dim": 1024, "v_dim": 1024}
    used = {}
    for at_rest in ("raw", "fp8"):
        before = host_bytes(kv)
        sides, _ = packed_sides(kv, at_rest=at_rest, **sizes)
        sides.set(all_of(hashes(PAGES), list(range(PAGES))))
        used[at_rest] = host_bytes(kv) - before
    assert used["fp8"] < 0.65 * used["raw"], used


def host_bytes(kv):
    return next(tier.used_bytes for tier in kv.status(deadline=5).tiers if tier.tier is Tier.HOST)


@needs_wheel
@pytest.mark.parametrize(
    ("name", "pool", "is_replicated", "said"),
    [
        ("mamba", states_pool(), False, "the KV cache is float32"),
        ("indexer", index_pool(FIRST), True, "the KV cache is uint8"),
        ("draft", latent_pool(FIRST), True, "latent"),
    ],
    ids=["states", "index keys", "latents"],
)
def test_pools_that_cannot_be_packed_fail_the_attach_by_name(
    daemon, name, pool, is_replicated, said
):
    """With a primary pool that can be: the model is served raw, or not at all."""
    extra = {
        "kvtier_endpoint": daemon.url,
        "kvtier_at_rest": "fp8",
        "kvtier_weights_fixed": True,
    }
    with stand_in() as sglang:
        backend = sglang.backend.KvTierHiCacheStorage(
            config(extra_config=extra, is_mla_model=is_replicated)
        )
        with closing(backend):
            primary = pool_with_heads(FIRST)
            backend.register_mem_pool_host(primary)
            backend.register_mem_host_pool_v2(pool_with_heads(FIRST), "swa")
            with pytest.raises(kvtier.LayoutError, match=said) as caught:
                backend.register_mem_host_pool_v2(pool, name)
            assert 'leave "kvtier_at_rest" out' in caught.value.remedy
