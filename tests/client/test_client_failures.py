"""With the daemon absent, stopped or restarted: an outcome for each key, in time, and back by
itself.
"""

from __future__ import annotations

import threading
import time

import pytest

import kvtier
from kvtier.core.page import LeaseCode
from tests.client.fake_daemon import FakeDaemon

GetCode, PutCode = kvtier.GetCode, kvtier.PutCode


def within(seconds, call):
    """What `call` gives; it must end within the deadline and a fifth (and some scheduling)."""
    began = time.monotonic()
    try:
        return call()
    finally:
        took = time.monotonic() - began
        assert took < seconds * 1.2 + 0.1, f"took {took:.3f} s with a deadline of {seconds} s"


def test_absent_daemon(tmp_path, layout, make_pages):
    with kvtier.connect(f"unix://{tmp_path}/none.sock", deadline=0.5) as kv:
        ns = within(0.5, lambda: kv.namespace(layout))
        keys = ns.keys(range(8))
        assert within(0.5, lambda: ns.lookup(keys)).reasons == [GetCode.UNAVAILABLE] * 2
        assert within(0.5, lambda: ns.get(keys)).reasons == [GetCode.UNAVAILABLE] * 2
        put = within(0.5, lambda: ns.put(keys, make_pages(2)))
        assert put.reasons == [PutCode.UNAVAILABLE] * 2
        with pytest.raises(kvtier.DaemonUnavailable):
            put.raise_for_refused()
        with ns.lease(keys) as held:
            assert held.reasons == [GetCode.UNAVAILABLE] * 2
            assert held.pages() == [None, None]
        for call in (kv.status, kv.capabilities, kv.ping, ns.bump, ns.reopen):
            with pytest.raises(kvtier.DaemonUnavailable) as caught:
                within(0.5, call)
            assert caught.value.remedy
        with pytest.raises(kvtier.DaemonUnavailable):
            within(0.5, lambda: ns.delete(keys))


def test_a_namespace_of_an_absent_daemon_opens_by_itself_later(tmp_path, layout, make_pages):
    daemon = FakeDaemon(tmp_path / "d.sock")
    with kvtier.connect(daemon.url, deadline=1.0) as kv:
        ns = kv.namespace(layout)
        keys = ns.keys(range(8))
        assert ns.put(keys, make_pages(2)).stored == 0
        assert ns.generation is None
        daemon.start()
        try:
            assert comes_back(lambda: ns.put(keys, make_pages(2)).stored == 2)
            assert ns.get(keys).hits == 2
            assert ns.generation == 1
        finally:
            daemon.stop()


def comes_back(call, seconds=5.0):
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if call():
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("method", ["lookup", "get", "put", "pin", "delete", "open"])
def test_a_call_that_is_never_answered_ends_at_its_deadline(daemon, layout, make_pages, method):
    with kvtier.connect(daemon.url, deadline=5.0) as kv:
        ns = kv.namespace(layout)
        keys = ns.keys(range(8))
        daemon.stall.add(method)
        began = threading.active_count()
        if method == "lookup":
            found = within(0.3, lambda: ns.lookup(keys, deadline=0.3))
            assert found.reasons == [GetCode.TIMEOUT] * 2
        elif method == "get":
            got = within(0.3, lambda: ns.get(keys, deadline=0.3))
            assert got.reasons == [GetCode.TIMEOUT] * 2
        elif method == "put":
            put = within(0.3, lambda: ns.put(keys, make_pages(2), deadline=0.3))
            assert put.reasons == [PutCode.TIMEOUT] * 2
            with pytest.raises(kvtier.DeadlineExceeded):
                put.raise_for_refused()
        elif method == "pin":
            with within(0.3, lambda: ns.lease(keys, deadline=0.3).__enter__()) as held:
                assert held.reasons == [GetCode.TIMEOUT] * 2
        elif method == "delete":
            with pytest.raises(kvtier.DeadlineExceeded):
                within(0.3, lambda: ns.delete(keys, deadline=0.3))
        else:
            other = within(0.3, lambda: kv.namespace(layout, tenant="new", deadline=0.3))
            assert other.generation is None
            found = within(0.3, lambda: other.lookup(keys, deadline=0.3))
            assert found.reasons == [GetCode.TIMEOUT] * 2
        daemon.stall.clear()
        assert ns.lookup(keys).reasons == [GetCode.MISS] * 2
        assert threading.active_count() == began


def test_a_large_put_that_nobody_reads_ends_at_its_deadline(daemon, layout):
    """More bytes than flow control lets out: the writer waits in the middle of its stream."""
    with kvtier.connect(daemon.url, deadline=5.0) as kv:
        ns = kv.namespace(layout)
        daemon.stall.add("put")
        count = 32_000
        pages = bytearray(count * layout.raw_bytes)
        daemon.limits["pages_per_put_max"] = count
        keys = [number.to_bytes(32, "big") for number in range(count)]
        put = within(0.5, lambda: ns.put(keys, pages, deadline=0.5))
        assert put.reasons == [PutCode.TIMEOUT] * count


def test_pages_that_came_before_the_deadline_are_hits(ns, daemon, make_pages):
    pages = make_pages(4)
    keys = ns.keys(range(16))
    ns.put(keys, pages)
    daemon.stall_get_after = 2
    got = within(0.3, lambda: ns.get(keys, deadline=0.3))
    assert got.reasons == [GetCode.HIT, GetCode.HIT, GetCode.TIMEOUT, GetCode.TIMEOUT]
    assert got.pages == [*pages[:2], None, None]


def test_the_deadline_is_shared_by_everything_in_a_call(daemon, layout):
    daemon.limits["keys_per_call_max"] = 1
    with kvtier.connect(daemon.url, deadline=5.0) as kv:
        ns = kv.namespace(layout)
        keys = ns.keys(range(40))
        ns.lookup(keys)
        daemon.stall.add("lookup")
        found = within(0.3, lambda: ns.lookup(keys, deadline=0.3))
        assert found.reasons == [GetCode.TIMEOUT] * 10


def test_after_calls_in_vain_the_next_ones_do_not_pay_the_deadline(daemon, layout):
    with kvtier.connect(daemon.url, deadline=0.2) as kv:
        ns = kv.namespace(layout)
        keys = ns.keys(range(4))
        daemon.stall.add("lookup")
        for _ in range(3):
            assert ns.lookup(keys).reasons == [GetCode.TIMEOUT]
        began = time.monotonic()
        assert ns.lookup(keys).reasons == [GetCode.UNAVAILABLE]
        assert time.monotonic() - began < 0.05
        daemon.stall.clear()
        assert comes_back(lambda: ns.lookup(keys).reasons == [GetCode.MISS])
        assert ns.lookup(keys).reasons == [GetCode.MISS]


@pytest.mark.parametrize("keep_pages", [True, False])
def test_restart(ns, daemon, make_pages, keep_pages):
    pages = make_pages(2)
    keys = ns.keys(range(8))
    put = ns.put(keys, pages)
    daemon.restart(keep_pages=keep_pages)
    code = GetCode.HIT if keep_pages else GetCode.MISS
    assert comes_back(lambda: ns.get(keys).reasons == [code] * 2)
    put_again = ns.put(keys, pages)
    assert put_again.stored == 2
    if not keep_pages:
        assert put_again[0].ref.boot_id == daemon.boot_id != put[0].ref.boot_id
    assert len(daemon.sessions) == 1


def test_reopening_happens_inside_one_call(ns, daemon, make_pages):
    """The connection stands, the daemon has forgotten its sessions."""
    pages = make_pages(2)
    keys = ns.keys(range(8))
    ns.put(keys, pages)
    daemon.boot()
    assert ns.get(keys).pages == pages
    daemon.handles.clear()
    assert ns.put(keys, pages).reasons == [PutCode.EXISTS] * 2
    assert len(daemon.sessions) == 1
    daemon.boot()
    assert ns.lookup(keys).hits == 2
    daemon.boot()
    assert ns.delete(keys).deleted == 2


def test_a_daemon_that_goes_away_in_a_call(daemon, layout, make_pages):
    with kvtier.connect(daemon.url, deadline=5.0) as kv:
        ns = kv.namespace(layout)
        pages = make_pages(4)
        keys = ns.keys(range(16))
        ns.put(keys, pages)
        daemon.stall_get_after = 2
        timer = threading.Timer(0.2, daemon.stop)
        timer.start()
        got = within(1.0, lambda: ns.get(keys))
        timer.join()
        assert got.reasons == [GetCode.HIT, GetCode.HIT, GetCode.UNAVAILABLE, GetCode.UNAVAILABLE]
        assert got.pages[:2] == pages[:2]


def test_a_bump_by_someone_else_is_stale_until_reopened(ns, kv, daemon, layout, make_pages):
    pages = make_pages(2)
    keys = ns.keys(range(8))
    ns.put(keys, pages)
    daemon.bump(ns.fingerprint)
    assert ns.get(keys).reasons == [GetCode.STALE] * 2
    assert ns.is_stale
    assert ns.put(keys, pages).reasons == [PutCode.STALE_GENERATION] * 2
    assert ns.lookup(keys).reasons == [GetCode.STALE] * 2
    assert ns.delete(keys).reasons == [kvtier.core.page.DeleteCode.STALE] * 2
    with ns.lease(keys) as held:
        assert held.reasons == [GetCode.STALE] * 2
    assert ns.reopen() == 2
    assert not ns.is_stale
    assert ns.get(keys).reasons == [GetCode.MISS] * 2
    assert ns.put(keys, pages).stored == 2


def test_a_put_that_is_stale_makes_its_namespace_so(ns, daemon, make_pages):
    keys = ns.keys(range(8))
    daemon.bump(ns.fingerprint)
    assert ns.put(keys, make_pages(2)).reasons == [PutCode.STALE_GENERATION] * 2
    assert ns.is_stale
    assert ns.reopen() == 2
    assert ns.put(keys, make_pages(2)).stored == 2
    assert not ns.is_stale


def test_one_stale_page_of_a_present_namespace_does_not(ns, daemon, make_pages):
    keys = ns.keys(range(8))
    daemon.put_codes[keys[0]] = int(PutCode.STALE_GENERATION)
    reasons = [PutCode.STALE_GENERATION, PutCode.STORED]
    assert ns.put(keys, make_pages(2)).reasons == reasons
    assert not ns.is_stale
    assert ns.get(keys[1:]).hits == 1


def test_a_bump_during_a_restart_is_stale_too(ns, daemon, make_pages):
    keys = ns.keys(range(4))
    ns.put(keys, make_pages(1))
    daemon.bump(ns.fingerprint, "r2")
    daemon.boot()
    assert ns.get(keys).reasons == [GetCode.STALE]
    with pytest.raises(kvtier.NamespaceMismatch, match="weights_revision"):
        ns.reopen()


def test_bump(ns, kv, layout, make_pages):
    keys = ns.keys(range(4))
    ns.put(keys, make_pages(1))
    token = bytes(range(16))
    assert ns.bump(token=token) == 2
    assert ns.get(keys).reasons == [GetCode.STALE]
    assert ns.reopen() == 2
    assert ns.bump(expected=1, token=token) == 2
    assert ns.get(keys).reasons == [GetCode.MISS]
    with pytest.raises(kvtier.GenerationConflict, match="at 2"):
        ns.bump(expected=1)
    assert ns.bump("r2") == 3
    assert ns.reopen("r2") == 1
    assert ns.layout.weights_revision == "r2"
    with pytest.raises(kvtier.NamespaceMismatch):
        kv.namespace(layout)


def test_typed_errors_of_a_namespace(kv, ns, daemon, layout):
    daemon.bump(ns.fingerprint, "r2")
    with pytest.raises(kvtier.NamespaceMismatch, match="weights_revision"):
        kv.namespace(layout)
    assert kv.delete_namespace(layout) == 0
    with pytest.raises(kvtier.UnknownNamespace):
        kv.delete_namespace(layout)


def test_leases(ns, daemon, make_pages):
    pages = make_pages(2)
    keys = ns.keys(range(12))
    ns.put(keys[:2], pages)
    with ns.lease(keys, ttl=100.0) as held:
        assert held.reasons == [GetCode.HIT, GetCode.HIT, GetCode.MISS]
        assert held.ttl == 60.0
        assert len(daemon.leases) == 1
        assert held.pages() == [*pages, None]
        held.renew(5.0)
        daemon.leases.clear()
        with pytest.raises(kvtier.LeaseExpired):
            held.renew()
    with ns.lease(keys) as held:
        daemon.boot()
        with pytest.raises(kvtier.LeaseExpired):
            held.renew()
    assert LeaseCode.HELD == 1


def test_status_capabilities_and_ping(kv, ns, daemon):
    status = kv.status()
    assert (status.state, status.uptime_s, status.boot_id) == ("ready", 1.5, daemon.boot_id)
    assert status.tiers[0].tier is kvtier.Tier.HOST
    assert kv.capabilities().keys_per_call_max == 1024
    assert 0 < kv.ping() < 5


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"deadline": 0}, kvtier.errors.InvalidConfigValue),
        ({"deadline": float("inf")}, kvtier.errors.InvalidConfigValue),
        ({"verify": "maybe"}, kvtier.errors.InvalidConfigValue),
        ({"url": "http://x"}, kvtier.errors.InvalidConfigValue),
        ({"url": "unix://relative"}, kvtier.errors.InvalidConfigValue),
        ({"url": "unix:///" + "x" * 200}, kvtier.errors.InvalidConfigValue),
        ({"url": "grpc://127.0.0.1"}, kvtier.errors.InvalidConfigValue),
        ({"url": "grpc://127.0.0.1:99999"}, kvtier.errors.InvalidConfigValue),
        ({"url": "grpc://10.0.0.1:80"}, kvtier.NotImplementedYet),
        ({"url": "grpc://example.com:80"}, kvtier.NotImplementedYet),
        ({"url": "grpcs://127.0.0.1:80"}, kvtier.NotImplementedYet),
    ],
)
def test_addresses_and_settings_are_checked(options, kind):
    with pytest.raises(kind) as caught:
        kvtier.connect(**{"url": "unix:///x", **options})
    assert caught.value.remedy
