"""Device pools: what engines tell of them is in status and Watch, until their session ends."""

from __future__ import annotations

import urllib.request

import grpc
import pytest
from raw_calls import RawClient, error_of, key_of, payload_of

from kvtier.daemon.pools import DevicePools
from kvtier.transfer.planes.values import PoolReport
from kvtier.v1 import page_pb2, pages_pb2

DEVICE, POOL, POOL_GONE, SNAPSHOT_END, STORED = 1, 6, 7, 2, 3


def pool_of(name="kv", **fields):
    numbers = {"page_bytes": 4096, "pages": 10, "pages_held": 4, "pages_draining": 1}
    numbers |= {"pages_pinned": 2} | fields
    return page_pb2.DevicePool(name=name, device="cuda:0", **numbers)


def told(client, pool, **fields):
    client.call(
        "ReportPool",
        pages_pb2.ReportPoolRequest(session_id=client.session, pool=pool, **fields),
    )


def test_status_shows_what_was_told_last(client):
    opened = client.open()
    first = pool_of(fingerprint=opened.fingerprint)
    told(client, first)
    told(client, pool_of("other", pages_held=0, pages_draining=0, pages_pinned=0))
    second = pool_of(fingerprint=opened.fingerprint, pages_held=9)
    told(client, second)
    pools = {status.pool.name: status for status in client.status().pools}
    assert pools["kv"].pool == second
    assert pools["kv"].client_name == "raw"
    assert pools["kv"].session_id == client.session
    assert pools["kv"].age_ms < 60_000
    assert set(pools) == {"kv", "other"}
    told(client, pool_of("other"), gone=True)
    told(client, pool_of("never there"), gone=True)
    assert [status.pool.name for status in client.status().pools] == ["kv"]


def test_a_pool_ends_with_its_session(daemon, client):
    client.open()
    told(client, pool_of())
    with RawClient(daemon.url) as second:
        second.open()
        told(second, pool_of())
        assert len(client.status().pools) == 2
        close = pages_pb2.CloseSessionRequest(session_id=second.session)
        second.call("CloseSession", close)
        (left,) = client.status().pools
        assert left.session_id == client.session
        with pytest.raises(grpc.RpcError) as caught:
            told(second, pool_of())
        assert error_of(caught.value)[:2] == (grpc.StatusCode.NOT_FOUND, "UnknownHandle")


@pytest.mark.parametrize(
    "pool",
    [
        pool_of(""),
        pool_of("x" * 257),
        pool_of(pages_held=10),
        pool_of(pages_pinned=6),
        pool_of(fingerprint=b"short"),
        pool_of(pages=2**64 - 1, pages_held=2**64 - 1, pages_draining=1),
    ],
    ids=["no name", "long name", "too many held", "too many pinned", "fingerprint", "overflow"],
)
def test_reports_that_make_no_sense_are_refused(client, pool):
    client.open()
    with pytest.raises(grpc.RpcError) as caught:
        told(client, pool)
    assert error_of(caught.value)[:2] == (grpc.StatusCode.INVALID_ARGUMENT, "LimitExceeded")
    assert not client.status().pools


def test_a_session_tells_of_so_many_pools_and_no_more(client):
    client.open()
    for number in range(16):
        told(client, pool_of(f"pool {number}"))
    with pytest.raises(grpc.RpcError) as caught:
        told(client, pool_of("one more"))
    assert error_of(caught.value)[:2] == (grpc.StatusCode.INVALID_ARGUMENT, "LimitExceeded")
    told(client, pool_of("pool 3", pages_held=0, pages_draining=3))
    told(client, pool_of("pool 0"), gone=True)
    told(client, pool_of("one more"))
    assert len(client.status().pools) == 16


def test_watch_has_all_tiers_in_one_stream(daemon, client):
    """Device pools among the residency events, without a gap in their numbers."""
    opened = client.open()
    here = pool_of(fingerprint=opened.fingerprint)
    told(client, here)
    with RawClient(daemon.url) as second:
        events = second.stream("Watch", pages_pb2.WatchRequest(), timeout=20)
        mine = second.stream(
            "Watch", pages_pb2.WatchRequest(fingerprint=opened.fingerprint), timeout=20
        )
        assert next(events).kind == SNAPSHOT_END
        first = next(events)
        assert (first.kind, first.tier, first.pool) == (POOL, DEVICE, here)
        assert (first.session_id, first.client_name) == (client.session, "raw")
        assert first.fingerprint == opened.fingerprint
        client.put(opened, [(key_of(1), payload_of(1))])
        assert next(events).kind == STORED
        told(client, here)  # as before: no event
        changed = pool_of(fingerprint=opened.fingerprint, pages_held=0)
        changed.pages_pinned = 0
        told(client, changed)
        second_event = next(events)
        assert (second_event.kind, second_event.pool) == (POOL, changed)
        told(client, pool_of("no family"))
        assert next(events).pool.name == "no family"
        close = pages_pb2.CloseSessionRequest(session_id=client.session)
        client.call("CloseSession", close)
        gone = [next(events) for _ in range(2)]
        assert {event.kind for event in gone} == {POOL_GONE}
        assert {event.pool.name for event in gone} == {"kv", "no family"}
        assert [event.sequence for event in gone] == [6, 7]
        kinds = [next(mine).kind for _ in range(5)]
        # To one that reads late, what pools and what pages did comes in no order between the two.
        assert [kinds[0], kinds[1], kinds[4]] == [SNAPSHOT_END, POOL, POOL_GONE]
        assert {kinds[2], kinds[3]} == {POOL, STORED}
        events.cancel()
        mine.cancel()


def test_metrics_have_the_pools(make_daemon):
    daemon = make_daemon("daemon.metrics_listen=127.0.0.1:0").start()
    url = daemon.log.split(" metrics=")[1].split()[0]
    with RawClient(daemon.url) as raw:
        raw.open()
        told(raw, pool_of())
        text = urllib.request.urlopen(url, timeout=5).read().decode()
        for state, count in (("free", 5), ("held", 4), ("draining", 1), ("pinned", 2)):
            labels = f'engine="raw",pool="kv",state="{state}"'
            assert f"kvtier_device_pages{{{labels}}} {count}.0" in text
        assert 'kvtier_device_bytes{engine="raw",pool="kv"} 40960.0' in text
        told(raw, pool_of(), gone=True)
        text = urllib.request.urlopen(url, timeout=5).read().decode()
        assert "kvtier_device_pages{" not in text


def test_metrics_add_engines_of_one_name():
    """A label set comes once, however many processes share a name."""
    pools = DevicePools()
    for session in (1, 2):
        pools.report(
            session,
            "engine",
            PoolReport(
                name="kv",
                device="cpu",
                fingerprint=b"",
                page_bytes=100,
                pages=10,
                held=session,
                draining=1,
                pinned=1,
            ),
        )
    assert pools.pages() == {
        ("engine", "kv", "free"): 15,
        ("engine", "kv", "held"): 3,
        ("engine", "kv", "draining"): 2,
        ("engine", "kv", "pinned"): 2,
    }
    assert pools.capacity_bytes() == {("engine", "kv"): 2000}
    pools.end_session(1)
    assert pools.pages()["engine", "kv", "held"] == 2
    pools.end_session(2)
    assert pools.pages() == {}
