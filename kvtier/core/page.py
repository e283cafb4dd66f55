"""The words of kvtier as types: tiers, codecs, outcomes, page refs and what is known of a page.

The numbers of every enum are those of proto/kvtier/v1/page.proto (a test compares them).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

__all__ = [
    "KEY_BYTES",
    "NO_SUM",
    "TIERS",
    "Codec",
    "DeleteCode",
    "Durability",
    "GetCode",
    "LeaseCode",
    "PageMeta",
    "PageRef",
    "PutCode",
    "Tier",
]

KEY_BYTES = 32
SUM_BYTES = 16
#: Sixteen zero bytes stand for "this page has no origin" and never for "no checksum".
NO_SUM = bytes(SUM_BYTES)


class Tier(IntEnum):
    DEVICE = 1
    HOST = 2
    NVME = 3
    SHARED = 4


#: number -> Tier, for loops over pages: a look-up costs a fifth of making the enum of its number.
TIERS: dict[int, Tier] = {int(tier): tier for tier in Tier}


class Codec(IntEnum):
    RAW = 1
    FP8 = 2


class GetCode(IntEnum):
    """The one outcome of a key in a lookup or get; anything but HIT means: compute the page."""

    HIT = 1
    MISS = 2
    STALE = 3
    CORRUPT = 4
    BUSY = 5
    TIMEOUT = 6
    UNAVAILABLE = 7
    IO_ERROR = 8
    REFUSED = 9


class PutCode(IntEnum):
    """The one outcome of a page in a put. TIMEOUT and UNAVAILABLE are made by the client alone."""

    STORED = 1
    EXISTS = 2
    STALE_GENERATION = 3
    NONFINITE = 4
    QUOTA = 5
    BUSY = 6
    REFUSED = 7
    TIMEOUT = 8
    UNAVAILABLE = 9

    @property
    def is_stored(self) -> bool:
        """The page is in the cache now, whoever put it there."""
        return self in (PutCode.STORED, PutCode.EXISTS)


class DeleteCode(IntEnum):
    DELETED = 1
    ABSENT = 2
    STALE = 3


class LeaseCode(IntEnum):
    HELD = 1
    RELEASED = 2
    EXPIRED = 3
    UNKNOWN = 4


class Durability(IntEnum):
    HOST = 1
    NVME = 2


class PageRef(NamedTuple):
    """A page's tag: one allocation of one slot. `slot` is an offset in units of 4 KiB in its
    tier."""

    boot_id: int
    tier: Tier
    slot: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PageMeta:
    """What a page's maker says about it; travels with the bytes and lies in the record header.

    `key` and `parent` are 32 bytes (`parent` is empty at the head of a chain), `payload_sum` and
    `origin_sum` 16 bytes, `length` the payload bytes as packed by `codec`, `ttl_ms` 0 for no
    opinion.
    """

    key: bytes
    length: int
    codec: Codec
    payload_sum: bytes
    origin_sum: bytes = NO_SUM
    lossy: bool = False
    parent: bytes = b""
    depth: int = 0
    session: str = ""
    ttl_ms: int = 0
    priority: int = 0
