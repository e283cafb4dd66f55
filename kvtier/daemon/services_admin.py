"""The Admin service: what the daemon can do, how it is doing, a full check, and its orderly end.

Event loop's thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, TypeAlias, cast

import grpc.aio

from kvtier._version import __version__
from kvtier.core.page import Tier
from kvtier.daemon.node import Node, NodeState
from kvtier.daemon.services_quarantine import (
    clear_quarantine,
    list_quarantine,
    read_quarantine,
)
from kvtier.daemon.services_verify import verify
from kvtier.packing.record import RECORD_VERSION
from kvtier.transfer.messages import pool_to_proto
from kvtier.v1 import admin_pb2 as pb
from kvtier.v1 import page_pb2

__all__ = ["AdminService"]

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class AdminService:
    """Methods are named as transfer/rpc.py asks. `methods` are the rpcs that are implemented."""

    def __init__(self, node: Node, methods: Sequence[str]) -> None:
        self._node = node
        self._methods = methods

    async def get_capabilities(
        self, _request: pb.GetCapabilitiesRequest, _context: Context
    ) -> pb.GetCapabilitiesResponse:
        node, limits = self._node, self._node.config.limits
        return pb.GetCapabilitiesResponse(
            version=__version__,
            record_version=RECORD_VERSION,
            tiers=[_tier(tier) for tier in node.store.status()],
            codecs=[cast("page_pb2.Codec", int(codec)) for codec in node.codecs],
            planes=node.planes,
            local_socket=node.local_socket,
            page_bytes_max=node.page_bytes_max,
            keys_per_call_max=limits.keys_per_call_max,
            pages_per_put_max=limits.pages_per_put_max,
            bytes_per_call_max=limits.bytes_per_call_max,
            message_bytes_max=limits.message_bytes_max,
            chunk_bytes=limits.chunk_bytes,
            lease_ms_default=limits.lease_ms_default,
            lease_ms_max=limits.lease_ms_max,
            session_ttl_ms=round(limits.session_ttl_s * 1000),
            sessions_max=limits.sessions_max,
            namespaces_max=limits.namespaces_max,
            methods=self._methods,
        )

    async def get_status(
        self, _request: pb.GetStatusRequest, _context: Context
    ) -> pb.GetStatusResponse:
        node = self._node
        node.put_reports.take_in()
        return pb.GetStatusResponse(
            version=__version__,
            state=node.state.value,
            boot_id=node.boot_id,
            uptime_ms=round(node.uptime_s() * 1000),
            directory=str(node.directory.path),
            listen=node.listening,
            tiers=_tiers(node),
            namespaces=_namespaces(node),
            sessions=_sessions(node),
            counters={**asdict(node.counters()), **node.metrics.page_totals()},
            planes=node.planes if node.state is not NodeState.STARTING else (),
            warnings=node.warnings,
            devices=_devices(node),
            pools=_pools(node),
        )

    async def verify(self, request: pb.VerifyRequest, context: Any) -> None:
        await verify(self._node, request, context)

    async def list_quarantine(
        self, request: pb.ListQuarantineRequest, _context: Context
    ) -> pb.ListQuarantineResponse:
        return list_quarantine(self._node, request)

    async def read_quarantine(self, request: pb.ReadQuarantineRequest, context: Any) -> None:
        await read_quarantine(self._node, request, context)

    async def clear_quarantine(
        self, request: pb.ClearQuarantineRequest, _context: Context
    ) -> pb.ClearQuarantineResponse:
        return await clear_quarantine(self._node, request)

    async def drain(self, request: pb.DrainRequest, _context: Context) -> pb.DrainResponse:
        node = self._node
        node.request_drain(request.deadline_ms / 1000)
        await node.drain.done.wait()
        return pb.DrainResponse(pages_lost=node.drain.pages_lost)


def _tier(tier: Tier) -> page_pb2.Tier:
    return cast("page_pb2.Tier", int(tier))


def _tiers(node: Node) -> list[pb.TierStatus]:
    return [
        pb.TierStatus(
            tier=_tier(tier),
            capacity_bytes=counts.capacity_bytes,
            ready_bytes=counts.granted_bytes,
            used_bytes=counts.used_bytes,
            pages_filling=counts.filling,
            pages_sealed=counts.sealed,
            pages_retiring=counts.retiring,
            pages_quarantined=counts.quarantined,
            pages_pinned=counts.pinned,
        )
        for tier, counts in node.store.status().items()
    ]


def _devices(node: Node) -> list[pb.DeviceStatus]:
    if node.nvme is None:
        return []
    parts = node.nvme.parts
    unusable = [
        pb.DeviceStatus(path=str(path), online=False, reason=reason)
        for path, reason in parts.unusable.items()
    ]
    used = [
        pb.DeviceStatus(
            path=str(health.device.path),
            online=health.online,
            reason=health.reason or health.device.io_reason,
            direct_io=health.device.is_direct,
            capacity_bytes=parts.config.bytes // len(parts.config.paths),
            disk_bytes=health.disk_bytes,
        )
        for health in node.nvme.devices.health.values()
    ]
    return [*used, *unusable]


def _pools(node: Node) -> list[pb.DevicePoolStatus]:
    now = time.monotonic()
    return [
        pb.DevicePoolStatus(
            session_id=told.session_id,
            client_name=told.client_name,
            age_ms=round((now - told.at) * 1000),
            pool=pool_to_proto(told.pool),
        )
        for told in node.pools.told.values()
    ]


def _namespaces(node: Node) -> list[pb.NamespaceStatus]:
    pages = node.store.survey.pages_by_namespace()
    return [
        pb.NamespaceStatus(
            fingerprint=family.identity.fingerprint,
            tenant=family.identity.tenant,
            model_id=family.identity.model_id,
            weights_revision=family.weights_revision,
            generation=family.generation,
            shard_count=family.identity.shard_count,
            pages=pages.get(family.number, 0),
        )
        for family in node.registry.families()
    ]


def _sessions(node: Node) -> list[pb.SessionStatus]:
    return [
        pb.SessionStatus(
            session_id=session.session_id,
            client_name=session.client_name,
            idle_ms=round(node.sessions.idle_s(session) * 1000),
            handles=len(session.handles),
            leases=node.store.pins.count(session.session_id),
        )
        for session in node.sessions
    ]
