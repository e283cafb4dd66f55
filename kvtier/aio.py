"""The asyncio client: `async with kvtier.aio.connect(url) as kv`."""

from __future__ import annotations

from kvtier.client.aio import AsyncConnection, connect
from kvtier.client.lease import AsyncLease
from kvtier.client.namespace import AsyncNamespace

__all__ = ["AsyncConnection", "AsyncLease", "AsyncNamespace", "connect"]
