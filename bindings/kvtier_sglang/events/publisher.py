"""Follows the daemon's Watch and publishes what a router has to know.

Promise: a router that takes every batch, and asks for those it missed, believes in what the daemon
holds, at most a moment late; in doubt it is told less. When a watch ends (the daemon went, or told
that events were lost) the next one begins with a snapshot, and the difference is told; where there
is none within a second, everything is told as removed until there is.

All of it is done in a thread of its own, which no call of SGLang waits for.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final

import kvtier
from kvtier.client import AsyncConnection, ResidencyKind
from kvtier_sglang.border import kept_inside
from kvtier_sglang.events.blocks import CHAINS, Blocks, Chain, Chains
from kvtier_sglang.events.mirror import Mirror
from kvtier_sglang.events.outlet import Endpoints, Outlet, now
from kvtier_sglang.events.wire import AllBlocksCleared, BlockStored, Event, encode
from kvtier_sglang.options import Options

__all__ = ["EventPublisher", "EventSource", "publisher_for"]

log = logging.getLogger(__name__)

#: Of which the tokens are kept, some 130 MB with 64 tokens a block; what is beyond is not told.
BLOCKS_MAX: Final = 1 << 18
_TURN_S: Final = 0.05
#: How long a router may believe in what nobody vouches for.
GRACE_S: Final = 1.0
_RETRY_S: Final = 0.2
_SNAPSHOT_S: Final = 10.0
#: An empty batch shows a subscriber that nothing is missing.
_QUIET_S: Final = 5.0
_BLOCKS_A_BATCH_MAX: Final = 4096
_END_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSource:
    """Whose pages are told. `families` gives the fingerprints of a page's parts as they are now,
    nothing while none are served; each is divided into `shards`.
    """

    url: str
    families: Callable[[], Sequence[bytes]]
    parts: int
    shards: int
    block_tokens: int
    #: Copies that the daemon has rounded are told, too.
    takes_lossy: bool = False
    dp_rank: int = 0


class EventPublisher:
    """Begins at once. Close it; `outlet` is closed with it."""

    def __init__(self, source: EventSource, outlet: Outlet, *, chains: Chains = CHAINS) -> None:
        self._source = source
        self._outlet = outlet
        self._chains = chains
        self._blocks = Blocks(source.block_tokens, blocks_max=BLOCKS_MAX)
        self._mirror = Mirror(self._blocks, objects=source.parts * source.shards)
        self._ending = threading.Event()
        self._families: Sequence[bytes] = ()
        self._watches: list[asyncio.Task[None]] = []
        #: Parts of which nobody vouches for what is known, and since when.
        self._unsure: dict[int, float] = {}
        self._published_at = 0.0
        self._thread = threading.Thread(target=self._run, name="kvtier-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Everything is told as removed."""
        self._ending.set()
        self._thread.join(_END_S)

    def _run(self) -> None:
        learning = self._chains.listen()
        try:
            with kept_inside("publishing KV events", self._give_up):
                asyncio.run(self._serve(learning))
        finally:
            self._chains.leave(learning)
            self._outlet.close()

    def _give_up(self) -> None:
        """Nobody would tell of what goes from now on."""
        self._publish([AllBlocksCleared()])

    async def _serve(self, learning: deque[Chain]) -> None:
        self._publish([AllBlocksCleared()])
        async with kvtier.aio.connect(self._source.url, plane="grpc") as connection:
            try:
                while not self._ending.is_set():
                    await self._turn(connection, learning)
                    await asyncio.sleep(_TURN_S)
            finally:
                await self._follow(connection, ())
                self._tell()

    async def _turn(self, connection: AsyncConnection, learning: deque[Chain]) -> None:
        families = self._source.families()
        if families != self._families:
            await self._follow(connection, families)
        for _ in range(len(learning)):
            self._mirror.learned(self._blocks.learn(learning.popleft()))
        at = time.monotonic()
        for part in [part for part, since in self._unsure.items() if at - since > GRACE_S]:
            del self._unsure[part]
            self._nothing_of(part)
        self._tell()
        self._outlet.answer(self._whole)
        if at - self._published_at > _QUIET_S:
            self._publish([])

    async def _follow(self, connection: AsyncConnection, families: Sequence[bytes]) -> None:
        """From now on these families are what is served."""
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        self._unsure.clear()
        for part in range(self._source.parts):
            self._nothing_of(part)
        self._families = families
        self._watches = [
            asyncio.create_task(self._watch(connection, part, fingerprint))
            for part, fingerprint in enumerate(families)
        ]

    async def _watch(self, connection: AsyncConnection, part: int, fingerprint: bytes) -> None:
        while True:
            try:
                await self._read(connection, part, fingerprint)
            except kvtier.KvtierError as error:
                log.debug("kvtier: watching again: %s", str(error))
            self._unsure.setdefault(part, time.monotonic())
            await asyncio.sleep(_RETRY_S)

    async def _read(self, connection: AsyncConnection, part: int, fingerprint: bytes) -> None:
        """Until the stream ends, which it does with an error."""
        first = part * self._source.shards
        found: dict[int, dict[kvtier.Tier, bytearray]] = defaultdict(lambda: defaultdict(bytearray))
        async with aclosing(connection.watch(fingerprint, deadline=_SNAPSHOT_S)) as events:
            async for event in events:
                number = first + event.shard
                if event.kind is ResidencyKind.SNAPSHOT_END:
                    for shard in range(self._source.shards):
                        self._mirror.is_just(first + shard, found.pop(shard, {}))
                    self._unsure.pop(part, None)
                elif event.kind is ResidencyKind.BUMPED:
                    self._nothing_of(part)
                elif event.tier is None or event.shard >= self._source.shards:
                    continue
                elif event.lossy and not self._source.takes_lossy:
                    continue  # a get of this server does not take it
                elif event.kind is ResidencyKind.SNAPSHOT:
                    found[event.shard][event.tier] += event.keys
                elif event.kind is ResidencyKind.STORED:
                    self._mirror.stored(event.tier, number, event.keys)
                else:
                    self._mirror.removed(event.tier, number, event.keys)

    def _nothing_of(self, part: int) -> None:
        for shard in range(self._source.shards):
            self._mirror.is_just(part * self._source.shards + shard, {})

    def _tell(self) -> None:
        for events in _batches(self._mirror.take()):
            self._publish(events)

    def _whole(self) -> list[bytes]:
        return [self._encoded(events) for events in _batches(self._mirror.all())]

    def _publish(self, events: Sequence[Event]) -> None:
        self._outlet.publish(self._encoded(events))
        self._published_at = time.monotonic()

    def _encoded(self, events: Sequence[Event]) -> bytes:
        return encode(events, stamp=now(), dp_rank=self._source.dp_rank)


def _batches(events: Sequence[Event]) -> Iterator[list[Event]]:
    """In order, some thousand blocks each. A chain is cut where it is longer."""
    batch: list[Event] = []
    blocks = 0
    for event in _cut(events):
        size = 1 if isinstance(event, AllBlocksCleared) else len(event.hashes)
        if batch and blocks + size > _BLOCKS_A_BATCH_MAX:
            yield batch
            batch, blocks = [], 0
        batch.append(event)
        blocks += size
    if batch:
        yield batch


def _cut(events: Sequence[Event]) -> Iterator[Event]:
    for event in events:
        if isinstance(event, AllBlocksCleared):
            yield event
            continue
        for begin in range(0, len(event.hashes), _BLOCKS_A_BATCH_MAX):
            hashes = event.hashes[begin : begin + _BLOCKS_A_BATCH_MAX]
            if isinstance(event, BlockStored):
                yield replace(
                    event,
                    hashes=hashes,
                    parent=event.hashes[begin - 1] if begin else event.parent,
                    tokens=event.tokens[begin * event.block_tokens :][
                        : len(hashes) * event.block_tokens
                    ],
                )
            else:
                yield replace(event, hashes=hashes)


def publisher_for(source: EventSource, options: Options) -> EventPublisher:
    """At the addresses that the options name. Raises InvalidConfigValue, MissingExtra."""
    endpoints = Endpoints(
        events=options.events_endpoint,
        replay=options.events_replay_endpoint,
        topic=options.events_topic,
    ).checked(allows_network=options.events_allow_network, dp_rank=source.dp_rank)
    return EventPublisher(source, Outlet(endpoints))
