"""The Watch stream: a snapshot of what is there, then every change. Event loop's thread.

Each stream numbers its own messages from 1 on, without gaps, whatever its filter leaves out. What
the store numbers stays inside: it tells when changes were lost, and that ends the stream.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

from kvtier.core.events import EventKind, Residency, WatcherBehind
from kvtier.core.page import KEY_BYTES, Tier
from kvtier.daemon.node import Node
from kvtier.daemon.pools import PoolKey, Told
from kvtier.errors import Busy, DeadlineExceeded
from kvtier.transfer.messages import pool_to_proto
from kvtier.v1 import pages_pb2 as pb

__all__ = ["watch"]

#: How long a change may wait before watchers hear of it.
_POLL_S = 0.02
_EVENTS_PER_TURN = 1024
#: Keys in one event, so that a message stays far below what stock clients take.
_KEYS_PER_EVENT = 16_384


async def watch(node: Node, request: pb.WatchRequest, context: Any) -> None:
    """Ends with Busy when the watcher falls behind, DaemonUnavailable when the daemon drains."""
    sequence, snapshot = node.store.watching.start()
    try:
        sender = _Sender(node, request, context)
        for event in snapshot:
            await sender.send(event)
        await sender.snapshot_end()
        while True:
            node.refuse_unless_serving()
            await sender.pools()
            await sender.alive()
            events = node.store.watching.since(sequence, _EVENTS_PER_TURN)
            for event in events:
                await sender.send(event)
            if events:
                sequence = events[-1].sequence
            else:
                await asyncio.sleep(_POLL_S)
    except WatcherBehind as error:
        raise Busy(
            f"the watcher fell behind: {error} (limits.watch_events_max)",
            remedy="Watch again: it begins with a snapshot.",
        ) from error
    finally:
        node.store.watching.stop()


class _Sender:
    def __init__(self, node: Node, request: pb.WatchRequest, context: Any) -> None:
        self._node = node
        self._fingerprint = request.fingerprint
        self._alive_s = max(request.alive_ms / 1000, _POLL_S) if request.alive_ms else math.inf
        self._sent_at = time.monotonic()
        self._context = context
        self._idle_s = node.config.limits.get_idle_ms / 1000
        self._sent = 0
        self._over = node.registry.past_numbers()
        self._pools: Mapping[PoolKey, Told] = {}
        self._pools_version = 0

    async def send(self, event: Residency) -> None:
        fingerprint = self._node.registry.fingerprint_of(event.namespace)
        # b"": the self-test's namespace, which is nobody's business.
        if not fingerprint or self._fingerprint not in (b"", fingerprint):
            return
        # What is swept after a bump left with the bump; the same keys may be there again by now.
        if event.namespace in self._over:
            return
        if event.kind is EventKind.BUMPED:
            self._over.add(event.namespace)
        for keys in _pieces(event.keys):
            await self._write(
                pb.WatchEvent(
                    epoch=self._node.boot_id,
                    kind=int(event.kind),  # type: ignore[arg-type]
                    tier=int(event.tier or 0),  # type: ignore[arg-type]
                    fingerprint=fingerprint,
                    shard=event.shard,
                    keys=keys,
                    lossy=event.lossy,
                )
            )

    async def snapshot_end(self) -> None:
        await self._write(
            pb.WatchEvent(
                epoch=self._node.boot_id,
                kind=int(EventKind.SNAPSHOT_END),  # type: ignore[arg-type]
            )
        )

    async def alive(self) -> None:
        """An event for those who want one so often, if none was sent as long."""
        if time.monotonic() - self._sent_at >= self._alive_s:
            await self._write(
                pb.WatchEvent(
                    epoch=self._node.boot_id,
                    kind=int(EventKind.ALIVE),  # type: ignore[arg-type]
                )
            )

    async def pools(self) -> None:
        """The device pools that have changed since the last call, and those that are gone."""
        pools = self._node.pools
        if pools.version == self._pools_version:
            return
        self._pools_version, before, self._pools = pools.version, self._pools, pools.told
        for key, told in self._pools.items():
            if key not in before or before[key].pool != told.pool:
                await self._pool(EventKind.POOL, told)
        for key in before.keys() - self._pools.keys():
            await self._pool(EventKind.POOL_GONE, before[key])

    async def _pool(self, kind: EventKind, told: Told) -> None:
        if self._fingerprint not in (b"", told.pool.fingerprint):
            return
        await self._write(
            pb.WatchEvent(
                epoch=self._node.boot_id,
                kind=int(kind),  # type: ignore[arg-type]
                tier=int(Tier.DEVICE),  # type: ignore[arg-type]
                fingerprint=told.pool.fingerprint,
                pool=pool_to_proto(told.pool),
                session_id=told.session_id,
                client_name=told.client_name,
            )
        )

    async def _write(self, event: pb.WatchEvent) -> None:
        self._sent += 1
        event.sequence = self._sent
        self._sent_at = time.monotonic()
        try:
            async with asyncio.timeout(self._idle_s):
                await self._context.write(event)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the watcher took nothing for {self._idle_s:g} s (limits.get_idle_ms)",
                remedy="Read without long pauses, or raise limits.get_idle_ms.",
            ) from None


def _pieces(keys: bytes) -> Iterable[bytes]:
    step = _KEYS_PER_EVENT * KEY_BYTES
    return (keys[at : at + step] for at in range(0, max(len(keys), 1), step))
