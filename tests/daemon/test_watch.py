"""Watch: a snapshot, then every change in order; nothing of others; a clear word when behind."""

from __future__ import annotations

import threading
import time

import grpc
import pytest
from raw_calls import RawClient, error_of, key_of, payload_of

from kvtier.v1 import pages_pb2

SNAPSHOT, SNAPSHOT_END, STORED, REMOVED, BUMPED, ALIVE = 1, 2, 3, 4, 5, 8


def watch(client, fingerprint=b""):
    return client.stream("Watch", pages_pb2.WatchRequest(fingerprint=fingerprint), timeout=20)


def test_snapshot_then_changes_in_order(daemon, client):
    opened = client.open()
    other = client.open(tenant="other")
    client.put(opened, [(key_of(i), payload_of(i)) for i in range(3)])
    client.put(other, [(key_of("x"), payload_of("x"))])
    with RawClient(daemon.url) as second:
        events = watch(second, opened.fingerprint)
        first = next(events)
        assert first.kind == SNAPSHOT
        assert first.epoch == opened.boot_id
        assert {first.keys[i : i + 32] for i in range(0, 96, 32)} == {key_of(i) for i in range(3)}
        end = next(events)
        assert (end.kind, first.sequence, end.sequence) == (SNAPSHOT_END, 1, 2)
        client.put(other, [(key_of("y"), payload_of("y"))])
        client.put(opened, [(key_of(3), payload_of(3))])
        client.call("Delete", pages_pb2.DeleteRequest(handle=opened.handle, keys=key_of(0)))
        request = pages_pb2.BumpGenerationRequest(
            fingerprint=opened.fingerprint,
            expected_generation=opened.generation,
            token=bytes(16),
        )
        client.call("BumpGeneration", request)
        changes = [next(events) for _ in range(3)]
        assert [(e.kind, e.keys) for e in changes] == [
            (STORED, key_of(3)), (REMOVED, key_of(0)), (BUMPED, b""),
        ]  # fmt: skip
        assert [e.sequence for e in changes] == [3, 4, 5], "others' changes leave no gap"
        assert all(e.fingerprint == opened.fingerprint for e in changes)
        events.cancel()


def test_what_is_swept_after_a_bump_does_not_take_away_what_was_stored_since(daemon, client):
    old = client.open()
    pages = [(key_of(i), payload_of(i)) for i in range(8)]
    client.put(old, pages)
    with RawClient(daemon.url) as second:
        events = watch(second, old.fingerprint)
        while next(events).kind != SNAPSHOT_END:
            pass
        request = pages_pb2.BumpGenerationRequest(
            fingerprint=old.fingerprint, expected_generation=old.generation, token=bytes(16)
        )
        client.call("BumpGeneration", request)
        new = client.open()
        client.put(new, pages)
        assert next(events).kind == BUMPED
        assert [next(events).kind for _ in pages] == [STORED] * 8
        until = time.monotonic() + 5
        while client.status().tiers[0].pages_sealed > 8:
            assert time.monotonic() < until
            time.sleep(0.01)
        client.call("Delete", pages_pb2.DeleteRequest(handle=new.handle, keys=key_of(5)))
        last = next(events)
        assert (last.kind, last.keys) == (REMOVED, key_of(5))
        events.cancel()


def test_a_watch_that_begins_while_a_sweep_runs_is_told_nothing_of_what_is_swept(daemon, client):
    """What was bumped before is in nobody's snapshot, and the same keys are there again."""
    old = client.open()
    pages = [(key_of(i), payload_of(i)) for i in range(8)]
    for _ in range(50):
        client.put(old, pages)
        request = pages_pb2.BumpGenerationRequest(
            fingerprint=old.fingerprint,
            expected_generation=old.generation,
            token=old.generation.to_bytes(16, "big"),
        )
        client.call("BumpGeneration", request)
        new = client.open()
        client.put(new, pages)
        with RawClient(daemon.url) as second:
            events = watch(second, new.fingerprint)
            seen = [next(events), next(events)]
            is_sweeping = client.status().tiers[0].pages_sealed > 8
            assert [event.kind for event in seen] == [SNAPSHOT, SNAPSHOT_END]
            until = time.monotonic() + 10
            while client.status().tiers[0].pages_sealed > 8:
                assert time.monotonic() < until
                time.sleep(0.01)
            client.call("Delete", pages_pb2.DeleteRequest(handle=new.handle, keys=key_of(5)))
            last = next(events)
            assert (last.kind, last.keys) == (REMOVED, key_of(5))
            events.cancel()
        if is_sweeping:
            return
        old = new
    pytest.fail("no watch began before a sweep was done")


def test_who_asks_for_signs_of_life_gets_them(daemon, client):
    opened = client.open()
    request = pages_pb2.WatchRequest(fingerprint=opened.fingerprint, alive_ms=50)
    events = client.stream("Watch", request, timeout=20)
    seen = [next(events) for _ in range(3)]
    assert [(e.kind, e.sequence) for e in seen] == [(SNAPSHOT_END, 1), (ALIVE, 2), (ALIVE, 3)]
    client.put(opened, [(key_of("a"), payload_of("a"))])
    while (event := next(events)).kind == ALIVE:
        pass
    assert (event.kind, event.keys) == (STORED, key_of("a"))
    events.cancel()


def test_a_watcher_of_everything_sees_no_gap(daemon, client):
    opened = client.open()
    with RawClient(daemon.url) as second:
        events = watch(second)
        assert next(events).kind == SNAPSHOT_END
        client.put(opened, [(key_of(i), payload_of(i)) for i in range(50)])
        seen = [next(events) for _ in range(50)]
        assert [e.keys for e in seen] == [key_of(i) for i in range(50)]
        assert [e.sequence for e in seen] == list(range(2, 52))
        events.cancel()


def test_a_watcher_that_falls_behind_is_told(make_daemon):
    daemon = make_daemon("limits.watch_events_max=16").start()
    with RawClient(daemon.url) as writer, RawClient(daemon.url) as reader:
        opened = writer.open()
        writer.put(opened, [(key_of(i), payload_of(i)) for i in range(40)])
        events = watch(reader)
        while next(events).kind != SNAPSHOT_END:
            pass
        # One call deletes all of them before the watcher's turn comes.
        keys = b"".join(key_of(i) for i in range(40))
        writer.call("Delete", pages_pb2.DeleteRequest(handle=opened.handle, keys=keys))
        with pytest.raises(grpc.RpcError) as caught:
            for _ in events:
                pass
        assert error_of(caught.value)[:2] == (grpc.StatusCode.RESOURCE_EXHAUSTED, "Busy")


def test_streams_are_numbered_each_for_itself(daemon, client):
    """A snapshot of several pieces counts piece by piece; a gap would mean a lost event."""
    spaces = [client.open(tenant=tenant) for tenant in ("a", "b")]
    for opened in spaces:
        client.put(opened, [(key_of(i), payload_of(i)) for i in range(2)])
    with RawClient(daemon.url) as second, RawClient(daemon.url) as third:
        streams = [watch(second), watch(third, spaces[1].fingerprint)]
        heads = [
            [next(stream) for _ in range(count)]
            for stream, count in zip(streams, (3, 2), strict=True)
        ]
        for i in range(5):
            for opened in spaces:
                client.put(opened, [(key_of((i, 5)), payload_of(i))])
        tails = [
            [next(stream) for _ in range(count)]
            for stream, count in zip(streams, (10, 5), strict=True)
        ]
        for head, tail in zip(heads, tails, strict=True):
            numbers = [event.sequence for event in head + tail]
            assert numbers == list(range(1, len(numbers) + 1))
            assert head[-1].kind == SNAPSHOT_END
        for stream in streams:
            stream.cancel()


def test_draining_ends_watchers(daemon, client):
    events = watch(client)
    assert next(events).kind == SNAPSHOT_END
    stopper = threading.Thread(target=daemon.stop)
    stopper.start()
    with pytest.raises(grpc.RpcError) as caught:
        next(events)
    assert error_of(caught.value)[:2] == (grpc.StatusCode.UNAVAILABLE, "DaemonUnavailable")
    stopper.join(10)
    assert not stopper.is_alive()
