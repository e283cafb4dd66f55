"""The protocol by hand, over a stock gRPC channel: what a client in another language would send."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import grpc
import pytest

from kvtier.core.page import Codec
from kvtier.packing.checksum import payload_sum
from kvtier.packing.layout import Layout, Role, ScaleRule, Segment
from kvtier.transfer.grpc_status import ERROR_KEY, REMEDY_KEY
from kvtier.transfer.messages import layout_to_proto, shard_to_proto
from kvtier.transfer.rpc import ADMIN, METHODS, PAGES
from kvtier.v1 import admin_pb2, page_pb2, pages_pb2, transfer_pb2

PAGE_BYTES = 64 << 10


def opaque_layout(page_bytes: int = PAGE_BYTES, **fields) -> Layout:
    """A layout whose raw pages have `page_bytes` (a multiple of 1 KiB, or below it)."""
    heads, dim = (page_bytes // 1024, 1024) if page_bytes % 1024 == 0 else (1, page_bytes)
    segment = Segment(
        name="bytes",
        role=Role.OPAQUE,
        dtype="uint8",
        layers=1,
        heads=heads,
        dim=dim,
        scale_rule=ScaleRule.NONE,
    )
    identity = {"model_id": "test", "revision": "1", "page_tokens": 1, "kv_compute": "uint8"}
    return Layout.from_segments([segment], **(identity | fields))


def key_of(name: object) -> bytes:
    return hashlib.sha256(repr(name).encode()).digest()


def payload_of(name: object, length: int = PAGE_BYTES) -> bytes:
    """Bytes that tell whose they are."""
    digest = hashlib.sha256(f"payload {name!r}".encode()).digest()
    return (digest * (length // len(digest) + 1))[:length]


def error_of(error: grpc.RpcError) -> tuple[grpc.StatusCode, str, str]:
    """(status, class, remedy) as the trailing metadata says."""
    fields = dict(error.trailing_metadata() or ())
    return error.code(), fields.get(ERROR_KEY, ""), fields.get(REMEDY_KEY, "")


@dataclass(frozen=True)
class Got:
    """The answer of a Get: the announcements, and the payloads of the hits, by position."""

    pages: list
    payloads: dict[int, bytes]

    @property
    def codes(self) -> list[int]:
        return [page.code for page in self.pages]


class RawClient:
    """One channel, one session. Close it."""

    def __init__(self, url: str, **options: int) -> None:
        target = url.replace("unix://", "unix:").replace("grpc://", "")
        # A subchannel of its own: stock channels to one address share a connection.
        settings = {"grpc.use_local_subchannel_pool": 1} | options
        self.channel = grpc.insecure_channel(target, options=list(settings.items()))
        self.session = 0

    def call(self, name: str, request, timeout: float = 10.0, service: str = PAGES):
        method = METHODS[service][name]
        return self.channel.unary_unary(
            method.path,
            request_serializer=method.serialize_request,
            response_deserializer=method.parse_response,
        )(request, timeout=timeout)

    def stream(self, name: str, request, timeout: float = 10.0, service: str = PAGES):
        method = METHODS[service][name]
        return self.channel.unary_stream(
            method.path,
            request_serializer=method.serialize_request,
            response_deserializer=method.parse_response,
        )(request, timeout=timeout)

    def open(self, layout: Layout | None = None, *, tenant: str = "", **fields):
        layout = layout or opaque_layout()
        request = pages_pb2.OpenNamespaceRequest(
            session_id=self.session,
            tenant=tenant,
            layout=layout_to_proto(layout),
            shard=shard_to_proto(layout.shard),
            client_name="raw",
            **fields,
        )
        opened = self.call("OpenNamespace", request)
        self.session = opened.session_id
        return opened

    def status(self, timeout: float = 5.0):
        return self.call("GetStatus", admin_pb2.GetStatusRequest(), timeout, ADMIN)

    def capabilities(self):
        return self.call("GetCapabilities", admin_pb2.GetCapabilitiesRequest(), service=ADMIN)

    def put_messages(self, messages: Iterable[transfer_pb2.PutRequest], timeout: float = 10.0):
        method = METHODS[PAGES]["Put"]
        return self.channel.stream_unary(
            method.path,
            request_serializer=transfer_pb2.PutRequest.SerializeToString,
            response_deserializer=method.parse_response,
        )(iter(messages), timeout=timeout)

    def put(self, opened, pages: Sequence[tuple[bytes, bytes]], timeout: float = 10.0):
        return self.put_messages(put_stream(opened, pages), timeout)

    def get(self, opened, keys: Sequence[bytes], timeout: float = 10.0, **fields) -> Got:
        request = transfer_pb2.GetRequest(handle=opened.handle, keys=b"".join(keys), **fields)
        pages, run = [], b""
        for message in self.stream("Get", request, timeout):
            assert message.offset == len(run) or not message.data
            pages += message.pages
            run += bytes(message.data)
        payloads, at = {}, 0
        for index, page in enumerate(pages):
            if page.code == page_pb2.GET_CODE_HIT:
                payloads[index] = run[at : at + page.length]
                at += page.length
        assert at == len(run), "bytes that belong to no page"
        return Got(pages, payloads)

    def put_pages(self, opened, pages: Sequence[tuple[transfer_pb2.PutPage, bytes]]):
        """One message with these announcements and all of their bytes."""
        request = transfer_pb2.PutRequest(
            open=transfer_pb2.PutOpen(handle=opened.handle),
            pages=[page for page, _ in pages],
            data=b"".join(payload for _, payload in pages),
        )
        return self.put_messages([request])

    def pin(self, opened, keys: Sequence[bytes], ttl_ms: int = 0):
        request = pages_pb2.PinRequest(handle=opened.handle, keys=b"".join(keys), ttl_ms=ttl_ms)
        return self.call("Pin", request)

    def unpin(self, opened, *lease_ids: int) -> list[int]:
        request = pages_pb2.UnpinRequest(session_id=opened.session_id, lease_ids=lease_ids)
        return list(self.call("Unpin", request).codes)

    def delete(self, opened, keys: Sequence[bytes]) -> list[int]:
        request = pages_pb2.DeleteRequest(handle=opened.handle, keys=b"".join(keys))
        return list(self.call("Delete", request).codes)

    def bump(self, opened) -> int:
        request = pages_pb2.BumpGenerationRequest(
            fingerprint=opened.fingerprint,
            expected_generation=opened.generation,
            token=secrets.token_bytes(16),
        )
        return self.call("BumpGeneration", request).generation

    def lookup(self, opened, keys: Sequence[bytes]):
        return self.call(
            "Lookup", pages_pb2.LookupRequest(handle=opened.handle, keys=b"".join(keys))
        )

    def close(self) -> None:
        self.channel.close()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def put_page(opened, key: bytes, payload: bytes, **fields) -> transfer_pb2.PutPage:
    """An announcement with the right checksum. `fields` are the message's, and `shard`."""
    codec = fields.get("codec", 1)
    total = payload_sum(
        payload,
        key=key,
        fingerprint=opened.fingerprint,
        namespace_generation=opened.generation,
        shard=fields.pop("shard", 0),
        codec=Codec(codec),
        length=len(payload),
    )
    values = {"length": len(payload), "codec": codec, "payload_sum": total}
    return transfer_pb2.PutPage(key=key, **(values | fields))


def put_stream(
    opened, pages: Sequence[tuple[bytes, bytes]], chunk_bytes: int = 1 << 20
) -> Iterator[transfer_pb2.PutRequest]:
    """The messages of a Put: every page announced first, then the run in chunks."""
    yield transfer_pb2.PutRequest(
        open=transfer_pb2.PutOpen(handle=opened.handle),
        pages=[put_page(opened, key, payload) for key, payload in pages],
    )
    run = b"".join(payload for _, payload in pages)
    for at in range(0, len(run), chunk_bytes):
        yield transfer_pb2.PutRequest(offset=at, data=run[at : at + chunk_bytes])


def failure(call) -> tuple[grpc.StatusCode, str, str]:
    """(status, class, details) of a call that must fail."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    code, name, remedy = error_of(caught.value)
    assert not name or remedy
    return code, name, caught.value.details()


def fails(call, status: grpc.StatusCode, kind: str, text: str = "") -> None:
    """The call fails so, and says what to do."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    code, found, remedy = error_of(caught.value)
    assert (code, found) == (status, kind), caught.value.details()
    assert text in caught.value.details()
    assert remedy


def settled(client: RawClient):
    """The host tier once nothing is under way in it; fails when that does not come."""
    deadline = time.monotonic() + 5
    while True:
        host = client.status().tiers[0]
        if host.pages_filling == 0 and host.pages_pinned == 0:
            return host
        assert time.monotonic() < deadline, f"still under way: {host}"
        time.sleep(0.02)
