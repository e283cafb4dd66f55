"""What comes back is what was put, in every kind of memory, one outcome a key."""

from __future__ import annotations

import array
import random

import ml_dtypes
import numpy as np
import pytest

import kvtier
from kvtier.client.keys import KeyChain
from kvtier.core.page import DeleteCode

GetCode, PutCode = kvtier.GetCode, kvtier.PutCode


def test_round_trip_with_new_memory(ns, make_pages):
    pages = make_pages(3)
    keys = ns.keys(range(14))
    assert len(keys) == 3
    put = ns.put(keys, pages)
    assert [item.reason for item in put] == [PutCode.STORED] * 3
    assert put.stored == put.prefix == 3
    put.raise_for_refused()

    got = ns.get(keys)
    assert [item.reason for item in got] == [GetCode.HIT] * 3
    assert got.pages == pages
    assert (got.prefix, got.prefix_tokens, got.hits) == (3, 12, 3)
    assert got[0].tier is kvtier.Tier.HOST
    assert got[0].codec is kvtier.Codec.RAW
    assert got[0].lossy is False
    assert got[1].ref == put[1].ref
    assert got[1].ref.tier is kvtier.Tier.HOST

    found = ns.lookup(keys)
    assert found.reasons == [GetCode.HIT] * 3
    assert (found.prefix, found.prefix_tokens, found.hits) == (3, 12, 3)
    assert found[2].tier is kvtier.Tier.HOST


def test_misses_have_their_own_outcome_and_no_bytes(ns, make_pages):
    pages = make_pages(4)
    keys = ns.keys(range(16))
    ns.put([keys[0], keys[2]], [pages[0], pages[2]], chain=False)
    got = ns.get(keys)
    assert got.reasons == [GetCode.HIT, GetCode.MISS, GetCode.HIT, GetCode.MISS]
    assert got.pages == [pages[0], None, pages[2], None]
    assert (got.prefix, got.hits) == (1, 2)
    assert got[1].tier is got[1].ref is got[1].codec is None
    assert ns.lookup(keys).reasons == got.reasons


def test_a_result_has_no_truth_value(ns, make_pages):
    keys = ns.keys(range(8))
    for result in (ns.lookup(keys), ns.get(keys), ns.put(keys, make_pages(2)), ns.delete(keys)):
        with pytest.raises(TypeError, match="no truth value"):
            bool(result)
        assert len(result) == 2
        assert len(result[:1]) == 1
        assert result[-1] == result[1]
        with pytest.raises(IndexError):
            result[2]


def test_an_empty_batch_makes_no_call(ns, daemon):
    before = daemon.calls.copy()
    assert len(ns.get([])) == len(ns.put([], [])) == len(ns.lookup([])) == len(ns.delete([])) == 0
    assert ns.keys([1, 2, 3]) == []
    assert ns.get([], out=bytearray()).prefix == 0
    with ns.lease([]) as held:
        assert held.pages() == []
    assert daemon.calls == before


def test_duplicates_in_one_batch(ns, make_pages):
    pages = make_pages(2)
    key = ns.keys(range(4))[0]
    put = ns.put([key, key], pages, chain=False)
    assert put.reasons == [PutCode.STORED, PutCode.EXISTS]
    assert put.stored == 2
    assert put[1].ref is None
    got = ns.get([key, key, bytes(32), key])
    assert got.pages == [pages[0], pages[0], None, pages[0]]


def test_keys_that_are_none_are_refused_before_anything_is_sent(ns, daemon, make_pages):
    before = daemon.calls.copy()
    good = bytes(32)
    for method in (ns.lookup, ns.get, ns.delete, ns.lease):
        with pytest.raises(kvtier.KeyLengthError, match=r"keys\[1\] has 31 bytes"):
            method([good, bytes(31)])
        with pytest.raises(kvtier.KeyLengthError, match=r"keys\[0\] is a str"):
            method(["ab" * 32])
        with pytest.raises(kvtier.KeyLengthError, match="keys is one bytes"):
            method(good)
    with pytest.raises(kvtier.KeyLengthError, match=r"keys\[0\] has 0 bytes"):
        ns.put([b""], make_pages(1))
    assert daemon.calls == before
    assert ns.lookup([bytearray(32), memoryview(good)]).hits == 0


def numpy_rows(layout, count):
    return np.zeros((count, layout.raw_bytes // 2), np.uint16)


def shaped(layout, count):
    return np.zeros((count, 2, 2, 4, 2, 16), ml_dtypes.bfloat16)


def strided(layout, count):
    return np.zeros((count, 2, layout.raw_bytes // 2), np.uint16)[:, 1]


def inner_strided(layout, count):
    return np.zeros((count, layout.raw_bytes), np.uint8)[:, :, None].repeat(2, 2)[:, :, 0]


def one_buffer(layout, count):
    return bytearray(count * layout.raw_bytes)


def equal_cut(layout, count):
    return np.zeros((2, count * layout.raw_bytes // 2), np.uint8)


def many_buffers(layout, count):
    return [bytearray(layout.raw_bytes) for _ in range(count)]


def mixed(layout, count):
    kinds = [bytearray(layout.raw_bytes), np.zeros(layout.raw_bytes // 4, np.uint32)]
    kinds.append(array.array("d", [0.0] * (layout.raw_bytes // 8)))
    kinds.append(memoryview(bytearray(layout.raw_bytes)))
    kinds.append(np.zeros((layout.raw_bytes // 4, 2), np.uint32)[:, 0])
    return kinds[:count]


def as_pages(memory, count):
    """What `memory` holds, as one bytes a page."""
    if isinstance(memory, list):
        return [np.ascontiguousarray(np.asarray(page)).tobytes() for page in memory]
    data = np.ascontiguousarray(np.asarray(memory)).tobytes()
    size = len(data) // count
    return [data[at : at + size] for at in range(0, len(data), size)]


@pytest.mark.parametrize(
    "make",
    [numpy_rows, shaped, strided, inner_strided, one_buffer, equal_cut, many_buffers, mixed],
)
def test_memory_of_every_kind_is_filled_in_place_and_read(ns, layout, make_pages, make):
    count = 5
    pages = make_pages(count)
    keys = ns.keys(range(4 * count))
    ns.put(keys, pages)
    out = make(layout, count)
    got = ns.get(keys, out=out)
    assert got.hits == count
    assert got.pages == ()
    assert as_pages(out, count) == pages

    again = ns.keys(range(100, 100 + 4 * count))
    assert ns.put(again, out).reasons == [PutCode.STORED] * count
    assert ns.get(again).pages == pages


@pytest.mark.parametrize("make", [numpy_rows, strided, one_buffer, many_buffers])
@pytest.mark.parametrize("ids", [[6, 0, 3], np.array([6, 0, 3]), (6, 0, 3)])
def test_rows_of_a_pool(ns, layout, make_pages, make, ids):
    pages = make_pages(3)
    keys = ns.keys(range(12))
    ns.put(keys, pages)
    pool = make(layout, 8)
    assert ns.get(keys, out=pool, at=ids).hits == 3
    empty = bytes(layout.raw_bytes)
    expected = [pages[1], empty, empty, pages[2], empty, empty, pages[0], empty]
    assert as_pages(pool, 8) == expected
    again = ns.keys(range(50, 62))
    assert ns.put(again, pool, at=ids).stored == 3
    assert ns.get(again).pages == pages


def test_a_miss_leaves_the_other_pages_right(ns, layout, make_pages):
    pages = make_pages(3)
    keys = ns.keys(range(12))
    ns.put(keys[:1], pages[:1])
    ns.put(keys[2:], pages[2:])
    out = np.full((3, layout.raw_bytes), 0xA5, np.uint8)
    got = ns.get(keys, out=out)
    assert got.reasons == [GetCode.HIT, GetCode.MISS, GetCode.HIT]
    assert out[0].tobytes() == pages[0]
    assert out[2].tobytes() == pages[2]


@pytest.mark.parametrize(
    ("out", "match"),
    [
        (bytearray(2047), "has 2047 bytes, needed are 2048"),
        (np.zeros((2, 1023), np.uint8), "page 0 has 1023 bytes, needed are 1024"),
        (np.zeros((3, 1024), np.uint8), "has 3072 bytes, needed are 2048"),
        ([bytearray(1024)], "has 1 pages, needed are 2"),
        ([bytearray(1024), bytearray(1023)], r"out\[1\]: its size has 1023 bytes, needed are 1024"),
        (
            [bytearray(1024), np.zeros(9, np.int64)],
            r"out\[1\]: page 0 has 72 bytes, needed are 1024",
        ),
        ([bytearray(1024), None], r"out\[1\] is None"),
        (bytes(2048), "read-only"),
        ([bytearray(1024), bytes(1024)], r"out\[1\] is read-only"),
        (np.zeros((2048, 2), np.uint8)[:, 0], "strided"),
        (np.array([None, None]), "array of objects"),
        ("text", "out is a str"),
        (7, "out is a int"),
    ],
)
def test_memory_that_does_not_fit_is_refused_before_anything_is_sent(ns, daemon, out, match):
    before = daemon.calls.copy()
    with pytest.raises(kvtier.PageSizeError, match=match):
        ns.get([bytes(32), bytes(32)], out=out)
    assert daemon.calls == before


@pytest.mark.parametrize(
    ("at", "match"),
    [
        ([0], "at has 1 page ids, needed are 2"),
        ([0, 8], r"at\[1\] is 8, out has 8 pages"),
        ([-1, 0], r"at\[0\] is -1"),
        ([3, 3], "twice"),
        ([0.5, 1], r"at\[0\] is 0.5"),
    ],
)
def test_page_ids_that_name_no_page_are_refused(ns, at, match):
    with pytest.raises(kvtier.PageSizeError, match=match):
        ns.get([bytes(32), bytes(32)], out=np.zeros((8, 1024), np.uint8), at=at)


def test_a_pool_with_rows_of_another_size_is_refused(ns):
    with pytest.raises(kvtier.PageSizeError, match="one row of the pool has 512 bytes"):
        ns.get([bytes(32)], out=np.zeros((8, 512), np.uint8), at=[0])


def test_delete(ns, make_pages):
    keys = ns.keys(range(8))
    ns.put(keys[:1], make_pages(1))
    deleted = ns.delete(keys)
    assert deleted.reasons == list(deleted) == [DeleteCode.DELETED, DeleteCode.ABSENT]
    assert deleted.deleted == 1
    assert ns.get(keys).hits == 0


def test_batches_over_the_limits_of_the_daemon_are_cut(kv, ns, daemon, layout, make_pages):
    daemon.limits.update(
        keys_per_call_max=10, pages_per_put_max=7, bytes_per_call_max=5 * layout.raw_bytes
    )
    with kvtier.connect(daemon.url, deadline=5.0) as other:
        ns = other.namespace(layout)
        pages = make_pages(23)
        keys = ns.keys(range(4 * 23))
        daemon.calls.clear()
        assert ns.put(keys, pages).reasons == [PutCode.STORED] * 23
        assert ns.get(keys).pages == pages
        assert ns.lookup(keys).hits == 23
        assert ns.delete(keys).deleted == 23
        assert daemon.calls == {"put": 5, "get": 5, "lookup": 3, "delete": 3}


def test_chunks_stay_under_the_message_limit_of_the_daemon(daemon, layout, make_pages):
    daemon.limits["message_bytes_max"] = 4096
    with kvtier.connect(daemon.url, deadline=5.0) as other:
        ns = other.namespace(layout)
        pages = make_pages(20)
        keys = ns.keys(range(80))
        assert ns.put(keys, pages).stored == 20
        assert ns.get(keys).pages == pages


def test_chains_say_what_comes_before_a_page(ns, daemon, make_pages):
    pages = make_pages(6)
    keys = ns.keys(range(24))
    ns.put(keys[:2], pages[:2])
    ns.put(keys[2:4], pages[2:4], session="s1", ttl=1.5)
    more = ns.keys(range(16, 24), parent=keys[:4])
    assert more == keys[4:]
    assert isinstance(keys[4:], KeyChain)
    assert (more.parent, more.depth) == (keys[3], 4)
    ns.put(list(more), pages[4:], parent=keys[3], depth=4)
    by_key = {place[2]: stored for place, stored in daemon.pages.items()}
    assert [by_key[key].parent for key in keys] == [b"", *keys[:5]]
    assert [by_key[key].depth for key in keys] == list(range(6))
    assert [by_key[key].session for key in keys] == ["", "", "s1", "s1", "", ""]
    assert by_key[keys[2]].ttl_ms == 1500

    loose = [bytes([n]) * 32 for n in range(2)]
    ns.put(loose, pages[:2], chain=False)
    by_key = {place[2]: stored for place, stored in daemon.pages.items()}
    assert [by_key[key].parent for key in loose] == [b"", b""]


@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 7, 8, 9, 40])
def test_only_full_pages_have_keys_and_hits_never_pass_what_is_stored(ns, make_pages, tokens):
    keys = ns.keys(range(tokens))
    assert len(keys) == tokens // 4
    stored = len(keys) // 2
    ns.put(keys[:stored], make_pages(stored))
    assert ns.get(keys).prefix_tokens == stored * 4 <= tokens


def test_salt_and_tenant_keep_apart(kv, layout, make_pages):
    plain = kv.namespace(layout)
    salted = kv.namespace(layout, salt=b"s")
    other = kv.namespace(layout, tenant="other")
    pages = make_pages(1)
    keys = plain.keys(range(4))
    plain.put(keys, pages)
    assert salted.keys(range(4)) != keys
    assert salted.get(keys).hits == other.get(keys).hits == 0
    assert len({plain.fingerprint, salted.fingerprint, other.fingerprint}) == 3


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"ttl": -1}, kvtier.LimitExceeded),
        ({"ttl": float("nan")}, kvtier.LimitExceeded),
        ({"session": "x" * 257}, kvtier.LimitExceeded),
        ({"session": "\udc80"}, kvtier.LimitExceeded),
        ({"session": b"x"}, kvtier.LimitExceeded),
        ({"session": None}, kvtier.LimitExceeded),
        ({"depth": -1}, kvtier.LimitExceeded),
        ({"priority": 2**31}, kvtier.LimitExceeded),
        ({"durable": "disk"}, kvtier.LimitExceeded),
        ({"codec": 2}, kvtier.LimitExceeded),
        ({"codec": None}, kvtier.LimitExceeded),
        ({"parent": b"short"}, kvtier.KeyLengthError),
        ({"colour": 1}, TypeError),
    ],
)
def test_arguments_of_put_are_checked(ns, make_pages, options, kind):
    with pytest.raises(kind):
        ns.put(ns.keys(range(4)), make_pages(1), **options)


def test_a_codec_is_no_string(ns, make_pages):
    keys = ns.keys(range(4))
    with pytest.raises(kvtier.LimitExceeded, match="codec is 'fp8'") as of_put:
        ns.put(keys, make_pages(1), codec="fp8")
    with pytest.raises(kvtier.LimitExceeded, match="codec is 'fp8'") as of_get:
        ns.get(keys, codec="fp8")
    assert "kvtier.Codec.FP8" in of_put.value.remedy
    assert of_get.value.remedy == of_put.value.remedy


def test_durability_and_hints_are_sent(ns, daemon, make_pages):
    ns.put(ns.keys(range(4)), make_pages(1), durable="nvme", priority=-3, session="s")
    assert daemon.puts[-1].durability == 2
    assert daemon.puts[-1].priority == -3
    assert daemon.puts[-1].session == "s"


@pytest.mark.parametrize("seed", range(5))
def test_random_batches_equal_a_dict(ns, make_pages, seed):
    rng = random.Random(seed)
    keys = [rng.randbytes(32) for _ in range(12)]
    pages = make_pages(12, seed)
    model = {}
    for step in range(40):
        some = rng.sample(range(12), rng.randrange(1, 8))
        chosen = [keys[index] for index in some]
        if rng.random() < 0.4:
            result = ns.put(chosen, [pages[index] for index in some], chain=False)
            expected = [PutCode.EXISTS if key in model else PutCode.STORED for key in chosen]
            model.update(zip(chosen, (pages[index] for index in some), strict=True))
            assert result.reasons == expected, f"seed {seed}, step {step}"
        elif rng.random() < 0.3:
            ns.delete(chosen)
            for key in chosen:
                model.pop(key, None)
        else:
            assert ns.get(chosen).pages == [model.get(key) for key in chosen], (
                f"seed {seed}, step {step}"
            )
