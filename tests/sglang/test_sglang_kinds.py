"""Fault kinds that hurt users of KV caches, at the border to SGLang: what the README names for each
is elsewhere, and what was missing is here.
"""

from __future__ import annotations

import signal
import time
from dataclasses import fields, replace

import pytest
import torch
from pool_rig import (
    IDENTITY,
    PAGE,
    PAGES,
    hashes,
    latent_pool,
    pool_with_heads,
    states_pool,
    store_for,
)
from side_rig import FIRST, MODEL, sides_for, transfer

import kvtier
import kvtier.client
from kvtier.client.results import GetResult, PutResult
from kvtier_sglang import runs
from kvtier_sglang.budget import Budget
from kvtier_sglang.layouts import Identity, PoolShape, Ranks, part_layouts
from kvtier_sglang.pools import shape_of
from kvtier_sglang.side_pools import Model, side_pool
from kvtier_sglang.states import StoreState
from tests.forks import daemon_of_its_own

GetCode, PutCode = kvtier.GetCode, kvtier.PutCode
#: For what the daemon does soon.
WAIT_S = 60.0


def comes(call):
    until = time.monotonic() + WAIT_S
    while not call():
        assert time.monotonic() < until
        time.sleep(0.02)


# -- 1: an outcome that is lost on the way up ------------------------------------------------------


@pytest.mark.parametrize("code", [code for code in GetCode if code is not GetCode.HIT])
@pytest.mark.parametrize("part", [0, 1], ids=["k", "v"])
def test_kind_01_dropped_every_outcome_of_a_get(kv, monkeypatch, code, part):
    """Page 2 of 4 has it, for one of its two objects."""
    store = store_for(kv, pool_with_heads(FIRST))
    store.set(hashes(4), [0, 1, 2, 3])
    real, turns = kvtier.client.Namespace.get, []

    def get(namespace, keys, **options):
        turns.append(namespace)
        found = real(namespace, keys, **options)
        if len(turns) != part + 1:
            return found
        codes = bytes(code if at == 2 else reason for at, reason in enumerate(found.reasons))
        return GetResult(replace(found._columns, codes=codes), page_tokens=PAGE)

    monkeypatch.setattr(kvtier.client.Namespace, "get", get)
    assert store.get(hashes(4), [4, 5, 6, 7]) == [True, True, False, False]


@pytest.mark.parametrize("code", list(PutCode))
def test_kind_01_dropped_every_outcome_of_a_put(kv, monkeypatch, code):
    store = store_for(kv, pool_with_heads(FIRST))
    real, turns = kvtier.client.Namespace.put, []

    def put(namespace, keys, pages, **options):
        turns.append(len(keys))
        stored = real(namespace, keys, pages, **options)
        if len(turns) > 1:
            return stored
        codes = bytes(code if at == 2 else reason for at, reason in enumerate(stored.reasons))
        reached = bytes(len(codes))
        return PutResult(codes, stored._refs, reached=reached, wanted=kvtier.Durability.HOST)

    monkeypatch.setattr(kvtier.client.Namespace, "put", put)
    is_stored = code in (PutCode.STORED, PutCode.EXISTS)
    assert store.set(hashes(4), [0, 1, 2, 3]) == [True, True, is_stored, is_stored]
    # The other object of a page that was refused is not sent.
    assert turns == [4, 4 if is_stored else 2]


# -- 3: a page goes between the question and the get -----------------------------------------------


def test_kind_03_evictrace_between_exists_and_get(kv):
    primary = store_for(kv, pool_with_heads(FIRST), exists_deadline=5.0)
    sides, pools = sides_for(kv, "swa", "mamba")
    primary.set(hashes(3), [0, 1, 2])
    asked = [transfer(name, hashes(3), [0, 1, 2]) for name in ("swa", "mamba")]
    sides.set(asked)
    assert sides.exists(primary, hashes(3), asked).longest == 3
    part = sides.stores[0]._parts[1].namespace
    part.delete(part.keys_from(hashes(3)[1:2]))
    pools["swa"].kv_buffer.fill_(7)
    got = sides.get(asked)
    assert got == {"swa": [True, False, False], "mamba": [True] * 3}
    assert (pools["swa"].kv_buffer[:, 3:] == 7).all()
    assert sides.exists(primary, hashes(3), asked).longest == 1
    assert primary.get(hashes(3), [0, 1, 2]) == [True] * 3


# -- 5: what a key does not say --------------------------------------------------------------------

#: Fields of what the binding knows of a server, each with another value. One that is added to them
#: and not here fails the test.
OTHER_SHAPE = {
    "pool": "draft", "mem_layout": "page_head", "page_tokens": 8, "layers": 4, "first_layer": 1,
    "heads": 4, "key_dim": 32, "value_dim": 32, "row_form": "packed",
}  # fmt: skip
OTHER_IDENTITY = {
    "model_id": "n", "weights_revision": "r2", "kv_format": "float16", "kv_compute": "float16",
}  # fmt: skip
OTHER_RANKS = {"tp_rank": 1, "tp_size": 4, "pp_rank": 1, "pp_size": 4, "model_layers": 9}
#: Of states. The rest of a Model decides what is refused, and is no part of what pages mean.
OTHER_MODEL = {
    "identity": replace(IDENTITY, model_id="n"),
    "ranks": Ranks(tp_size=2),
    "page_tokens": 8,
    "state_kernels": "flashinfer",
}
NO_PART_OF_A_PAGE = {"is_replicated", "stated_format", "draft"}


def places(layouts):
    """Where pages lie: family and shard."""
    return [(layout.fingerprint("t"), layout.shard) for layout in layouts]


def test_kind_05_keyid_every_field():
    assert {field.name for field in fields(PoolShape)} == set(OTHER_SHAPE)
    assert {field.name for field in fields(Identity)} == set(OTHER_IDENTITY)
    assert {field.name for field in fields(Ranks)} == set(OTHER_RANKS)
    shape = shape_of(pool_with_heads(FIRST))
    ranks = Ranks(tp_size=2, pp_size=3, model_layers=8)
    made = [(shape, IDENTITY, ranks)]
    made += [(replace(shape, **{name: value}), IDENTITY, ranks) for name, value in
             OTHER_SHAPE.items()]  # fmt: skip
    made += [(shape, replace(IDENTITY, **{name: value}), ranks) for name, value in
             OTHER_IDENTITY.items()]  # fmt: skip
    made += [(shape, IDENTITY, replace(ranks, **{name: value})) for name, value in
             OTHER_RANKS.items()]  # fmt: skip
    found = [
        place
        for server in made
        for place in places([part.layout for part in part_layouts(*server)])
    ]
    # The size of the values says nothing of the keys beside them, nor the other way round.
    assert len(found) == 2 * len(made)
    assert len(set(found)) == len(found) - 2


def test_kind_05_keyid_every_field_of_a_state():
    assert {field.name for field in fields(Model)} == set(OTHER_MODEL) | NO_PART_OF_A_PAGE
    models = [MODEL, *(replace(MODEL, **{name: value}) for name, value in OTHER_MODEL.items())]
    found = [
        place
        for model in models
        for place in places(
            [part.layout for part in side_pool("mamba", states_pool(), model).parts]
        )
    ]
    assert len(set(found)) == len(found) == 3 * len(models)


# -- 7: calls that do not end in time --------------------------------------------------------------


def test_kind_07_timeout_of_a_question_about_a_million_tokens(daemon):
    """64 tokens a page: 16,384 keys, at a daemon that has stopped."""
    with kvtier.connect(daemon.url, plane="grpc") as kv:
        primary = store_for(kv, latent_pool(FIRST))
        sides, _ = sides_for(kv, "mamba", exists_deadline=0.1)
        asked = [transfer("mamba", [""], policy="trailing_pages")]
        daemon.signal(signal.SIGSTOP)
        try:
            began = time.monotonic()
            assert sides.exists(primary, hashes(16384), asked).longest == 0
            assert time.monotonic() - began < 1.0
            assert sides.stores[0].present(hashes(16384)) == [False] * 16384
        finally:
            daemon.signal(signal.SIGCONT)


def test_kind_07_timeout_of_pools_that_also_have_to_be_opened(kv, monkeypatch):
    """After an update that the daemon has heard nothing of: what is owed, and what is to be opened,
    is done in the time of the call.
    """
    times = {"exists_deadline": 0.2, "get_deadline": 0.3}
    sides, _ = sides_for(kv, "swa", "mamba", "draft", **times)

    def silent(_connection, _layout, *, deadline, **_options):
        time.sleep(deadline)
        raise kvtier.DeadlineExceeded("silent", remedy="wait")

    for call in ("namespace", "bump_namespace", "delete_namespace"):
        monkeypatch.setattr(kvtier.client.Connection, call, silent)
    for store in sides.stores:
        store.resume("r2", Budget(0.01))
        assert store.state is StoreState.WAITING
    names = ("swa", "mamba", "draft")
    began = time.monotonic()
    got = sides.get([transfer(name, hashes(2), [0, 1]) for name in names])
    assert time.monotonic() - began < 0.8
    assert got == {name: [False, False] for name in names}


# -- 10: pages of another tenant or salt -----------------------------------------------------------

SALTS = ["", "a", "b", "a@b", "\u00e9\u4e2d", "x" * 4096]


def test_kind_10_tenant_and_salt_on_every_path(kv):
    named = [{"salt": salt} for salt in SALTS]
    named += [{"tenant": tenant} for tenant in ("a", "b", "a@b")]
    stores = [
        store_for(kv, pool_with_heads(FIRST, seed=number), exists_deadline=5.0, **names)
        for number, names in enumerate(named)
    ]
    sides = [sides_for(kv, "mamba", seed=number, **names)[0] for number, names in enumerate(named)]
    for number, (store, side) in enumerate(zip(stores, sides, strict=True)):
        asked = [transfer("mamba", hashes(2, number), [0, 1])]
        assert store.set(hashes(2, number), [0, 1]) == [True, True]
        assert side.set(asked) == {"mamba": [True, True]}
        assert [one.exists(hashes(2, number)) for one in stores] == [
            2 * (one is store) for one in stores
        ]
        assert [one.get(hashes(1, number), [7]) == [True] for one in stores] == [
            one is store for one in stores
        ]
        assert [one.get(asked)["mamba"] == [True, True] for one in sides] == [
            one is side for one in sides
        ]
        assert [one.stores[0].present(hashes(2, number))[0] for one in sides] == [
            one is side for one in sides
        ]
    stores[1].clear()
    assert [one.exists(hashes(2, number)) for number, one in enumerate(stores)] == [
        0 if one is stores[1] else 2 for one in stores
    ]


# -- 15: the daemon dies ---------------------------------------------------------------------------


@pytest.mark.parametrize("plane", ["auto", "grpc"])
def test_kind_15_daemondeath_and_return(daemon, plane):
    with kvtier.connect(daemon.url, plane=plane) as kv:
        times = {f"{call}_deadline": 0.5 for call in ("exists", "get", "set")}
        primary = store_for(kv, pool_with_heads(FIRST), **times)
        sides, pools = sides_for(kv, "mamba", **times)
        asked = [transfer("mamba", hashes(2), [0, 1])]
        comes(lambda: all(primary.set(hashes(2), [0, 1])) and all(sides.set(asked)["mamba"]))
        daemon.kill()
        for _ in range(5):
            began = time.monotonic()
            assert sides.exists(primary, hashes(2), asked).longest == 0
            assert sides.get(asked) == {"mamba": [False, False]}
            assert primary.set(hashes(2), [0, 1]) == [False, False]
            assert time.monotonic() - began < 3.0
        daemon.start()
        comes(lambda: all(primary.set(hashes(2), [0, 1])) and all(sides.set(asked)["mamba"]))
        right = pools["mamba"].temporal_buffer.clone()
        pools["mamba"].temporal_buffer[:2] = 0
        comes(lambda: sides.exists(primary, hashes(2), asked).longest == 2)
        comes(lambda: sides.get(asked) == {"mamba": [True, True]})
        assert torch.equal(pools["mamba"].temporal_buffer, right)


# -- 23: pages of weights that were left -----------------------------------------------------------


def test_kind_23_weights_on_nvme_after_a_restart(forker, tmp_path):
    settings = ("host.bytes=64MiB", f"nvme.paths={tmp_path}/nvme", "nvme.bytes=64MiB")
    with (
        daemon_of_its_own(forker, *settings) as daemon,
        kvtier.connect(daemon.url, deadline=10) as kv,
    ):
        sides, _ = sides_for(kv, "mamba", get_deadline=5.0, set_deadline=5.0)
        asked = [transfer("mamba", hashes(2), [0, 1])]
        assert sides.set(asked) == {"mamba": [True, True]}
        assert kv.flush().pages_lost == 0
        sides.stores[0].resume("r2")
        daemon.kill()
        daemon.start()
        again, _ = sides_for(kv, "mamba", exists_deadline=5.0, get_deadline=5.0)
        comes(lambda: all(again.set([transfer("mamba", hashes(1, prompt=1), [0])])["mamba"]))
        assert again.get(asked) == {"mamba": [False, False]}
        assert again.stores[0].present(hashes(2)) == [False, False]


# -- 27: ranks that see different pages ------------------------------------------------------------


def test_kind_27_ranks_of_which_one_has_lost_a_page(kv):
    """Page 5 of 8 of the last of four; each rank is asked, none knows of the others."""
    ranks = [Ranks(tp_rank=rank, tp_size=4) for rank in range(4)]
    primaries = [
        store_for(kv, pool_with_heads(FIRST, seed=rank.tp_rank), ranks=rank, exists_deadline=5.0)
        for rank in ranks
    ]
    sides = [
        sides_for(kv, "mamba", seed=rank.tp_rank, model=replace(MODEL, ranks=rank))[0]
        for rank in ranks
    ]
    every = list(range(PAGES))
    asked = [transfer("mamba", hashes(PAGES), every)]
    for primary, side in zip(primaries, sides, strict=True):
        primary.set(hashes(PAGES), every)
        side.set(asked)
    state = [transfer("mamba", [""], policy="trailing_pages")]

    def lengths():
        pairs = zip(sides, primaries, strict=True)
        return [side.exists(primary, hashes(PAGES), state).lengths for side, primary in pairs]

    assert lengths() == [[1, 2, 3, 4, 5, 6, 7, 8]] * 4
    part = sides[3].stores[0]._parts[0].namespace
    part.delete(part.keys_from(hashes(PAGES)[4:5]))
    assert lengths() == [[1, 2, 3, 4, 6, 7, 8]] * 4
    part = primaries[3]._parts[0].namespace
    part.delete(part.keys_from(hashes(PAGES)[6:7]))
    assert lengths() == [[1, 2, 3, 4, 6]] * 4


# -- 39: hits that take longer than computing ------------------------------------------------------


def test_kind_39_slowhit_what_came_in_time_counts(kv, monkeypatch):
    """A get that is cut off brings the whole pages that it has, and the call ends."""
    pool = pool_with_heads(FIRST)
    store = store_for(kv, pool, get_deadline=1.0)
    store.set(hashes(PAGES), list(range(PAGES)))
    monkeypatch.setattr(runs, "_RUN_BYTES", 1)  # page by page
    real = kvtier.client.Namespace.get

    def slow(namespace, keys, **options):
        time.sleep(0.15)
        return real(namespace, keys, **options)

    monkeypatch.setattr(kvtier.client.Namespace, "get", slow)
    right = pool.kv_buffer.clone()
    pool.kv_buffer.zero_()
    began = time.monotonic()
    got = store.get(hashes(PAGES), list(range(PAGES)))
    assert time.monotonic() - began < 3.0
    count = got.index(False)
    assert 0 < count < PAGES
    assert got == [True] * count + [False] * (PAGES - count)
    assert torch.equal(pool.kv_buffer[:, :count], right[:, :count])
