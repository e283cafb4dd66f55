"""The Admin service: what the daemon can do, how it is doing, a full check, and its orderly end.

Event loop's thread; pages are checked on another one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeAlias, cast

import grpc.aio

from kvtier._version import __version__
from kvtier.core.handles import Reading
from kvtier.core.page import Tier
from kvtier.daemon.node import PLANES, Node, NodeState
from kvtier.errors import DeadlineExceeded, LimitExceeded
from kvtier.packing.record import RECORD_VERSION
from kvtier.transfer.place import Identity, load
from kvtier.v1 import admin_pb2 as pb
from kvtier.v1 import page_pb2

__all__ = ["AdminService"]

log = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

#: Pages between two progress messages of a Verify.
_PAGES_PER_PROGRESS = 64


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
            planes=PLANES,
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
            planes=PLANES if node.state is not NodeState.STARTING else (),
            warnings=node.warnings,
        )

    async def verify(self, request: pb.VerifyRequest, context: Any) -> None:
        node = self._node
        if int(request.tier) != Tier.HOST:
            raise LimitExceeded(
                f"tier {request.tier} is not a tier of this daemon",
                remedy=f"Use tier HOST ({int(Tier.HOST)}); GetCapabilities lists the tiers.",
            )
        rows = node.store.sealed_rows(Tier.HOST).tolist()
        progress = pb.VerifyProgress(pages_total=len(rows))
        for row in rows:
            node.refuse_unless_serving()
            found = node.store.acquire_row(row)
            if found is not None:
                progress.bytes_done += found[0].length
                progress.pages_corrupt += await self._check(*found)
            progress.pages_done += 1
            if progress.pages_done % _PAGES_PER_PROGRESS == 0:
                await self._write(context, progress)
        await self._write(context, progress)

    async def drain(self, request: pb.DrainRequest, _context: Context) -> pb.DrainResponse:
        node = self._node
        node.request_drain(request.deadline_ms / 1000)
        await node.admission.wait_idle(node.drain.deadline)
        return pb.DrainResponse(pages_lost=node.host_pages())

    async def _check(self, reading: Reading, namespace: int, shard: int, key: bytes) -> int:
        """1 when the page is corrupt (it is condemned then), else 0. Releases the reading."""
        node = self._node
        with reading:
            family = node.registry.family_of(namespace)
            if family is None:
                return 0  # bumped or deleted meanwhile: nobody can ask for it any more
            identity = Identity(
                fingerprint=family.identity.fingerprint, generation=family.generation, shard=shard
            )
            check = partial(load, node.arena, identity, reading, key, check_payload=True)
            if await asyncio.to_thread(check) is not None:
                return 0
            # Once more: the first bad reading of memory need not be the page's fault.
            if await asyncio.to_thread(check) is not None or not node.store.condemn(reading.ref):
                return 0
        log.error("page.corrupt", extra={"tier": "host", "pages": 1})
        return 1

    async def _write(self, context: Context, progress: pb.VerifyProgress) -> None:
        idle_s = self._node.config.limits.get_idle_ms / 1000
        try:
            async with asyncio.timeout(idle_s):
                await context.write(progress)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the reader took nothing for {idle_s:g} s (limits.get_idle_ms)",
                remedy="Read without long pauses, or raise limits.get_idle_ms.",
            ) from None


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


def _namespaces(node: Node) -> list[pb.NamespaceStatus]:
    pages = node.store.pages_by_namespace()
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
