"""A store on a daemon, its KV events, and a router that hears them: all in this process."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import kvtier
from kvtier import Tier
from kvtier.packing.keys import chain_keys
from kvtier_sglang.events.blocks import Chains
from kvtier_sglang.events.outlet import Endpoints, Outlet
from kvtier_sglang.events.publisher import EventPublisher, EventSource, Waits
from kvtier_sglang.events.wire import Medium, block_hash
from kvtier_sglang.store import PageStore
from tests.sglang.event_router import Router
from tests.sglang.pool_rig import PAGE, PAGES, pool_with_heads, store_for

__all__ = ["Told", "free_endpoints", "told"]

HOST, NVME = "EXTERNAL", "DISK"


def free_endpoints() -> Endpoints:
    """Two that nothing listens at."""
    ports = []
    for _ in range(2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    return Endpoints(events=f"tcp://127.0.0.1:{ports[0]}", replay=f"tcp://127.0.0.1:{ports[1]}")


@dataclass
class Told:
    """`prompt` stores pages; `believes` says what a router must come to believe."""

    connection: kvtier.client.Connection
    store: PageStore
    endpoints: Endpoints
    chains: Chains = field(default_factory=Chains)
    publishers: list[EventPublisher] = field(default_factory=list)
    routers: list[Router] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)

    def publish(
        self, waits: Waits | None = None, *, host: Medium = Medium.EXTERNAL
    ) -> EventPublisher:
        source = EventSource(
            url=self.connection.url,
            families=lambda: self.store.families,
            parts=2,
            shards=1,
            block_tokens=PAGE,
            host=host,
        )
        made = EventPublisher(source, Outlet(self.endpoints), chains=self.chains, waits=waits)
        self.publishers.append(made)
        return made

    def router(self, loses: Callable[[int], bool] = lambda _count: False) -> Router:
        made = Router(self.endpoints.events, self.endpoints.replay, loses)
        self.routers.append(made)
        return made

    def prompt(self, number: int, pages: int = PAGES) -> list[bytes]:
        """Stores the pages of a prompt as SGLang does, and tells of its tokens."""
        tokens = [number * 1000 + token for token in range(pages * PAGE)]
        keys = chain_keys(tokens, PAGE, parent=None)
        hashes = [key.hex() for key in keys]
        self.chains.tell(tokens, hashes, None)
        for begin in range(0, pages, PAGES):
            some = hashes[begin : begin + PAGES]
            assert all(self.store.set(some, list(range(len(some))), hashes[:begin]))
        self.keys += [key for key in keys if key not in self.keys]
        return keys

    def found(self) -> dict[str, set[int]]:
        """By what a lookup says of every page: those in host memory, and those on NVMe alone."""
        lookups = [part.namespace.lookup(self.keys) for part in self.store._parts]
        media: dict[str, set[int]] = {HOST: set(), NVME: set()}
        for key, *items in zip(self.keys, *lookups, strict=True):
            tiers = {item.tier for item in items}
            if tiers == {Tier.HOST}:
                media[HOST].add(block_hash(key))
            elif tiers == {Tier.NVME}:
                media[NVME].add(block_hash(key))
        return media

    def agrees(self, router: Router) -> Callable[[], bool]:
        """Whether the router believes just what there is, by lookups and by the daemon's counts."""

        def check() -> bool:
            found, believed = self.found(), router.believed
            tiers = {tier.tier: tier for tier in self.connection.status(deadline=10).tiers}
            on_nvme = tiers[Tier.NVME].pages_sealed if Tier.NVME in tiers else 0
            return (
                believed[HOST] == found[HOST]
                and found[NVME] <= believed[NVME]
                and 2 * len(believed[NVME]) == on_nvme
            )

        return check

    def close(self) -> None:
        for made in (*self.routers, *self.publishers):
            made.close()


@contextmanager
def told(url: str, **pool: Any) -> Iterator[Told]:
    with kvtier.connect(url, deadline=10, plane="grpc") as connection:
        store = store_for(connection, pool_with_heads("page_first_direct", **pool))
        made = Told(connection=connection, store=store, endpoints=free_endpoints())
        try:
            yield made
        finally:
            made.close()


def names_of(keys: Sequence[bytes]) -> set[int]:
    return {block_hash(key) for key in keys}
