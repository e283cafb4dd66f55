"""No byte that was not put under this key comes back as a hit."""

from __future__ import annotations

import dataclasses

import pytest

import kvtier

GetCode, PutCode = kvtier.GetCode, kvtier.PutCode


def test_a_wrong_byte_is_got_again_once_then_it_counts(ns, daemon, make_pages):
    pages = make_pages(3)
    keys = ns.keys(range(12))
    ns.put(keys, pages)
    daemon.calls.clear()
    daemon.flip_gets = 1
    assert ns.get(keys).pages == pages
    assert daemon.calls["get"] == 2

    daemon.calls.clear()
    daemon.flip_gets = 4
    got = ns.get(keys)
    assert got.reasons == [GetCode.CORRUPT, GetCode.HIT, GetCode.HIT]
    assert got.pages == [None, *pages[1:]]
    assert got.prefix == 0
    assert daemon.calls["get"] == 2


def test_a_corrupt_page_stays_so_when_it_cannot_be_got_again(ns, daemon, make_pages):
    keys = ns.keys(range(8))
    pages = make_pages(2)
    ns.put(keys, pages)
    daemon.flip_gets = 1
    daemon.raise_in = {}
    original = daemon.calls

    class OneCall(type(original)):
        def __setitem__(self, name, value):
            super().__setitem__(name, value)
            if name == "get" and value == 2:
                daemon.raise_in["get"] = kvtier.Busy("full", remedy="wait")

    daemon.calls = OneCall()
    assert ns.get(keys).reasons == [GetCode.CORRUPT, GetCode.HIT]


@pytest.mark.parametrize("field", ["key", "fingerprint", "generation", "shard", "sum"])
def test_the_right_bytes_under_another_name_are_no_hit(ns, kv, daemon, layout, make_pages, field):
    pages = make_pages(2)
    keys = ns.keys(range(8))
    ns.put(keys[:1], pages[:1])
    (stored,) = daemon.pages.values()
    target, key = ns, keys[0]
    if field == "key":
        key = keys[1]
    elif field == "fingerprint":
        target = kv.namespace(layout, tenant="another")
    elif field == "generation":
        daemon.bump(ns.fingerprint)
        target = kv.namespace(layout)
    elif field == "sum":
        stored.payload_sum = bytes(16)
    else:
        whole = dataclasses.replace(layout, shard_count=2)
        a, b = (kv.namespace(whole.with_shard(dataclasses.replace(layout.shard, index=n)))
                for n in (0, 1))  # fmt: skip
        a.put(keys[:1], pages[:1])
        stored = list(daemon.pages.values())[-1]
        target = b
    number = daemon.families[target.fingerprint].number
    daemon.pages[(number, target.layout.shard.index, key)] = stored
    assert target.lookup([key]).hits == 1
    got = target.get([key])
    assert got.reasons == [GetCode.CORRUPT]
    assert got.pages == [None]


def test_a_page_of_another_length_or_codec_is_no_hit(ns, daemon, make_pages):
    keys = ns.keys(range(8))
    ns.put(keys, make_pages(2))
    first, second = daemon.pages.values()
    first.data = first.data[:-1]
    second.codec = 2
    got = ns.get(keys)
    assert got.reasons == [GetCode.CORRUPT, GetCode.MISS]


def test_unknown_outcomes_of_a_newer_daemon_are_no_hits(ns, daemon, make_pages):
    keys = ns.keys(range(4))
    daemon.put_codes[keys[0]] = 99
    assert ns.put(keys, make_pages(1)).reasons == [PutCode.UNAVAILABLE]


def test_verify_off_and_sampled(daemon, layout, make_pages):
    pages = make_pages(64)
    with kvtier.connect(daemon.url, deadline=5.0, verify="off") as kv:
        ns = kv.namespace(layout)
        keys = ns.keys(range(256))
        ns.put(keys, pages)
        daemon.flip_gets = 64
        assert ns.get(keys).hits == 64
    with kvtier.connect(daemon.url, deadline=5.0, verify="sampled") as kv:
        ns = kv.namespace(layout)
        daemon.flip_gets = 64
        got = ns.get(keys)
        assert got.reasons.count(GetCode.CORRUPT) == 0
        assert daemon.calls["get"] == 3
        daemon.flip_gets = 128
        assert ns.get(keys).reasons.count(GetCode.CORRUPT) == 4
        daemon.flip_gets = 0


def test_the_bytes_that_are_summed_are_the_bytes_of_the_caller(ns, daemon, make_pages):
    """A daemon that got other bytes than were summed refuses them."""
    pages = make_pages(1)
    keys = ns.keys(range(4))
    daemon.put_codes[keys[0]] = int(PutCode.REFUSED)
    put = ns.put(keys, pages)
    assert put.reasons == [PutCode.REFUSED]
    with pytest.raises(kvtier.CorruptPage, match="page 0 is REFUSED; 1 of 1") as caught:
        put.raise_for_refused()
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (PutCode.STALE_GENERATION, kvtier.StaleGeneration),
        (PutCode.QUOTA, kvtier.Busy),
        (PutCode.BUSY, kvtier.Busy),
        (PutCode.TIMEOUT, kvtier.DeadlineExceeded),
        (PutCode.UNAVAILABLE, kvtier.DaemonUnavailable),
    ],
)
def test_raise_for_refused_raises_the_error_of_the_outcome(ns, daemon, make_pages, code, kind):
    keys = ns.keys(range(8))
    daemon.put_codes[keys[1]] = int(code)
    put = ns.put(keys, make_pages(2))
    assert (put.stored, put.prefix) == (1, 1)
    assert put[1].is_stored is False
    with pytest.raises(kind, match=f"page 1 is {code.name}; 1 of 2"):
        put.raise_for_refused()


@pytest.mark.parametrize(
    ("error", "get_code", "put_code"),
    [
        (kvtier.errors.Busy, GetCode.BUSY, PutCode.BUSY),
        (kvtier.errors.TierIOError, GetCode.IO_ERROR, PutCode.UNAVAILABLE),
        (kvtier.errors.DaemonUnavailable, GetCode.UNAVAILABLE, PutCode.UNAVAILABLE),
        (kvtier.errors.StaleGeneration, GetCode.STALE, PutCode.STALE_GENERATION),
        (kvtier.errors.UnknownHandle, GetCode.UNAVAILABLE, PutCode.UNAVAILABLE),
        (kvtier.errors.CorruptRecord, GetCode.CORRUPT, None),
        (kvtier.errors.LimitExceeded, None, None),
        (kvtier.errors.ChunkError, None, None),
        (kvtier.errors.NotImplementedYet, None, None),
    ],
)
def test_an_error_of_a_whole_call(ns, daemon, make_pages, error, get_code, put_code):
    keys = ns.keys(range(8))
    for method in ("get", "put", "lookup"):
        daemon.raise_in[method] = error("no", remedy="none")

    def check(call, code):
        if code is None:
            with pytest.raises(error, match="no"):
                call()
        else:
            assert call().reasons == [code] * 2

    check(lambda: ns.put(keys, make_pages(2)), put_code)
    check(lambda: ns.get(keys), get_code)
    check(lambda: ns.lookup(keys), get_code)
