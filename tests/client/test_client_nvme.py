"""Pages between host memory and NVMe as the client sees them: durable puts, prefetch, demote,
flush.
"""

from __future__ import annotations

import asyncio
import time

import pytest

import kvtier
from kvtier.client import FlushResult
from kvtier.core.page import Durability
from tests.client.test_client_failures import comes_back, within

GetCode, PutCode, Tier = kvtier.GetCode, kvtier.PutCode, kvtier.Tier
MOVES = ("prefetch", "demote")


def place(daemon, ns, key):
    return (daemon.families[ns.fingerprint].number, ns.layout.shard.index, key)


# -- durable puts ---------------------------------------------------------------------------------


def test_a_durable_put(ns, daemon, make_pages):
    keys = ns.keys(range(12))
    put = ns.put(keys, make_pages(3), durable="nvme")
    assert daemon.puts[-1].durability == Durability.NVME
    assert put.reasons == [PutCode.STORED] * 3
    assert [item.durable for item in put] == [True] * 3
    assert (put.stored, put.durable) == (3, 3)
    put.raise_for_refused()
    again = ns.put(keys, make_pages(3), durable=Durability.NVME)
    assert again.reasons == [PutCode.EXISTS] * 3
    assert (again.stored, again.durable) == (3, 3)


def test_a_put_to_host_memory_is_not_durable_and_no_error(ns, daemon, make_pages):
    put = ns.put(ns.keys(range(8)), make_pages(2))
    assert daemon.puts[-1].durability == Durability.HOST
    assert ([item.durable for item in put], put.durable) == ([False, False], 0)
    put.raise_for_refused()


def test_the_first_page_that_is_not_durable_is_named(ns, daemon, make_pages):
    keys = ns.keys(range(16))
    daemon.tiers.volatile = {keys[1], keys[3]}
    put = ns.put(keys, make_pages(4), durable="nvme")
    assert (put.stored, put.durable) == (4, 2)
    assert [item.durable for item in put] == [True, False, True, False]
    with pytest.raises(kvtier.NotDurable, match=r"page 1 is STORED .* 2 of 4 pages") as caught:
        put.raise_for_refused()
    assert caught.value.remedy


def test_a_page_that_is_not_stored_comes_before_one_that_is_not_durable(ns, daemon, make_pages):
    keys = ns.keys(range(12))
    daemon.tiers.volatile = {keys[0]}
    daemon.put_codes[keys[2]] = PutCode.BUSY
    put = ns.put(keys, make_pages(3), durable="nvme")
    assert [item.durable for item in put] == [False, True, False]
    with pytest.raises(kvtier.Busy, match="page 2 is BUSY"):
        put.raise_for_refused()


def test_a_daemon_without_nvme_stores_and_is_not_durable(ns, daemon, make_pages):
    daemon.tiers.has_nvme = False
    put = ns.put(ns.keys(range(8)), make_pages(2), durable="nvme")
    assert (put.stored, put.durable) == (2, 0)
    with pytest.raises(kvtier.NotDurable, match="page 0 is STORED"):
        put.raise_for_refused()


def test_a_daemon_from_before_nvme_stores_and_is_not_durable(kv, daemon, layout, make_pages):
    daemon.tiers.is_old = True
    daemon.limits["pages_per_put_max"] = 2
    ns = kv.namespace(layout)
    keys, pages = ns.keys(range(16)), make_pages(4)
    put = ns.put(keys, pages, durable="nvme")
    assert [opened.durability for opened in daemon.puts] == [
        Durability.NVME,
        Durability.HOST,
        Durability.HOST,
    ]
    assert put.reasons == [PutCode.STORED] * 4
    assert put.durable == 0
    assert ns.get(keys).pages == pages
    with pytest.raises(kvtier.NotDurable):
        put.raise_for_refused()
    plain = ns.put(keys, pages)
    assert plain.durable == 0
    plain.raise_for_refused()


def test_an_unimplemented_put_to_host_memory_is_an_error(ns, daemon, make_pages):
    daemon.raise_in["put"] = kvtier.NotImplementedYet("no puts", remedy="none")
    for durable in ("host", "nvme"):
        with pytest.raises(kvtier.NotImplementedYet, match="no puts"):
            ns.put(ns.keys(range(4)), make_pages(1), durable=durable)


def test_durable_puts_that_wait_in_vain_do_not_cut_off_gets(daemon, layout, make_pages):
    """A full queue of a disk says nothing of host memory."""
    with kvtier.connect(daemon.url, deadline=5.0) as kv:
        ns = kv.namespace(layout)
        keys = ns.keys(range(8))
        ns.put(keys, make_pages(2))
        daemon.stall.add("put")
        for _ in range(4):
            put = within(0.1, lambda: ns.put(keys, make_pages(2), durable="nvme", deadline=0.1))
            assert put.reasons == [PutCode.TIMEOUT] * 2
            assert put.durable == 0
        assert ns.get(keys).hits == 2
        for _ in range(3):
            ns.put(keys, make_pages(2), deadline=0.1)
        assert ns.get(keys).reasons == [GetCode.UNAVAILABLE] * 2


def test_where_a_page_was_found(ns, daemon, make_pages):
    keys = ns.keys(range(12))
    ns.put(keys, make_pages(3))
    daemon.tiers.tiers[place(daemon, ns, keys[1])] = Tier.NVME
    expected = [Tier.HOST, Tier.NVME, Tier.HOST]
    assert [item.tier for item in ns.lookup(keys)] == expected
    got = ns.get(keys)
    assert [item.tier for item in got] == expected
    assert [item.ref.tier for item in got] == expected


# -- prefetch and demote --------------------------------------------------------------------------


def test_prefetch_and_demote(ns, daemon, make_pages):
    keys = ns.keys(range(16))
    ns.put(keys[:2], make_pages(2))
    up = ns.prefetch(keys, session="s")
    assert up.reasons == [GetCode.HIT, GetCode.HIT, GetCode.MISS, GetCode.MISS]
    assert (up.prefix, up.hits, len(up), up[2]) == (2, 2, 4, GetCode.MISS)
    assert repr(up) == "<MoveResult: 2 HIT, 2 MISS>"
    with pytest.raises(TypeError, match="truth value"):
        bool(up)
    daemon.tiers.move_codes[keys[0]] = GetCode.BUSY
    down = ns.demote(keys[:2])
    assert down.reasons == [GetCode.BUSY, GetCode.HIT]
    assert (down.prefix, down.hits) == (0, 1)
    assert daemon.tiers.moves == [("prefetch", list(keys), "s"), ("demote", list(keys[:2]), "")]
    daemon.tiers.has_nvme = False
    assert ns.demote(keys[1:3]).reasons == [GetCode.REFUSED, GetCode.MISS]


@pytest.mark.parametrize("move", MOVES)
def test_moves_are_cut_to_the_limits_of_the_daemon(daemon, kv, layout, make_pages, move):
    daemon.limits["keys_per_call_max"] = 3
    ns = kv.namespace(layout)
    keys = ns.keys(range(32))
    ns.put(keys, make_pages(8))
    assert getattr(ns, move)(keys).prefix == 8
    assert [len(some) for _, some, _ in daemon.tiers.moves] == [3, 3, 2]
    assert len(getattr(ns, move)([])) == 0
    assert daemon.calls[move] == 3
    with pytest.raises(kvtier.KeyLengthError):
        getattr(ns, move)([b"short"])


@pytest.mark.parametrize("move", MOVES)
def test_moves_with_the_daemon_absent_hung_old_or_restarted(daemon, layout, make_pages, move):
    with kvtier.connect(daemon.url, deadline=5.0) as kv:
        ns = kv.namespace(layout)
        keys = ns.keys(range(8))
        ns.put(keys, make_pages(2))
        call = getattr(ns, move)
        daemon.stall.add(move)
        assert within(0.3, lambda: call(keys, deadline=0.3)).reasons == [GetCode.TIMEOUT] * 2
        daemon.stall.clear()
        daemon.boot()
        assert call(keys).prefix == 2, "opened anew within the call"
        daemon.tiers.move_codes[keys[1]] = 99
        assert call(keys).reasons == [GetCode.HIT, GetCode.IO_ERROR]
        daemon.tiers.is_old = True
        assert call(keys).reasons == [GetCode.REFUSED] * 2
        daemon.tiers.is_old = False
        daemon.stop()
        assert within(0.5, lambda: call(keys, deadline=0.5)).reasons == [GetCode.UNAVAILABLE] * 2
        daemon.start()
        daemon.tiers.move_codes.clear()
        assert comes_back(lambda: call(keys).prefix == 2)
        daemon.bump(ns.fingerprint)
        assert call(keys).reasons == [GetCode.STALE] * 2
        assert ns.is_stale


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (kvtier.Busy, GetCode.BUSY),
        (kvtier.errors.TierIOError, GetCode.IO_ERROR),
        (kvtier.errors.DirectoryError, GetCode.UNAVAILABLE),
        (kvtier.StaleGeneration, GetCode.STALE),
        (kvtier.LimitExceeded, None),
    ],
)
@pytest.mark.parametrize("move", MOVES)
def test_an_error_of_a_whole_move(ns, daemon, move, error, code):
    daemon.raise_in[move] = error("no", remedy="none")
    keys = ns.keys(range(8))
    if code is None:
        with pytest.raises(error, match="no"):
            getattr(ns, move)(keys)
    else:
        assert getattr(ns, move)(keys).reasons == [code] * 2


# -- flush ----------------------------------------------------------------------------------------


def flushed(pages, pages_lost=0):
    return FlushResult(pages=pages, pages_lost=pages_lost)


def test_flush(kv, ns, daemon, make_pages):
    keys = ns.keys(range(16))
    pages = make_pages(4)
    ns.put(keys[:3], pages[:3])
    daemon.tiers.volatile = {keys[1]}
    assert kv.flush() == flushed(2, 1)
    assert kv.flush() == flushed(0), "nothing was put since"
    ns.put(keys[3:], pages[3:])
    assert kv.flush() == flushed(1)
    assert place(daemon, ns, keys[3]) in daemon.tiers.durable


def test_flush_of_a_connection_without_a_session_asks_nobody(daemon, tmp_path):
    for url in (daemon.url, f"unix://{tmp_path}/none.sock"):
        with kvtier.connect(url, deadline=0.5) as kv:
            assert kv.flush() == flushed(0)
    assert daemon.calls["flush"] == 0
    with pytest.raises(kvtier.ClientClosed):
        kv.flush()


def test_flush_raises_where_it_cannot_say_anything_and_can_be_repeated(daemon, layout, make_pages):
    with kvtier.connect(daemon.url, deadline=5.0) as kv:
        ns = kv.namespace(layout)
        keys = ns.keys(range(8))
        ns.put(keys, make_pages(2))
        daemon.stall.add("flush")
        for _ in range(4):
            with pytest.raises(kvtier.DeadlineExceeded):
                within(0.1, lambda: kv.flush(deadline=0.1))
        assert ns.get(keys).hits == 2, "a slow disk does not cut off gets"
        daemon.stall.clear()
        daemon.tiers.is_old = True
        with pytest.raises(kvtier.NotImplementedYet):
            kv.flush()
        daemon.tiers.is_old = False
        assert kv.flush() == flushed(2)
        ns.put(ns.keys(range(100, 104)), make_pages(1))
        daemon.stop()
        with pytest.raises(kvtier.DaemonUnavailable):
            within(0.5, lambda: kv.flush(deadline=0.5))
        daemon.start()


@pytest.mark.parametrize("is_noticed", [False, True])
def test_pages_of_a_session_that_was_lost_are_counted_as_lost(
    kv, ns, daemon, make_pages, is_noticed
):
    """By a restart, or after a long silence: the daemon has forgotten what the session put."""
    keys, pages = ns.keys(range(24)), make_pages(6)
    ns.put(keys[:2], pages[:2], durable="nvme")
    ns.put(keys[2:5], pages[2:5])
    daemon.boot()
    if is_noticed:
        ns.put(keys[5:], pages[5:])
        assert kv.flush() == flushed(1, 3)
    else:
        assert kv.flush() == flushed(0, 3)
    assert kv.flush() == flushed(0), "said once"
    ns.put(ns.keys(range(100, 104)), make_pages(1))
    assert kv.flush() == flushed(1)


def test_what_a_failed_flush_had_to_say_is_said_by_the_next(kv, ns, daemon, make_pages):
    keys, pages = ns.keys(range(12)), make_pages(3)
    ns.put(keys[:2], pages[:2])
    daemon.boot()
    ns.put(keys[2:], pages[2:])
    daemon.raise_in["flush"] = kvtier.Busy("no", remedy="none")
    with pytest.raises(kvtier.Busy):
        kv.flush()
    daemon.boot()
    ns.lookup(keys)
    daemon.raise_in.clear()
    assert kv.flush() == flushed(0, 3)


# -- asyncio --------------------------------------------------------------------------------------


def test_the_asyncio_client(daemon, layout, make_pages):
    async def main():
        async with kvtier.aio.connect(daemon.url, deadline=5.0) as kv:
            assert await kv.flush() == flushed(0)
            ns = await kv.namespace(layout)
            keys, pages = ns.keys(range(16)), make_pages(4)
            daemon.tiers.volatile = {keys[1]}
            put = await ns.put(keys[:2], pages[:2], durable="nvme")
            assert (put.stored, put.durable) == (2, 1)
            with pytest.raises(kvtier.NotDurable, match="page 1"):
                put.raise_for_refused()
            await ns.put(keys[2:], pages[2:])
            assert (await ns.prefetch(keys)).prefix == 4
            assert (await ns.demote(keys)).prefix == 4
            assert await kv.flush() == flushed(2, 1)
            daemon.stall |= {"flush", "prefetch", "demote"}
            began = time.monotonic()
            moves = await asyncio.gather(
                ns.prefetch(keys, deadline=0.2), ns.demote(keys, deadline=0.2)
            )
            assert [move.reasons for move in moves] == [[GetCode.TIMEOUT] * 4] * 2
            with pytest.raises(kvtier.DeadlineExceeded):
                await kv.flush(deadline=0.2)
            assert time.monotonic() - began < 1.0
        for call in (kv.flush, lambda: ns.prefetch(keys), lambda: ns.demote(keys)):
            with pytest.raises(kvtier.ClientClosed):
                await call()

    asyncio.run(main())
