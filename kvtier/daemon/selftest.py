"""One page through every tier and plane, before the daemon says that it is ready.

For each: store, read back, compare, see that a damaged copy is told from a whole one, remove. It
runs in a namespace of number 0, which no family ever gets. Event loop's thread.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import closing
from typing import Any

import grpc.aio
import numpy as np

from kvtier.core.page import Codec, GetCode, PageMeta, PutCode
from kvtier.daemon.node import Node
from kvtier.daemon.server import SELF_TEST_KEY
from kvtier.errors import CorruptPage, KvtierError, TierIOError
from kvtier.packing.checksum import payload_sum
from kvtier.packing.layout import Layout, Role, ScaleRule, Segment
from kvtier.transfer.grpc_status import from_rpc_error
from kvtier.transfer.intake import Intake
from kvtier.transfer.outlet import Outlet
from kvtier.transfer.place import Place, Verify
from kvtier.transfer.planes.address import grpc_target
from kvtier.transfer.rpc import CHANNEL_OPTIONS, METHODS, PAGES, multicallable
from kvtier.transfer.wire import encode_put
from kvtier.v1 import page_pb2, pages_pb2, transfer_pb2

__all__ = ["self_test"]

log = logging.getLogger(__name__)

_NAMESPACE = 0
_PAGE_BYTES = 64 << 10
_DEADLINE_S = 10.0


async def self_test(node: Node) -> None:
    """Raises KvtierError when a tier or plane does not give back what it was given."""
    place = _place()
    node.store.open_namespace(_NAMESPACE, shard_count=1)
    session = node.sessions.begin("self-test")
    try:
        await _test_tier(node, place)
        log.info("selftest.passed", extra={"tier": "host"})
        handle = node.sessions.open_handle(session, place)
        for url in node.listening:
            await _test_plane(node, place, url, handle.handle_id)
            log.info("selftest.passed", extra={"plane": "grpc", "url": url})
    finally:
        node.sessions.end(session.session_id, "self-test")
        node.store.end_namespace(_NAMESPACE)
        while node.store.sweep(pages_max=16):
            pass


def _place() -> Place:
    opaque = Segment(
        name="bytes",
        role=Role.OPAQUE,
        dtype="uint8",
        layers=1,
        heads=1,
        dim=_PAGE_BYTES,
        scale_rule=ScaleRule.NONE,
    )
    layout = Layout.from_segments(
        [opaque],
        model_id="kvtier-self-test",
        revision="0",
        page_tokens=1,
        kv_compute="uint8",
    )
    return Place(
        namespace=_NAMESPACE,
        shard=0,
        fingerprint=layout.fingerprint("", b""),
        generation=0,
        layout=layout,
    )


def _page(place: Place, name: str) -> tuple[bytes, PageMeta]:
    payload = secrets.token_bytes(_PAGE_BYTES)
    key = hashlib.sha256(name.encode()).digest()
    meta = PageMeta(
        key=key,
        length=len(payload),
        codec=Codec.RAW,
        payload_sum=payload_sum(
            payload,
            key=key,
            fingerprint=place.fingerprint,
            namespace_generation=place.generation,
            shard=place.shard,
            codec=Codec.RAW,
            length=len(payload),
        ),
    )
    return payload, meta


async def _test_tier(node: Node, place: Place) -> None:
    payload, meta = _page(place, "host")
    keys = np.frombuffer(meta.key, np.uint8).reshape(1, -1)
    intake = Intake(
        node.store,
        node.arena,
        place,
        pages_max=1,
        bytes_max=_PAGE_BYTES,
        verify=Verify.ALWAYS,
    )
    with closing(intake):
        intake.announce([meta])
        intake.feed(0, memoryview(payload))
        intake.finish()
    _expect("host tier", intake.codes == [PutCode.STORED], "did not store a page")
    outlet = Outlet(
        node.store,
        node.arena,
        place,
        keys,
        accept=frozenset((Codec.RAW,)),
        lossy_ok=False,
        verify=Verify.ALWAYS,
        sample_one_in=1,
    )
    async with outlet:
        async for page in outlet:
            _expect("host tier", page.payload is not None, "lost a page")
            copy = bytearray(page.payload or b"")
            _expect("host tier", copy == payload, "gave back other bytes than it was given")
            copy[len(copy) // 2] ^= 1
            seen = not place.payload_ok(memoryview(copy), meta)
            _expect("host tier", seen, "did not see a damaged bit")
    node.store.delete(place.namespace, place.shard, keys)


async def _test_plane(node: Node, place: Place, url: str, handle: int) -> None:
    payload, meta = _page(place, url)
    damaged = bytearray(payload)
    damaged[0] ^= 1
    call = _Calls(node, url, handle)
    async with call.channel:
        try:
            codes = await call.put(meta, bytes(damaged))
            _expect(url, codes == [PutCode.REFUSED], "took a damaged page")
            codes = await call.put(meta, payload)
            _expect(url, codes == [PutCode.STORED], "did not store a page")
            code, back = await call.get(meta.key)
            _expect(url, code == GetCode.HIT, "lost a page")
            _expect(url, back == payload, "gave back other bytes than it was given")
            await call.delete(meta.key)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error


class _Calls:
    """This daemon's own calls, over a real connection."""

    def __init__(self, node: Node, url: str, handle: int) -> None:
        self.channel = grpc.aio.insecure_channel(grpc_target(url), options=CHANNEL_OPTIONS)
        self._metadata = ((SELF_TEST_KEY, node.self_test_token),)
        self._handle = handle

    async def put(self, meta: PageMeta, payload: bytes) -> list[int]:
        head = transfer_pb2.PutRequest(
            open=transfer_pb2.PutOpen(handle=self._handle),
            pages=[
                transfer_pb2.PutPage(
                    key=meta.key,
                    length=meta.length,
                    codec=page_pb2.CODEC_RAW,
                    payload_sum=meta.payload_sum,
                )
            ],
        )

        async def messages() -> AsyncIterator[bytes]:
            yield encode_put(head, [payload])

        answer = await self._call("Put")(messages(), timeout=_DEADLINE_S, metadata=self._metadata)
        return list(answer.codes)

    async def get(self, key: bytes) -> tuple[int, bytes]:
        request = transfer_pb2.GetRequest(handle=self._handle, keys=key)
        code, data = 0, b""
        async for message in self._call("Get")(
            request, timeout=_DEADLINE_S, metadata=self._metadata
        ):
            code = message.pages[0].code if message.pages else code
            data += bytes(message.data)
        return code, data

    async def delete(self, key: bytes) -> None:
        request = pages_pb2.DeleteRequest(handle=self._handle, keys=key)
        await self._call("Delete")(request, timeout=_DEADLINE_S, metadata=self._metadata)

    def _call(self, name: str) -> Any:
        return multicallable(self.channel, METHODS[PAGES][name])


def _expect(what: str, is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise _failed(what, otherwise)


def _failed(what: str, otherwise: str) -> KvtierError:
    kind: type[KvtierError] = CorruptPage if "bytes" in otherwise else TierIOError
    return kind(
        f"self-test: {what} {otherwise}",
        remedy="Check the machine's memory and this installation; the daemon does not start so.",
    )
