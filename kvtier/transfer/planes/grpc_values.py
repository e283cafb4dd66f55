"""Answers of the Admin service as plain values.

An enum number that this version does not know is left out of a list rather than guessed.

Functions without state: usable from any thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import TypeVar

from kvtier.core.page import Codec, Tier
from kvtier.transfer.planes.values import (
    Capabilities,
    NamespaceStatus,
    SessionStatus,
    Status,
    TierStatus,
)
from kvtier.v1 import admin_pb2 as pb

__all__ = ["capabilities_from_proto", "status_from_proto"]

E = TypeVar("E", bound=IntEnum)


def capabilities_from_proto(answer: pb.GetCapabilitiesResponse) -> Capabilities:
    return Capabilities(
        version=answer.version,
        record_version=answer.record_version,
        tiers=_known(Tier, answer.tiers),
        codecs=_known(Codec, answer.codecs),
        planes=tuple(answer.planes),
        page_bytes_max=answer.page_bytes_max,
        keys_per_call_max=answer.keys_per_call_max,
        pages_per_put_max=answer.pages_per_put_max,
        bytes_per_call_max=answer.bytes_per_call_max,
        message_bytes_max=answer.message_bytes_max,
        chunk_bytes=answer.chunk_bytes,
        lease_s_default=answer.lease_ms_default / 1000,
        lease_s_max=answer.lease_ms_max / 1000,
        session_ttl_s=answer.session_ttl_ms / 1000,
        sessions_max=answer.sessions_max,
        namespaces_max=answer.namespaces_max,
        methods=tuple(answer.methods),
    )


def status_from_proto(answer: pb.GetStatusResponse) -> Status:
    return Status(
        version=answer.version,
        state=answer.state,
        boot_id=answer.boot_id,
        uptime_s=answer.uptime_ms / 1000,
        directory=answer.directory,
        listen=tuple(answer.listen),
        planes=tuple(answer.planes),
        tiers=tuple(_tier(tier) for tier in answer.tiers if _known(Tier, [tier.tier])),
        namespaces=tuple(_namespace(namespace) for namespace in answer.namespaces),
        sessions=tuple(_session(session) for session in answer.sessions),
        counters=dict(answer.counters),
        warnings=tuple(answer.warnings),
    )


def _tier(tier: pb.TierStatus) -> TierStatus:
    return TierStatus(
        tier=Tier(tier.tier),
        capacity_bytes=tier.capacity_bytes,
        ready_bytes=tier.ready_bytes,
        used_bytes=tier.used_bytes,
        pages_filling=tier.pages_filling,
        pages_sealed=tier.pages_sealed,
        pages_retiring=tier.pages_retiring,
        pages_quarantined=tier.pages_quarantined,
        pages_pinned=tier.pages_pinned,
    )


def _namespace(namespace: pb.NamespaceStatus) -> NamespaceStatus:
    return NamespaceStatus(
        fingerprint=namespace.fingerprint,
        tenant=namespace.tenant,
        model_id=namespace.model_id,
        weights_revision=namespace.weights_revision,
        generation=namespace.generation,
        shard_count=namespace.shard_count,
        pages=namespace.pages,
    )


def _session(session: pb.SessionStatus) -> SessionStatus:
    return SessionStatus(
        session_id=session.session_id,
        client_name=session.client_name,
        idle_s=session.idle_ms / 1000,
        handles=session.handles,
        leases=session.leases,
    )


def _known(kind: type[E], numbers: Iterable[int]) -> tuple[E, ...]:
    members = {int(member): member for member in kind}
    return tuple(members[number] for number in numbers if number in members)
