"""What goes into and comes out of a plane: plain values, so that a plane need not know protobuf.

Outcomes of a batch are `bytes`, one code an item in request order (every code is below 128): a
batch of thousands of keys is then searched and counted without making an object a key. Values that
are made once a page are named tuples, which cost a fifth of a frozen dataclass to make.

Immutable: usable from any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, Protocol

from kvtier.core.page import NO_SUM, Codec, Durability, PageRef, Tier
from kvtier.packing.layout import Layout

__all__ = [
    "AnnouncedPage",
    "Capabilities",
    "DeviceStatus",
    "FlushResult",
    "GetQuery",
    "Hints",
    "LookupReply",
    "NamespaceRequest",
    "NamespaceStatus",
    "OpenedNamespace",
    "OutgoingPage",
    "PageSink",
    "PinReply",
    "PoolReport",
    "PoolStatus",
    "PutOpening",
    "PutReply",
    "QuarantinedPage",
    "Residency",
    "ResidencyKind",
    "SessionStatus",
    "Status",
    "TierStatus",
    "VerifyProgress",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hints:
    """What travels with a call and changes nothing of its answer. `traceparent` is W3C's.

    `ended`: the conversation does not come back after this call; else `return_ms`: it is expected
    to after so long (None: nobody knows).
    """

    session: str = ""
    ttl_ms: int = 0
    priority: int = 0
    traceparent: str = ""
    ended: bool = False
    return_ms: int | None = None

    @property
    def says_return(self) -> bool:
        return self.ended or self.return_ms is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceRequest:
    """`session_id` 0 opens a session. `fingerprint` is the caller's own; the daemon refuses
    another.
    """

    session_id: int
    tenant: str
    salt: bytes
    layout: Layout
    client_name: str
    fingerprint: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedNamespace:
    """A handle, bound for life to this boot and this namespace generation.

    `namespace_number` is what the local plane's directory calls the two; 0: the daemon has none.
    """

    session_id: int
    handle: int
    boot_id: int
    fingerprint: bytes
    generation: int
    raw_bytes: int
    fp8_bytes: int
    namespace_number: int = 0


class LookupReply(NamedTuple):
    codes: bytes
    tiers: bytes  # Tier numbers, 0 where there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class GetQuery:
    """With `reader_verifies` the sink compares every page with its sum: the daemon need not."""

    handle: int
    keys: Sequence[bytes]
    accept: tuple[Codec, ...]
    lossy_ok: bool
    hints: Hints
    reader_verifies: bool = False


class AnnouncedPage(NamedTuple):
    """One page of a get's answer, before its bytes. Only a HIT has bytes."""

    code: int
    tier: int
    codec: int
    lossy: bool
    length: int
    payload_sum: bytes
    origin_sum: bytes
    slot: int
    generation: int


class PageSink(Protocol):
    """Where a get delivers. Called by one task, in key order for each method; only `settle` may
    take long, and it does not hold up the event loop.
    """

    def announce(self, index: int, page: AnnouncedPage) -> None:
        """The outcome of key `index`. Called once for every key."""

    def begin(self, index: int) -> memoryview | None:
        """Where the bytes of page `index`, a hit, go; None drops them. Called at its first byte."""

    def complete(self, index: int) -> None:
        """All bytes of page `index` are where `begin` said."""

    async def settle(self) -> None:
        """Deals with the pages that are complete; awaited before more bytes are taken in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOpening:
    """`message_bytes_max` is what the daemon takes in one message."""

    handle: int
    message_bytes_max: int
    durability: Durability
    hints: Hints


class OutgoingPage(NamedTuple):
    """One page of a put: what its maker says about it, and its payload (contiguous)."""

    key: bytes
    codec: Codec
    payload_sum: bytes
    data: memoryview
    origin_sum: bytes = NO_SUM
    lossy: bool = False
    parent: bytes = b""
    depth: int = 0


class PutReply(NamedTuple):
    """`reached` holds Durability numbers, 0 where the daemon says nothing."""

    codes: bytes
    boot_id: int
    slots: Sequence[int]
    generations: Sequence[int]
    reached: bytes


class PinReply(NamedTuple):
    """`lease_id` 0: nothing was there to pin."""

    lease_id: int
    codes: bytes
    ttl_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushResult:
    """What became of the pages put since the flush before: how many survive the daemon now, and of
    how many nobody can say so (evicted before, refused by the tier, no NVMe tier, session lost).
    """

    pages: int
    pages_lost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyProgress:
    """How far a reading of a whole tier has come. Corrupt pages are condemned: no get finds them
    any more.
    """

    pages_done: int
    pages_total: int
    bytes_done: int
    pages_corrupt: int
    pages_unreadable: int = 0


class ResidencyKind(IntEnum):
    """Numbers of proto WatchKind. Device pools are not told here."""

    #: These pages are there; several follow each other.
    SNAPSHOT = 1
    #: All that is there has been told; changes follow.
    SNAPSHOT_END = 2
    STORED = 3
    #: Out of this tier, not necessarily out of the others.
    REMOVED = 4
    #: Every page of the namespace is gone, in all tiers.
    BUMPED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """What became findable in a tier or left it. `keys` are of 32 bytes, concatenated, all of one
    shard; `tier` is None where no keys are. `epoch` is the daemon's boot id.
    """

    kind: ResidencyKind
    tier: Tier | None
    shard: int
    keys: bytes
    epoch: int
    #: A codec has rounded these copies: a get without `lossy_ok` does not take them.
    lossy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantinedPage:
    """A copy that failed its checks and is kept to be looked at. `length` is payload bytes;
    `device` the directory of an NVMe device or "", `age_s` seconds since it was condemned (None:
    not known), `reason` for people, or "".
    """

    ref: PageRef
    fingerprint: bytes
    shard: int
    key: bytes
    length: int
    codec: Codec
    device: str = ""
    age_s: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Every limit a client must keep, and what this daemon can do."""

    version: str
    record_version: int
    tiers: tuple[Tier, ...]
    codecs: tuple[Codec, ...]
    planes: tuple[str, ...]
    page_bytes_max: int
    keys_per_call_max: int
    pages_per_put_max: int
    bytes_per_call_max: int
    message_bytes_max: int
    chunk_bytes: int
    lease_s_default: float
    lease_s_max: float
    session_ttl_s: float
    sessions_max: int
    namespaces_max: int
    methods: tuple[str, ...]
    local_socket: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStatus:
    """Counts of one tier, taken together."""

    tier: Tier
    capacity_bytes: int
    ready_bytes: int
    used_bytes: int
    pages_filling: int
    pages_sealed: int
    pages_retiring: int
    pages_quarantined: int
    pages_pinned: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceStatus:
    fingerprint: bytes
    tenant: str
    model_id: str
    weights_revision: str
    generation: int
    shard_count: int
    pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStatus:
    session_id: int
    client_name: str
    idle_s: float
    handles: int
    leases: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStatus:
    """One path of the NVMe tier. `reason` says why it is offline, or not as configured; else
    empty. `capacity_bytes` is its share of the cap, `disk_bytes` what its files take.
    """

    path: str
    is_online: bool
    reason: str
    is_direct_io: bool
    capacity_bytes: int
    disk_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReport:
    """A device pool as its engine tells it, at one moment; see DevicePool of page.proto."""

    name: str
    device: str
    fingerprint: bytes
    page_bytes: int
    pages: int
    held: int
    draining: int
    pinned: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """Who told of a pool, and how long ago."""

    session_id: int
    client_name: str
    age_s: float
    pool: PoolReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """One consistent picture of a daemon. `state` is "starting", "ready" or "draining"."""

    version: str
    state: str
    boot_id: int
    uptime_s: float
    directory: str
    listen: tuple[str, ...]
    planes: tuple[str, ...]
    tiers: tuple[TierStatus, ...]
    namespaces: tuple[NamespaceStatus, ...]
    sessions: tuple[SessionStatus, ...]
    counters: dict[str, int]
    warnings: tuple[str, ...]
    devices: tuple[DeviceStatus, ...]
    pools: tuple[PoolStatus, ...] = ()
