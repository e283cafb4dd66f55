"""Follows the daemon's Watch and publishes what a router has to know.

Promise: a router that takes every batch, and asks for those it missed, believes in what the daemon
holds, at most a moment late; in doubt it is told less. When a watch ends (the daemon went, or told
that events were lost) the next one begins with a snapshot, and the difference is told; where there
is none within a second, everything is told as removed until there is. So it is when the daemon
gives no sign of life for a second: it has been stopped.

Whoever asks is answered, also while there is nothing to tell: there are subscribers (Dynamo's) that
wait for an answer without end, and hear nothing else meanwhile.

All of it is done in a thread of its own, which no call of SGLang waits for.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final

import kvtier
from kvtier.client import AsyncConnection, ResidencyKind
from kvtier.errors import InvalidConfigValue
from kvtier_sglang.border import kept_inside
from kvtier_sglang.events.batches import batches
from kvtier_sglang.events.blocks import CHAINS, Blocks, Chains, Inbox
from kvtier_sglang.events.mirror import Mirror
from kvtier_sglang.events.outlet import Endpoints, Outlet, now
from kvtier_sglang.events.wire import AllBlocksCleared, Event, Medium, encode
from kvtier_sglang.options import Options

__all__ = ["EventPublisher", "EventSource", "Waits", "publisher_for"]

log = logging.getLogger(__name__)

#: Of which the tokens are kept, some 235 MB with 64 tokens a block; what is beyond is not told.
BLOCKS_MAX: Final = 1 << 18
_TURN_S: Final = 0.05
#: Of a turn, for learning of prompts; what is left of them waits for the next.
_LEARNING_S: Final = 0.1
_SNAPSHOT_S: Final = 10.0
#: An empty batch shows a subscriber that nothing is missing.
_QUIET_S: Final = 5.0
#: Between the pieces of a long answer: the interpreter is SGLang's, too.
_BREATH_S: Final = 0.002
_END_S: Final = 5.0
#: For who asks because of the last that was told.
_FAREWELL_S: Final = 0.05
_HOST_MEDIA: Final = (Medium.EXTERNAL.value, Medium.CPU_PINNED.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """In seconds. `silence` of the daemon's, and `grace` between two watches: how long a router may
    believe in what nobody vouches for. A publisher that failed begins anew after `restart`, twice
    as long each time, up to `restart_max`.
    """

    silence: float = 1.0
    grace: float = 1.0
    retry: float = 0.2
    restart: float = 1.0
    restart_max: float = 60.0


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
    #: What the daemon's host memory is called.
    host: Medium = Medium.EXTERNAL


class EventPublisher:
    """Begins at once. Close it; `outlet` is closed with it. An error in it costs what it knows, and
    a wait: then it begins anew.
    """

    def __init__(
        self,
        source: EventSource,
        outlet: Outlet,
        *,
        chains: Chains = CHAINS,
        waits: Waits | None = None,
    ) -> None:
        self._source = source
        self._outlet = outlet
        self._chains = chains
        self._waits = waits or Waits()
        self._ending = threading.Event()
        self._published_at = 0.0
        self._begin_anew()
        self._thread = threading.Thread(target=self._run, name="kvtier-events", daemon=True)
        self._thread.start()

    @property
    def is_telling(self) -> bool:
        """Routers are told of every part, and nothing of it is in doubt. Any thread."""
        return self._thread.is_alive() and len(self._vouched) == self._source.parts

    def close(self) -> None:
        """Everything is told as removed."""
        self._ending.set()
        self._thread.join(_END_S)

    def _begin_anew(self) -> None:
        """With nothing that was known before: an error may have left it half done."""
        self._blocks = Blocks(self._source.block_tokens, blocks_max=BLOCKS_MAX)
        source = self._source
        self._mirror = Mirror(self._blocks, objects=source.parts * source.shards, host=source.host)
        self._families: Sequence[bytes] = ()
        self._watches: list[asyncio.Task[None]] = []
        #: Parts of which a watch has told all that is there, and tells what changes.
        self._vouched: set[int] = set()
        #: Parts of which nobody vouches for what is known, and since when.
        self._unsure: dict[int, float] = {}
        #: All that holds, since what was told last; and when it may be made again.
        self._whole: list[bytes] | None = None
        self._whole_at = 0.0

    def _run(self) -> None:
        learning = self._chains.listen()
        wait = self._waits.restart
        try:
            while not self._ending.is_set():
                began = time.monotonic()
                with kept_inside("publishing KV events", self._withdraw):
                    asyncio.run(self._serve(learning))
                if time.monotonic() - began > self._waits.restart_max:
                    wait = self._waits.restart
                self._rest(wait)
                wait = min(2 * wait, self._waits.restart_max)
            if self._outlet.takes_questions:
                with kept_inside("answering who asks for KV events"):
                    time.sleep(_FAREWELL_S)
                    self._answer_with_nothing()
        finally:
            self._chains.leave(learning)
            self._outlet.close()

    def _rest(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        with kept_inside("answering who asks for KV events"):
            while not self._ending.wait(_TURN_S) and time.monotonic() < ends:
                self._answer_with_nothing()
        self._ending.wait(max(0.0, ends - time.monotonic()))

    def _answer_with_nothing(self) -> None:
        """That is what holds, when nobody follows the daemon."""
        for question in self._outlet.questions():
            if not self._outlet.answer_kept(question):
                self._outlet.answer(question, [self._encoded([AllBlocksCleared()])])

    def _withdraw(self) -> None:
        """Nobody tells of what goes until it begins anew."""
        self._begin_anew()
        with kept_inside("withdrawing KV events"):
            self._publish([AllBlocksCleared()])

    async def _serve(self, learning: Inbox) -> None:
        self._publish([AllBlocksCleared()])
        async with kvtier.aio.connect(self._source.url, plane="grpc") as connection:
            try:
                while not self._ending.is_set():
                    await self._turn(connection, learning)
                    await asyncio.sleep(_TURN_S)
            finally:
                await self._follow(connection, ())
                self._tell()

    async def _turn(self, connection: AsyncConnection, learning: Inbox) -> None:
        families = self._source.families()
        if families != self._families:
            await self._follow(connection, families)
        self._learn(learning)
        at = time.monotonic()
        grace = self._waits.grace
        for part in [part for part, since in self._unsure.items() if at - since > grace]:
            del self._unsure[part]
            self._nothing_of(part)
        self._tell()
        await self._answer()
        if at - self._published_at > _QUIET_S:
            self._publish([])

    def _learn(self, learning: Inbox) -> None:
        ends = time.monotonic() + _LEARNING_S
        while time.monotonic() < ends and (chain := learning.take()) is not None:
            with kept_inside("learning of a prompt"):
                self._mirror.learned(self._blocks.learn(chain))

    async def _answer(self) -> None:
        """Serves who asks. All that holds is made once for all who want it until more is told, and
        takes half of the time at most.
        """
        for question in self._outlet.questions():
            if self._outlet.answer_kept(question):
                continue
            if self._whole is None:
                if time.monotonic() < self._whole_at:
                    self._outlet.put_back(question)
                    continue
                await self._make_whole()
            self._outlet.answer(question, self._whole or ())
            await asyncio.sleep(_BREATH_S)

    async def _make_whole(self) -> None:
        """What goes meanwhile is told as removed after it: nothing is told while it is made."""
        began, made = time.monotonic(), []
        for events in batches(self._mirror.all()):
            made.append(self._encoded(events))
            await asyncio.sleep(_BREATH_S)
        self._whole = made
        self._whole_at = 2 * time.monotonic() - began

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
        """Again and again, whatever ends it. Of a silent daemon nothing is believed at once: it has
        had its time.
        """
        while True:
            with kept_inside("watching for KV events"):
                try:
                    await self._read(connection, part, fingerprint)
                except kvtier.DeadlineExceeded as error:
                    log.debug("kvtier: watching again: %s", str(error))
                    self._nothing_of(part)
                except kvtier.KvtierError as error:
                    log.debug("kvtier: watching again: %s", str(error))
            self._vouched.discard(part)
            self._unsure.setdefault(part, time.monotonic())
            await asyncio.sleep(self._waits.retry)

    async def _read(self, connection: AsyncConnection, part: int, fingerprint: bytes) -> None:
        """Until the stream ends, which it does with an error."""
        first = part * self._source.shards
        found: dict[int, dict[kvtier.Tier, bytearray]] = defaultdict(lambda: defaultdict(bytearray))
        watching = connection.watch(fingerprint, deadline=_SNAPSHOT_S, silence=self._waits.silence)
        async with aclosing(watching) as events:
            async for event in events:
                number = first + event.shard
                if event.kind is ResidencyKind.SNAPSHOT_END:
                    for shard in range(self._source.shards):
                        self._mirror.is_just(first + shard, found.pop(shard, {}))
                    self._unsure.pop(part, None)
                    self._vouched.add(part)
                elif event.kind is ResidencyKind.BUMPED:
                    self._nothing_of(part)
                    self._vouched.add(part)
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
        self._vouched.discard(part)
        for shard in range(self._source.shards):
            self._mirror.is_just(part * self._source.shards + shard, {})

    def _tell(self) -> None:
        for events in batches(self._mirror.take()):
            self._publish(events)

    def _publish(self, events: Sequence[Event]) -> None:
        if events:
            self._whole = None
        self._outlet.publish(self._encoded(events))
        self._published_at = time.monotonic()

    def _encoded(self, events: Sequence[Event]) -> bytes:
        return encode(events, stamp=now(), dp_rank=self._source.dp_rank)


def publisher_for(source: EventSource, options: Options) -> EventPublisher:
    """As the options say. Raises InvalidConfigValue, MissingExtra."""
    host = options.events_host_medium
    if host not in _HOST_MEDIA:
        raise InvalidConfigValue(
            f"kvtier_events_host_medium is {host!r}", remedy=f"pass {' or '.join(_HOST_MEDIA)}"
        )
    endpoints = Endpoints(
        events=options.events_endpoint,
        replay=options.events_replay_endpoint,
        topic=options.events_topic,
    ).checked(allows_network=options.events_allow_network, dp_rank=source.dp_rank)
    return EventPublisher(replace(source, host=Medium(host)), Outlet(endpoints))
