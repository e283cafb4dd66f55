"""The Python client: what `kvtier.connect` and `kvtier.aio.connect` give."""

from __future__ import annotations

from kvtier.client.aio import AsyncConnection
from kvtier.client.keys import KeyChain
from kvtier.client.namespace import AsyncNamespace
from kvtier.client.quarantine import AsyncQuarantine, Quarantine
from kvtier.client.results import (
    DeleteResult,
    GetItem,
    GetResult,
    LookupItem,
    LookupResult,
    MoveResult,
    PutItem,
    PutResult,
)
from kvtier.client.sync import Connection, Lease, Namespace, connect
from kvtier.transfer.planes.values import (
    Capabilities,
    DeviceStatus,
    FlushResult,
    PoolReport,
    PoolStatus,
    QuarantinedPage,
    Residency,
    ResidencyKind,
    Status,
    TierStatus,
    VerifyProgress,
)

__all__ = [
    "AsyncConnection",
    "AsyncNamespace",
    "AsyncQuarantine",
    "Capabilities",
    "Connection",
    "DeleteResult",
    "DeviceStatus",
    "FlushResult",
    "GetItem",
    "GetResult",
    "KeyChain",
    "Lease",
    "LookupItem",
    "LookupResult",
    "MoveResult",
    "Namespace",
    "PoolReport",
    "PoolStatus",
    "PutItem",
    "PutResult",
    "Quarantine",
    "QuarantinedPage",
    "Residency",
    "ResidencyKind",
    "Status",
    "TierStatus",
    "VerifyProgress",
    "connect",
]
