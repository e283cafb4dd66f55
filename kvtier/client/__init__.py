"""The Python client: what `kvtier.connect` and `kvtier.aio.connect` give."""

from __future__ import annotations

from kvtier.client.aio import AsyncConnection
from kvtier.client.keys import KeyChain
from kvtier.client.namespace import AsyncNamespace
from kvtier.client.results import (
    DeleteResult,
    GetItem,
    GetResult,
    LookupItem,
    LookupResult,
    PutItem,
    PutResult,
)
from kvtier.client.sync import Connection, Lease, Namespace, connect

__all__ = [
    "AsyncConnection",
    "AsyncNamespace",
    "Connection",
    "DeleteResult",
    "GetItem",
    "GetResult",
    "KeyChain",
    "Lease",
    "LookupItem",
    "LookupResult",
    "Namespace",
    "PutItem",
    "PutResult",
    "connect",
]
