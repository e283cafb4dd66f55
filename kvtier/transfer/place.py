"""Whose pages they are, and whether the bytes in a slot are the page that the index says.

`Identity` is what a page's sum is bound to beside its own key; `check` is the only judge of
records: a get, a put that meets an existing page, a move between tiers and a scrub all go through
it. Functions without state: any thread, while the caller holds a Reading.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import IntEnum

from kvtier.core.handles import Reading
from kvtier.core.page import PageMeta, PageRef, Tier
from kvtier.core.quarantine import Verdict, Why
from kvtier.errors import CorruptRecord
from kvtier.packing.checksum import verify_payload
from kvtier.packing.layout import Layout
from kvtier.packing.record import HEADER_BYTES, RecordHeader, decode_header
from kvtier.tiers.host import HostArena

__all__ = ["Copy", "Identity", "Place", "Verify", "Why", "check", "failed", "load"]


class Verify(IntEnum):
    """Whether payload sums are checked when a page leaves host memory (on the way in they always
    are).
    """

    ALWAYS = 1
    SAMPLED = 2
    OFF = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One shard of one family in one namespace generation."""

    fingerprint: bytes
    generation: int
    shard: int

    def payload_ok(self, payload: memoryview, meta: PageMeta | RecordHeader) -> bool:
        """The bytes are what the maker of this page summed up."""
        return verify_payload(
            payload,
            meta.payload_sum,
            key=meta.key,
            fingerprint=self.fingerprint,
            namespace_generation=self.generation,
            shard=self.shard,
            codec=meta.codec,
            length=meta.length,
        )

    def header(self, meta: PageMeta, ref: PageRef) -> RecordHeader:
        """Of a page that its maker has just put at `ref`."""
        return RecordHeader(
            fingerprint=self.fingerprint,
            namespace_generation=self.generation,
            shard=self.shard,
            key=meta.key,
            length=meta.length,
            codec=meta.codec,
            lossy=meta.lossy,
            payload_sum=meta.payload_sum,
            origin_sum=meta.origin_sum,
            generation=ref.generation,
            # One counter numbers allocations, so it orders the copies of a key too.
            sequence=ref.generation,
            tier=ref.tier,
            slot=ref.slot,
            parent=meta.parent,
            depth=meta.depth,
            session=meta.session,
            ttl_ms=meta.ttl_ms,
            priority=meta.priority,
            boot_id=ref.boot_id,
            created_ms=0,
        )

    def made(self, header: RecordHeader) -> bool:
        """The record belongs to this shard of this namespace generation."""
        return (header.fingerprint, header.namespace_generation, header.shard) == (
            self.fingerprint,
            self.generation,
            self.shard,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Place(Identity):
    """What a handle names: an identity, its number in the store, and what its pages look like."""

    namespace: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class Copy:
    """A record that passed: its header, and its payload as a view of the arena."""

    header: RecordHeader
    payload: memoryview


def load(
    arena: HostArena, identity: Identity, reading: Reading, key: bytes, *, check_payload: bool
) -> Copy | None:
    """`check` of the copy that `reading` holds in host memory."""
    record = arena.view(reading.ref.slot, 0, HEADER_BYTES + reading.length)
    return check(record, identity, reading, key, check_payload=check_payload)


def check(
    record: memoryview, identity: Identity, reading: Reading, key: bytes, *, check_payload: bool
) -> Copy | None:
    """The copy in `record`, if header and payload are what the index says of `reading`.

    The header is always checked, the payload's sum if `check_payload`.
    """
    try:
        header = decode_header(record)
    except CorruptRecord:
        return None
    if not _is_of(header, reading.ref) or header.key != key or not identity.made(header):
        return None
    if (header.length, header.codec) != (reading.length, reading.codec):
        return None
    payload = record[HEADER_BYTES : HEADER_BYTES + header.length]
    if check_payload and not identity.payload_ok(payload, header):
        return None
    return Copy(header, payload)


def _is_of(header: RecordHeader, ref: PageRef) -> bool:
    """The record was written for this allocation.

    On NVMe that may have been in an earlier boot: generations are never used again, by none.
    """
    if ref.tier is Tier.NVME:
        return (header.tier, header.slot, header.generation) == (ref.tier, ref.slot, ref.generation)
    return header.ref == ref


def failed(why: Why) -> Verdict:
    """That of a copy which is found not to be what it should be, now."""
    return Verdict(why, time.monotonic())
