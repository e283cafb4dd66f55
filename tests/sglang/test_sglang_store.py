"""Pages of a host pool to a real daemon and back: every layout, and what failures leave behind."""

from __future__ import annotations

import signal
import threading
import time

import pytest
import torch
from pool_rig import PAGES, hashes, latent_pool, pool_with_heads, store_for

import kvtier
from kvtier_sglang.layouts import Ranks
from kvtier_sglang.states import StoreState

POOLS = [
    pytest.param(pool_with_heads, name, id=f"heads-{name}")
    for name in ("layer_first", "page_first", "page_first_direct", "page_head")
] + [
    pytest.param(latent_pool, name, id=f"latent-{name}")
    for name in ("layer_first", "page_first", "page_first_direct")
]


def buffers(pool):
    whole = pool.kv_buffer
    return list(whole) if isinstance(whole, tuple) else [whole]


def clear(pool):
    for buffer in buffers(pool):
        buffer.fill_(-1)


def same(pool, other):
    pairs = zip(buffers(pool), buffers(other), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


def comes(call, seconds=5.0):
    until = time.monotonic() + seconds
    while not call():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize(("make", "mem_layout"), POOLS)
def test_pages_come_back_to_their_places_and_nowhere_else(kv, make, mem_layout):
    pool, empty = make(mem_layout), make(mem_layout)
    clear(empty)
    store = store_for(kv, pool)
    assert store.set(hashes(3), [6, 1, 3]) == [True] * 3
    assert store.exists(hashes(5)) == 3

    other = make(mem_layout, seed=9)
    clear(other)
    reader = store_for(kv, other)
    assert reader.get(hashes(5), [6, 1, 3, 0, 2]) == [True] * 3 + [False] * 2
    untouched = [place for place in range(PAGES) if place not in (6, 1, 3)]
    assert reader.get(hashes(2), untouched[:2]) == [True] * 2
    # The rest of the pool, written by the store itself from the places of the first: all equal.
    assert store.set(hashes(PAGES, prompt=1), list(range(PAGES))) == [True] * PAGES
    assert reader.get(hashes(PAGES, prompt=1), list(range(PAGES))) == [True] * PAGES
    assert same(pool, other)
    clear(other)
    assert reader.get(hashes(1, prompt=7), [0]) == [False]
    assert same(other, empty)


def test_sizes_of_keys_and_values_that_differ(kv):
    pool = pool_with_heads("page_first", dim=24, v_dim=16)
    other = pool_with_heads("page_first", dim=24, v_dim=16, seed=5)
    places = list(range(PAGES))
    assert all(store_for(kv, pool).set(hashes(PAGES), places))
    assert all(store_for(kv, other).get(hashes(PAGES), places))
    assert same(pool, other)


def test_a_page_of_which_a_part_is_gone_is_a_miss(kv):
    pool = pool_with_heads("page_first_direct")
    store = store_for(kv, pool)
    store.set(hashes(3), [0, 1, 2])
    part = store._parts[1].namespace
    part.delete(part.keys_from(hashes(2)[1:]))
    assert store.exists(hashes(3)) == 1
    assert store.get(hashes(3), [0, 1, 2]) == [True, False, False]


def test_a_page_without_its_sibling_shard_is_a_miss_for_all_ranks(kv):
    pool = pool_with_heads("page_first_direct")
    ranks = [store_for(kv, pool, ranks=Ranks(tp_rank=rank, tp_size=2)) for rank in range(2)]
    ranks[0].set(hashes(2), [0, 1])
    assert [rank.exists(hashes(2)) for rank in ranks] == [0, 0]
    ranks[1].set(hashes(2), [0, 1])
    assert [rank.exists(hashes(2)) for rank in ranks] == [2, 2]


def test_flat_pages_are_the_pages_of_the_pool(kv):
    pool = pool_with_heads("page_first_direct")
    store = store_for(kv, pool)
    flat = [pool.kv_buffer[:, place].flatten() for place in (4, 2)]
    assert store.set_flat(hashes(2), flat) == [True, True]
    other = pool_with_heads("page_first_direct", seed=3)
    assert store_for(kv, other).get(hashes(2), [4, 2]) == [True, True]
    assert torch.equal(other.kv_buffer[:, [4, 2]], pool.kv_buffer[:, [4, 2]])
    for wrong in (torch.cat(flat), flat[0][1:], flat[0].view(2, -1)):
        with pytest.raises(kvtier.LayoutError, match="of this pool it would be"):
            store.set_flat(hashes(1, prompt=1), [wrong])
    out = [torch.zeros_like(page) for page in flat]
    assert store.get_flat([*hashes(2), *hashes(1, prompt=2)], [*out, out[0].clone()]) == [
        True,
        True,
        False,
    ]
    assert all(torch.equal(mine, page) for mine, page in zip(out, flat, strict=True))


@pytest.mark.parametrize("bumped", [(0, 1), (0,), (1,)], ids=str)
def test_a_bump_makes_misses_and_what_is_stored_after_it_is_found(kv, daemon, bumped):
    pool = pool_with_heads("page_first_direct")
    store = store_for(kv, pool)
    store.set(hashes(2), [0, 1])
    with kvtier.connect(daemon.url) as other:
        for part in [store._parts[number] for number in bumped]:
            other.bump_namespace(part.namespace.layout)
    assert store.exists(hashes(2)) == 0
    assert store.get(hashes(2), [0, 1]) == [False, False]
    comes(lambda: all(store.set(hashes(2), [0, 1])))
    assert store.exists(hashes(2)) == 2


def test_a_bump_to_other_weights_makes_misses_until_the_engine_has_them(kv, daemon):
    pool = pool_with_heads("page_first_direct")
    store = store_for(kv, pool)
    store.set(hashes(2), [0, 1])
    assert len(store.families) == 2
    with kvtier.connect(daemon.url) as other:
        for part in store._parts:
            other.bump_namespace(part.namespace.layout, "r2")
    for _ in range(3):
        assert store.exists(hashes(2)) == 0
        assert store.set(hashes(2), [0, 1]) == [False, False]
        # Routers are told of nothing that this server is refused.
        assert store.state is StoreState.REFUSED
        assert store.families == ()


def test_what_is_refused_when_a_daemon_comes_later_is_a_miss(kv, daemon):
    """Nothing could be opened when it was attached; then the daemon has other weights there."""
    pool = pool_with_heads("page_first_direct")
    layouts = [part.namespace.layout for part in store_for(kv, pool)._parts]
    for layout in layouts:
        kv.bump_namespace(layout, "r2")
    daemon.kill()
    with kvtier.connect(daemon.url, deadline=5) as late:
        store = store_for(late, pool)
        assert store.exists(hashes(2)) == 0
        assert store.state is StoreState.REFUSED
        daemon.start()
        until = time.monotonic() + 3.0
        while time.monotonic() < until:
            assert store.exists(hashes(2)) == 0
            assert store.get(hashes(2), [0, 1]) == [False, False]
            assert store.set(hashes(2), [0, 1]) == [False, False]
            time.sleep(0.05)
        assert store.state is StoreState.REFUSED


def test_a_store_that_was_made_without_a_daemon_opens_when_there_is_one(daemon):
    pool = pool_with_heads("page_first_direct")
    daemon.kill()
    with kvtier.connect(daemon.url, deadline=5) as kv:
        store = store_for(kv, pool)
        assert store.set(hashes(2), [0, 1]) == [False, False]
        daemon.start()
        comes(lambda: all(store.set(hashes(2), [0, 1])), seconds=30)
        assert store.state is StoreState.OPEN
        assert store.exists(hashes(2)) == 2


def test_clear_deletes_and_goes_on(kv):
    store = store_for(kv, pool_with_heads("page_first_direct"))
    store.set(hashes(2), [0, 1])
    store.clear()
    assert store.exists(hashes(2)) == 0
    assert store.set(hashes(2), [0, 1]) == [True, True]
    assert store.exists(hashes(2)) == 2
    store.clear()
    store.clear()


def test_what_was_moved_is_told_once(kv):
    store = store_for(kv, pool_with_heads("page_first_direct"))
    store.set(hashes(3), [0, 1, 2])
    store.get(hashes(2), [0, 1])
    store.get(hashes(1, prompt=8), [0])
    put, got = store.put.take(), store.got.take()
    assert (put.pages, got.pages) == ([3], [2])
    assert put.bandwidths[0] > 0
    assert store.got.take().pages == []


@pytest.mark.parametrize("plane", ["auto", "grpc"])
def test_calls_to_a_stopped_daemon_end_in_time(daemon, plane):
    pool = pool_with_heads("page_first_direct")
    with kvtier.connect(daemon.url, plane=plane) as kv:
        store = store_for(kv, pool, get_deadline=0.3, set_deadline=0.3)
        store.set(hashes(2), [0, 1])
        daemon.signal(signal.SIGSTOP)
        try:
            for call in (
                lambda: store.exists(hashes(2, prompt=3)),
                lambda: store.get(hashes(2, prompt=3), [0, 1]),
                lambda: store.set(hashes(2, prompt=3), [0, 1]),
            ):
                began = time.monotonic()
                answer = call()
                assert answer == 0 or answer == [False, False]
                assert time.monotonic() - began < 1.0
        finally:
            daemon.signal(signal.SIGCONT)
        comes(lambda: all(store.set(hashes(2, prompt=3), [0, 1])))


def test_nothing_is_written_after_a_get_has_returned(daemon):
    """The daemon is stopped somewhere in the middle of the copies, and goes on when they count as
    missed: what it still sends must not reach the pool.
    """
    pool = pool_with_heads("page_first_direct", dim=2048, v_dim=2048, pages=64)
    places = list(range(64))
    came = []
    with kvtier.connect(daemon.url, plane="grpc") as kv:
        store = store_for(kv, pool, get_deadline=0.5)
        assert all(store.set(hashes(64), places))
        delay_s = 0.002
        for _ in range(30):
            comes(lambda: all(store.get(hashes(1), [0])))
            stopper = threading.Timer(delay_s, daemon.signal, [signal.SIGSTOP])
            clear(pool)
            stopper.start()
            got = store.get(hashes(64), places)
            stopper.join()
            began = pool.kv_buffer.flatten(2).ne(-1).any(dim=2)
            came.append(int(began.sum()))
            pool.kv_buffer.fill_(7)
            daemon.signal(signal.SIGCONT)
            time.sleep(0.2)
            assert (pool.kv_buffer == 7).all(), f"written after a get of {sum(got)} of 64 pages"
            if sum(0 < count < 128 for count in came) >= 3:
                break
            # How long a get takes is the machine's to say.
            delay_s *= 1.6 if came[-1] < 64 else 0.6
    assert any(0 < count < 128 for count in came), f"no get was stopped in the middle: {came}"


def test_a_long_prompt_is_looked_up_in_one_call(kv):
    """More pages than are looked up in one step, present up to somewhere in the middle of one."""
    store = store_for(kv, latent_pool("page_first_direct"), exists_deadline=2.0)
    named = hashes(4000)
    for begin in range(0, 1400, PAGES):
        assert all(store.set(named[begin : begin + PAGES], list(range(PAGES))))
    assert store.exists(named) == 1400
    assert store.exists(named[:1400]) == 1400
    assert store.exists(named[100:]) == 1300
    assert store.exists([]) == 0


def test_what_was_there_before_is_not_moved_again(kv):
    store = store_for(kv, pool_with_heads("page_first_direct"))
    store.set(hashes(2), [0, 1])
    store.put.take()
    store.set(hashes(3), [0, 1, 2])
    put = store.put.take()
    assert (put.asked, put.done, put.already, put.pages) == (3, 3, 2, [3])
    assert 0 < len(put.bandwidths) <= 1
    store.set(hashes(3), [0, 1, 2])
    put = store.put.take()
    assert (put.already, put.pages, put.bandwidths) == (3, [3], [])
    store.get(hashes(5), [0, 1, 2, 3, 4])
    got = store.got.take()
    assert (got.asked, got.done, got.calls, got.late) == (5, 3, 1, 0)
