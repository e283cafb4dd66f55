"""The short calls of the Pages service: protobuf in, core called, protobuf out. No logic beyond
checking what came in. Event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, TypeAlias

import grpc.aio
import numpy as np
import numpy.typing as npt

from kvtier.core.namespaces import FamilyIdentity, ShardIdentity
from kvtier.core.page import KEY_BYTES, GetCode
from kvtier.daemon import services_get, services_put, services_watch
from kvtier.daemon.node import Node
from kvtier.daemon.tracing import log_trace
from kvtier.errors import (
    KeyLengthError,
    LayoutError,
    LimitExceeded,
    NamespaceMismatch,
)
from kvtier.packing.layout import Layout
from kvtier.tiers.crash_points import crash_point
from kvtier.tiers.nvme_frames import Delete
from kvtier.transfer.messages import layout_from_proto, pool_from_proto
from kvtier.transfer.place import Place
from kvtier.v1 import pages_pb2 as pb

__all__ = ["PagesService", "leading_run", "parse_keys"]

log = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_TEXT_BYTES_MAX = 256
_TOKEN_BYTES = 16
_DELETE_SLICE = 1024


class PagesService:
    """Methods are named as transfer/rpc.py asks. What has no method here is not implemented yet."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def open_namespace(
        self, request: pb.OpenNamespaceRequest, _context: Context
    ) -> pb.OpenNamespaceResponse:
        node = self._node
        _check_text("tenant", request.tenant)
        _check_text("client_name", request.client_name)
        layout = layout_from_proto(request.layout, request.shard)
        fingerprint = layout.fingerprint(request.tenant, request.salt)
        self._check_layout(request, layout, fingerprint)
        # An unknown session is refused before anything is made for it.
        if request.session_id:
            node.sessions.session(request.session_id)
        family, is_new = await node.registry.open(
            FamilyIdentity(
                fingerprint=fingerprint,
                tenant=request.tenant,
                model_id=layout.model_id,
                weights_revision=layout.weights_revision,
                shard_count=layout.shard_count,
            ),
            ShardIdentity(
                index=layout.shard.index, layers=layout.shard.layers, heads=layout.shard.heads
            ),
        )
        if is_new:
            log.info(
                "namespace.opened",
                extra={"fingerprint": fingerprint.hex(), "model_id": layout.model_id},
            )
        if request.session_id:
            session = node.sessions.session(request.session_id)
        else:
            session = node.sessions.begin(request.client_name)
            log.info(
                "session.opened",
                extra={"session": session.session_id, "client": request.client_name},
            )
        place = Place(
            namespace=family.number,
            shard=layout.shard.index,
            fingerprint=fingerprint,
            generation=family.generation,
            layout=layout,
        )
        node.registry.remember_layout(family.number, layout)
        handle = node.sessions.open_handle(session, place)
        return pb.OpenNamespaceResponse(
            session_id=session.session_id,
            handle=handle.handle_id,
            boot_id=node.boot_id,
            fingerprint=fingerprint,
            generation=family.generation,
            raw_bytes=layout.raw_bytes,
            fp8_bytes=layout.fp8_bytes,
            session_ttl_ms=round(node.config.limits.session_ttl_s * 1000),
            namespace_number=family.number,
        )

    async def lookup(self, request: pb.LookupRequest, _context: Context) -> pb.LookupResponse:
        log_trace("Lookup", request.hints.traceparent)
        place = self._place(request.handle)
        keys = parse_keys(request.keys, self._node)
        codes, tiers = self._node.store.lookup(
            place.namespace, place.shard, keys, is_exact=request.exact
        )
        return pb.LookupResponse(
            codes=codes.tolist(), tiers=tiers.tolist(), leading_run=leading_run(codes)
        )

    async def put(self, requests: Any, context: Context) -> Any:
        return await services_put.put(self._node, requests, context)

    async def get(self, request: Any, context: Context) -> None:
        log_trace("Get", request.traceparent)
        with self._node.sessions.in_use(request.handle) as handle:
            keys = parse_keys(request.keys, self._node)
            await services_get.get(self._node, handle.bound, keys, request=request, context=context)

    async def watch(self, request: pb.WatchRequest, context: Context) -> None:
        await services_watch.watch(self._node, request, context)

    async def delete(self, request: pb.DeleteRequest, _context: Context) -> pb.DeleteResponse:
        place = self._place(request.handle)
        keys = parse_keys(request.keys, self._node)
        codes: list[int] = []
        dooms: list[Delete | None] = []
        durability = self._node.durability
        # Tail first, as the store does inside a slice; the loop breathes between slices.
        for end in range(len(keys), 0, -_DELETE_SLICE):
            part = keys[max(0, end - _DELETE_SLICE) : end]
            codes[:0] = self._node.store.delete(place.namespace, place.shard, part).tolist()
            if durability is not None:
                # In the same step: a page that is put after this one is not meant.
                dooms.append(durability.doom(place.namespace, place.shard, part))
            await asyncio.sleep(0)
        if durability is not None:
            await durability.journal(dooms)
            await durability.confirm()
            crash_point("delete.journalled")
        return pb.DeleteResponse(codes=codes)  # type: ignore[arg-type]

    async def pin(self, request: pb.PinRequest, _context: Context) -> pb.PinResponse:
        node = self._node
        handle = node.sessions.handle(request.handle)
        place = handle.bound
        keys = parse_keys(request.keys, node)
        life_s = node.lease_s(request.ttl_ms)
        lease_id, codes = node.store.pins.pin(
            handle.session_id,
            place.namespace,
            place.shard,
            keys,
            deadline=time.monotonic() + life_s,
        )
        return pb.PinResponse(
            lease_id=lease_id,
            codes=codes.tolist(),
            leading_run=leading_run(codes),
            ttl_ms=round(life_s * 1000),
        )

    async def renew(self, request: pb.RenewRequest, _context: Context) -> pb.LeaseResponse:
        node = self._node
        session = node.sessions.session(request.session_id)
        _check_count("lease_ids", len(request.lease_ids), node.config.limits.keys_per_call_max)
        now = time.monotonic()
        codes = node.store.pins.renew(
            session.session_id,
            request.lease_ids,
            deadline=now + node.lease_s(request.ttl_ms),
            now=now,
        )
        return pb.LeaseResponse(codes=[int(code) for code in codes])  # type: ignore[misc]

    async def unpin(self, request: pb.UnpinRequest, _context: Context) -> pb.LeaseResponse:
        node = self._node
        session = node.sessions.session(request.session_id)
        _check_count("lease_ids", len(request.lease_ids), node.config.limits.keys_per_call_max)
        codes = node.store.pins.unpin(session.session_id, request.lease_ids, now=time.monotonic())
        return pb.LeaseResponse(codes=[int(code) for code in codes])  # type: ignore[misc]

    async def prefetch(self, request: pb.PrefetchRequest, _context: Context) -> pb.PrefetchResponse:
        log_trace("Prefetch", request.hints.traceparent)
        place = self._place(request.handle)
        keys = parse_keys(request.keys, self._node)
        if self._node.nvme is None:
            codes, _ = self._node.store.lookup(place.namespace, place.shard, keys, is_counted=False)
        else:
            codes = self._node.nvme.tiering.prefetch((place.namespace, place.shard), keys)
        return pb.PrefetchResponse(codes=codes.tolist(), leading_run=leading_run(codes))

    async def expect(self, request: pb.ExpectRequest, _context: Context) -> pb.ExpectResponse:
        place = self._place(request.handle)
        keys = parse_keys(request.key, self._node)
        _check_count("key", len(keys), 1)
        heeded = len(keys) > 0 and self._node.store.forecasts.hint(
            place.namespace,
            keys[0].tobytes(),
            -1.0 if request.ended else request.return_ms / 1000,
            now=time.monotonic(),
        )
        return pb.ExpectResponse(heeded=heeded)

    async def demote(self, request: pb.DemoteRequest, _context: Context) -> pb.DemoteResponse:
        place = self._place(request.handle)
        keys = parse_keys(request.keys, self._node)
        if self._node.nvme is None:
            codes = np.full(len(keys), GetCode.REFUSED, np.uint8)
        else:
            codes = self._node.nvme.tiering.demote((place.namespace, place.shard), keys)
        return pb.DemoteResponse(
            codes=codes.tolist(),  # type: ignore[arg-type]
            leading_run=leading_run(codes),
        )

    async def flush(self, request: pb.FlushRequest, _context: Context) -> pb.FlushResponse:
        node = self._node
        session = node.sessions.session(request.session_id)
        pages, lost = await node.flush(session.session_id)
        return pb.FlushResponse(pages=pages, pages_lost=lost)

    async def bump_generation(
        self, request: pb.BumpGenerationRequest, _context: Context
    ) -> pb.BumpGenerationResponse:
        _check_text("weights_revision", request.weights_revision)
        if len(request.token) != _TOKEN_BYTES:
            raise LimitExceeded(
                f"token has {len(request.token)} bytes",
                remedy=f"Send {_TOKEN_BYTES} random bytes, and the same ones when trying again.",
            )
        generation, is_new = await self._node.registry.bump(
            request.fingerprint,
            expected=request.expected_generation,
            weights_revision=request.weights_revision,
            token=request.token,
        )
        if is_new:
            log.info(
                "namespace.bumped",
                extra={"fingerprint": request.fingerprint.hex(), "generation": generation},
            )
        return pb.BumpGenerationResponse(generation=generation)

    async def report_pool(
        self, request: pb.ReportPoolRequest, _context: Context
    ) -> pb.ReportPoolResponse:
        node = self._node
        session = node.sessions.session(request.session_id)
        if request.gone:
            node.pools.take_back(session.session_id, request.pool.name)
        else:
            node.pools.report(
                session.session_id, session.client_name, pool_from_proto(request.pool)
            )
        return pb.ReportPoolResponse()

    async def close_session(
        self, request: pb.CloseSessionRequest, _context: Context
    ) -> pb.CloseSessionResponse:
        self._node.sessions.end(request.session_id, "closed")
        return pb.CloseSessionResponse()

    async def delete_namespace(
        self, request: pb.DeleteNamespaceRequest, _context: Context
    ) -> pb.DeleteNamespaceResponse:
        pages = await self._node.registry.delete(request.fingerprint)
        log.info(
            "namespace.deleted", extra={"fingerprint": request.fingerprint.hex(), "pages": pages}
        )
        return pb.DeleteNamespaceResponse(pages=pages)

    def _place(self, handle_id: int) -> Place:
        return self._node.sessions.handle(handle_id).bound

    def _check_layout(
        self, request: pb.OpenNamespaceRequest, layout: Layout, fingerprint: bytes
    ) -> None:
        longest = max(layout.raw_bytes, layout.fp8_bytes)
        if longest > self._node.page_bytes_max:
            raise LayoutError(
                f"a page of this layout has {longest} bytes; the daemon takes pages of at most "
                f"{self._node.page_bytes_max} bytes (page_bytes_max)",
                remedy="Use fewer page_tokens, or more shards.",
            )
        if request.fingerprint and request.fingerprint != fingerprint:
            raise NamespaceMismatch(
                f"fingerprint: the daemon computes {fingerprint.hex()} for this layout, "
                f"the client has {request.fingerprint.hex()}",
                remedy="Use the same version of kvtier on both sides.",
            )


def parse_keys(raw: bytes, node: Node) -> npt.NDArray[np.uint8]:
    """Shape (n, 32). Raises KeyLengthError or LimitExceeded."""
    if len(raw) % KEY_BYTES:
        raise KeyLengthError(
            f"keys has {len(raw)} bytes, which is not a whole number of keys",
            remedy=f"Send keys of {KEY_BYTES} bytes each, one after another.",
        )
    _check_count("keys", len(raw) // KEY_BYTES, node.config.limits.keys_per_call_max)
    return np.frombuffer(raw, np.uint8).reshape(-1, KEY_BYTES)


def leading_run(codes: npt.NDArray[np.uint8]) -> int:
    """How many codes from the first on are HIT."""
    other = np.flatnonzero(codes != GetCode.HIT)
    return int(other[0]) if len(other) else len(codes)


def _check_count(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise LimitExceeded(
            f"{name} has {count} entries, the limit is {limit} (keys_per_call_max)",
            remedy="Split the call.",
        )


def _check_text(name: str, text: str) -> None:
    size = len(text.encode())
    if size > _TEXT_BYTES_MAX:
        raise LimitExceeded(
            f"{name} has {size} bytes, the limit is {_TEXT_BYTES_MAX}",
            remedy=f"Use a shorter {name}.",
        )
