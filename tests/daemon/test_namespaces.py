"""Opening, bumping and deleting namespaces, over a real connection to a real daemon."""

from __future__ import annotations

import time

import grpc
import pytest
from raw_calls import (
    PAGE_BYTES,
    RawClient,
    fails,
    key_of,
    opaque_layout,
    payload_of,
    put_page,
)

import kvtier
from kvtier.packing.layout import Layout, Role, ScaleRule, Segment, Shard
from kvtier.transfer.messages import layout_to_proto
from kvtier.v1 import page_pb2, pages_pb2

HIT, MISS, STALE = 1, 2, 3
STORED, STALE_GENERATION = 1, 3


def test_open_tells_what_the_layout_means(client):
    layout = opaque_layout()
    opened = client.open(layout, tenant="acme")
    assert opened.fingerprint == layout.fingerprint("acme", b"")
    assert (opened.raw_bytes, opened.fp8_bytes) == (PAGE_BYTES, 0)
    assert opened.session_ttl_ms == 300_000
    again = client.open(layout, tenant="acme")
    assert again.session_id == opened.session_id
    other = client.open(layout, tenant="other")
    assert other.fingerprint != opened.fingerprint
    assert other.handle != opened.handle


def test_opening_again_is_the_same_handle(make_daemon):
    daemon = make_daemon("limits.handles_per_session_max=3").start()

    def shard(index):
        return opaque_layout(shard_count=2, shard=Shard(index=index, layers=(0, 1), heads=(0, 64)))

    with RawClient(daemon.url) as raw:
        first, second = raw.open(shard(0)), raw.open(shard(1))
        for _ in range(10):
            assert raw.open(shard(0)).handle == first.handle
            assert raw.open(shard(1)).handle == second.handle
        assert first.handle != second.handle
        assert [session.handles for session in raw.status().sessions] == [2]
        generation = raw.bump(first)
        new = raw.open(shard(0))
        assert new.generation == generation
        assert new.handle not in (first.handle, second.handle), "bound to its generation for life"
        assert list(raw.lookup(first, [key_of(1)]).codes) == [STALE]
        raw.session = 0
        assert raw.open(shard(0)).handle != new.handle, "another session has handles of its own"


@pytest.mark.parametrize("end", ["bump", "delete"])
def test_handles_of_namespaces_that_have_ended_do_not_count(make_daemon, end):
    """A client that lives long and goes from one namespace to the next never runs out of them."""
    daemon = make_daemon("limits.handles_per_session_max=8").start()
    with RawClient(daemon.url) as raw, kvtier.connect(daemon.url, deadline=5) as kv:
        kept = raw.open(opaque_layout(), tenant="kept")
        handles = []
        for number in range(50):
            layout, tenant = opaque_layout(), "t" if end == "bump" else f"t{number}"
            handles.append(raw.open(layout, tenant=tenant))
            ns = kv.namespace(layout, tenant=tenant)
            if end == "bump":
                kv.bump_namespace(layout, tenant=tenant)
            else:
                kv.delete_namespace(layout, tenant=tenant)
            assert ns.lookup([key_of(1)]).reasons == [kvtier.GetCode.STALE]
        assert list(raw.lookup(handles[-8], [key_of(1)]).codes) == [STALE]
        fails(lambda: raw.lookup(handles[0], [key_of(1)]), grpc.StatusCode.NOT_FOUND,
              "UnknownHandle")  # fmt: skip
        assert list(raw.lookup(kept, [key_of(1)]).codes) == [MISS]
        assert all(session.handles <= 8 for session in raw.status().sessions)


@pytest.mark.parametrize(
    ("field", "count", "index"),
    [("shard_count", 1025, 0), ("shard_count", 1_000_000, 5), ("shard.index", 1_000_000, 70_000)],
)
def test_shards_are_bounded(client, field, count, index):
    message = layout_to_proto(opaque_layout())
    message.shard_count = count
    request = pages_pb2.OpenNamespaceRequest(
        layout=message,
        shard=page_pb2.Shard(index=index, layer_end=1, head_end=64),
    )
    fails(lambda: client.call("OpenNamespace", request), grpc.StatusCode.INVALID_ARGUMENT,
          "LayoutError", field)  # fmt: skip
    assert not client.status().namespaces


def test_the_most_shards(client):
    layout = opaque_layout(shard_count=1024, shard=Shard(index=1023, layers=(0, 1), heads=(0, 64)))
    opened = client.open(layout)
    page = put_page(opened, key_of(1), payload_of(1), shard=1023)
    assert list(client.put_pages(opened, [(page, payload_of(1))]).codes) == [STORED]
    assert client.get(opened, [key_of(1)]).payloads[0] == payload_of(1)
    assert list(client.lookup(opened, [key_of(1)]).codes) == [MISS], (
        "the other shards are not there"
    )


def test_opens_that_are_refused(client):
    invalid, precondition = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION
    fails(lambda: client.call("OpenNamespace", pages_pb2.OpenNamespaceRequest()), invalid,
          "LayoutError")  # fmt: skip
    fails(lambda: client.open(tenant="x" * 257), invalid, "LimitExceeded", "tenant")
    fails(lambda: client.open(opaque_layout(16 << 20)), invalid, "LayoutError", "page_bytes_max")
    fails(
        lambda: client.open(fingerprint=bytes(32)), precondition, "NamespaceMismatch", "fingerprint"
    )
    client.session = 12345
    fails(client.open, grpc.StatusCode.NOT_FOUND, "UnknownHandle", "session 12345")
    client.session = 0
    assert not client.status().namespaces, "a refused open makes nothing"


def test_shards_must_agree(client):
    def layout(heads):
        key = Segment(
            name="k", role=Role.KEY, dtype="bfloat16", layers=1, heads=4, dim=64,
            scale_rule=ScaleRule.LAYER_HEAD,
        )  # fmt: skip
        return Layout.from_segments(
            [key], model_id="m", revision="1", page_tokens=16, kv_compute="bfloat16",
            shard_count=2, shard=Shard(index=0, layers=(0, 1), heads=heads),
        )  # fmt: skip

    opened = client.open(layout((0, 2)))
    assert opened.raw_bytes == 16 * 2 * 64 * 2
    assert opened.fp8_bytes == 16 * 2 * 64 + 2 * 4
    assert client.open(layout((0, 2))).generation == opened.generation
    fails(lambda: client.open(layout((0, 1))), grpc.StatusCode.FAILED_PRECONDITION,
          "NamespaceMismatch", "heads")  # fmt: skip


def test_deleting_a_namespace(client):
    opened = client.open()
    client.put(opened, [(key_of(i), payload_of(i)) for i in range(3)])
    request = pages_pb2.DeleteNamespaceRequest(fingerprint=opened.fingerprint)
    assert client.call("DeleteNamespace", request).pages == 3
    assert list(client.lookup(opened, [key_of(0)]).codes) == [STALE]
    fails(lambda: client.call("DeleteNamespace", request), grpc.StatusCode.NOT_FOUND,
          "UnknownNamespace")  # fmt: skip
    again = client.open()
    assert again.generation > opened.generation
    assert client.get(again, [key_of(0)]).codes == [MISS]


def bump(client, opened, expected, token, revision=""):
    request = pages_pb2.BumpGenerationRequest(
        fingerprint=opened.fingerprint,
        expected_generation=expected,
        token=token,
        weights_revision=revision,
    )
    return client.call("BumpGeneration", request).generation


def test_a_bump_makes_all_older_pages_misses_also_after_a_restart(make_daemon):
    daemon = make_daemon().start()
    token = bytes(range(16))
    with RawClient(daemon.url) as raw:
        old = raw.open()
        raw.put(old, [(key_of(1), payload_of(1))])
        new_generation = bump(raw, old, old.generation, token)
        assert new_generation == old.generation + 1
        assert bump(raw, old, old.generation, token) == new_generation, "idempotent"
        fails(
            lambda: bump(raw, old, old.generation, bytes(16)),
            grpc.StatusCode.ABORTED,
            "GenerationConflict",
            str(new_generation),
        )
        assert list(raw.lookup(old, [key_of(1)]).codes) == [STALE]
        assert raw.get(old, [key_of(1)]).codes == [STALE]
        assert list(raw.put(old, [(key_of(1), payload_of(1))]).codes) == [STALE_GENERATION]
        new = raw.open()
        assert raw.get(new, [key_of(1)]).codes == [MISS]
        deadline = time.monotonic() + 5
        while raw.status().tiers[0].used_bytes and time.monotonic() < deadline:
            time.sleep(0.02)
        assert raw.status().tiers[0].used_bytes == 0, "the old pages give their room back"
    daemon.kill()
    daemon.start()
    with RawClient(daemon.url) as raw:
        assert raw.open().generation == new_generation
        assert bump(raw, old, old.generation, token) == new_generation, "the token is durable too"


def test_a_bump_names_the_weights_loaded_from_now_on(client):
    opened = client.open()
    bump(client, opened, opened.generation, bytes(16), revision="2")
    fails(client.open, grpc.StatusCode.FAILED_PRECONDITION, "NamespaceMismatch", "weights_revision")
    fails(lambda: bump(client, opened, 9, b"short"), grpc.StatusCode.INVALID_ARGUMENT,
          "LimitExceeded", "token")  # fmt: skip
