"""Answers of the Admin service, and events of Watch, as plain values.

An enum number that this version does not know is left out of a list rather than guessed.

Functions without state: usable from any thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import TypeVar

from kvtier.core.page import Codec, PageRef, Tier
from kvtier.errors import DaemonUnavailable
from kvtier.transfer.messages import pool_from_proto
from kvtier.transfer.planes.values import (
    Capabilities,
    DeviceStatus,
    NamespaceStatus,
    PoolStatus,
    QuarantinedPage,
    Residency,
    ResidencyKind,
    SessionStatus,
    Status,
    TierStatus,
    VerifyProgress,
)
from kvtier.v1 import admin_pb2 as pb
from kvtier.v1 import page_pb2, pages_pb2

__all__ = [
    "capabilities_from_proto",
    "progress_from_proto",
    "quarantine_from_proto",
    "ref_to_proto",
    "residencies_from_proto",
    "status_from_proto",
]

E = TypeVar("E", bound=IntEnum)


def capabilities_from_proto(answer: pb.GetCapabilitiesResponse) -> Capabilities:
    return Capabilities(
        version=answer.version,
        record_version=answer.record_version,
        tiers=_known(Tier, answer.tiers),
        codecs=_known(Codec, answer.codecs),
        planes=tuple(answer.planes),
        local_socket=answer.local_socket,
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
        devices=tuple(_device(device) for device in answer.devices),
        pools=tuple(_pool(pool) for pool in answer.pools),
    )


def progress_from_proto(report: pb.VerifyProgress) -> VerifyProgress:
    return VerifyProgress(
        pages_done=report.pages_done,
        pages_total=report.pages_total,
        bytes_done=report.bytes_done,
        pages_corrupt=report.pages_corrupt,
        pages_unreadable=report.pages_unreadable,
    )


def quarantine_from_proto(answer: pb.ListQuarantineResponse) -> tuple[QuarantinedPage, ...]:
    def is_named(device: int) -> bool:
        return 0 < device <= len(answer.devices)

    return tuple(
        QuarantinedPage(
            ref=PageRef(page.ref.boot_id, tier, page.ref.slot, page.ref.generation),
            fingerprint=page.fingerprint,
            shard=page.shard,
            key=page.key,
            length=page.length,
            codec=codec,
            device=answer.devices[page.device - 1] if is_named(page.device) else "",
            age_s=page.age_ms / 1000 if page.age_ms else None,
            reason=page.reason,
        )
        for page in answer.pages
        for tier in _known(Tier, [page.ref.tier])
        for codec in _known(Codec, [page.codec])
    )


def ref_to_proto(ref: PageRef) -> page_pb2.PageRef:
    return page_pb2.PageRef(
        boot_id=ref.boot_id,
        tier=int(ref.tier),  # type: ignore[arg-type]
        slot=ref.slot,
        generation=ref.generation,
    )


def residencies_from_proto(event: pages_pb2.WatchEvent, sequence: int) -> list[Residency]:
    """What event number `sequence` of a stream says of pages: nothing where it is about a device
    pool. Raises DaemonUnavailable when it has another number: something was lost.
    """
    if event.sequence != sequence:
        raise DaemonUnavailable(
            f"event {event.sequence} came where {sequence} was due",
            remedy="watch again: it begins with what is there",
        )
    kinds = _known(ResidencyKind, [event.kind])
    tiers = _known(Tier, [event.tier])
    return [
        Residency(
            kind=kind,
            tier=tiers[0] if tiers else None,
            shard=event.shard,
            keys=event.keys,
            epoch=event.epoch,
            lossy=event.lossy,
        )
        for kind in kinds
    ]


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


def _device(device: pb.DeviceStatus) -> DeviceStatus:
    return DeviceStatus(
        path=device.path,
        is_online=device.online,
        reason=device.reason,
        is_direct_io=device.direct_io,
        capacity_bytes=device.capacity_bytes,
        disk_bytes=device.disk_bytes,
    )


def _pool(told: pb.DevicePoolStatus) -> PoolStatus:
    return PoolStatus(
        session_id=told.session_id,
        client_name=told.client_name,
        age_s=told.age_ms / 1000,
        pool=pool_from_proto(told.pool),
    )


def _known(kind: type[E], numbers: Iterable[int]) -> tuple[E, ...]:
    members = {int(member): member for member in kind}
    return tuple(members[number] for number in numbers if number in members)
