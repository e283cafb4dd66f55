"""The records that lie in one slab, by their headers: what a start looks at where it has to look;
and one record with its payload.

A slot of a slab begins at a multiple of its record size. What is found there is a sound header, a
damaged one, or nothing: zeros, or a piece of a payload from when the slab had records of another
size. Nothing is written. Thread rule: any thread, for each slab one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier.core.page import Tier
from kvtier.errors import CorruptRecord
from kvtier.packing.checksum import verify_payload
from kvtier.packing.header_columns import HEADER_DTYPE, HeaderVerdict, read_headers
from kvtier.packing.record import HEADER_BYTES, RECORD_ALIGN, decode_header, record_bytes
from kvtier.tiers.base import SLOT_BYTES, TierDevice
from kvtier.tiers.direct_file import aligned_buffer

__all__ = ["RECORD_DTYPE", "SlabScan", "fits", "is_whole", "scan_slab"]

#: Records up to this size are read with everything between their headers, in long reads.
_DENSE_BYTES: Final = 128 << 10
_BLOCK_BYTES: Final = 1 << 20
_BATCH: Final = 256  # headers

_KEPT: Final = (
    "fingerprint",
    "key",
    "parent",
    "namespace_generation",
    "length",
    "sequence",
    "slot",
    "shard",
    "codec",
    "flags",
)
#: The fields of HEADER_DTYPE that are kept of each record, packed.
RECORD_DTYPE: Final = np.dtype([(name, HEADER_DTYPE[name]) for name in _KEPT])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SlabScan:
    """What was found in a slab. `records` is of RECORD_DTYPE, one element a sound header that
    names its own slot and fits the slab's record size.

    `damaged` are the slots whose header is not what was written, `misplaced` those with a sound
    header of another place, `too_long` counts records of a larger size, left from before.
    """

    slab: int
    records: NDArray[Any]
    damaged: NDArray[np.uint64]
    misplaced: NDArray[np.uint64]
    too_long: int
    slots: int


def scan_slab(tier: TierDevice, slab: int, *, record_bytes: int, segment_bytes: int) -> SlabScan:
    """Reads the header of every slot. Raises TierIOError."""
    first = slab * (segment_bytes // SLOT_BYTES)
    found, damaged, misplaced = [np.zeros(0, RECORD_DTYPE)], [], []
    too_long = slots = 0
    count = segment_bytes // record_bytes
    for places, blocks in _headers(tier, first, record_bytes, count):
        fields, verdicts = read_headers(blocks)
        is_sound = verdicts == HeaderVerdict.SOUND
        # A writer names the copy twice, and a shard is 16 bits wide wherever it is used.
        is_odd = (fields["sequence"] != fields["generation"]) | (fields["shard"] > 0xFFFF)
        is_here = (fields["slot"] == places) & (fields["tier"] == Tier.NVME)
        is_long = ~fits(fields["length"], record_bytes)
        damaged.append(places[(verdicts == HeaderVerdict.DAMAGED) | (is_sound & is_odd)])
        misplaced.append(places[is_sound & ~is_odd & ~is_here])
        too_long += int((is_sound & ~is_odd & is_here & is_long).sum())
        found.append(_compact(fields[is_sound & ~is_odd & is_here & ~is_long]))
        slots += len(places)
    return SlabScan(
        slab=slab,
        records=np.concatenate(found),
        damaged=np.concatenate(damaged),
        misplaced=np.concatenate(misplaced),
        too_long=too_long,
        slots=slots,
    )


def is_whole(tier: TierDevice, slot: int, *, length: int, generation: int) -> bool:
    """The record at `slot` is that of this generation, with a payload of `length` bytes that is
    what its maker summed up. Raises TierIOError.
    """
    record = memoryview(aligned_buffer(record_bytes(length)))
    tier.read(slot, 0, record)
    try:
        header = decode_header(record)
    except CorruptRecord:
        return False
    return header.sequence == generation and verify_payload(
        record[HEADER_BYTES : HEADER_BYTES + length],
        header.payload_sum,
        key=header.key,
        fingerprint=header.fingerprint,
        namespace_generation=header.namespace_generation,
        shard=header.shard,
        codec=header.codec,
        length=header.length,
    )


def fits(length: NDArray[np.uint64], record_bytes: NDArray[np.uint64] | int) -> NDArray[np.bool_]:
    """Whether a record with a payload of `length` bytes is no longer than `record_bytes`."""
    limit = np.asarray(record_bytes, np.uint64)
    # Not by rounding the length up: it may be any 64-bit number.
    return (limit >= HEADER_BYTES) & (length <= np.maximum(limit, HEADER_BYTES) - HEADER_BYTES)


def _headers(
    tier: TierDevice, first: int, record_bytes: int, count: int
) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.uint8]]]:
    """(slots, their first 4096 bytes each) of all slots; the bytes are good until the next."""
    if record_bytes <= _DENSE_BYTES:
        yield from _dense(tier, first, record_bytes, count)
    else:
        yield from _sparse(tier, first, record_bytes, count)


def _dense(
    tier: TierDevice, first: int, record_bytes: int, count: int
) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.uint8]]]:
    buffer = np.frombuffer(aligned_buffer(_BLOCK_BYTES), np.uint8)
    offsets = np.arange(count, dtype=np.int64) * record_bytes
    end = int(offsets[-1]) + HEADER_BYTES if count else 0
    for start in range(0, end, _BLOCK_BYTES):
        block = buffer[: min(_BLOCK_BYTES, end - start)]
        inside = offsets[(offsets >= start) & (offsets < start + len(block))]
        if len(inside):
            tier.read(first + start // SLOT_BYTES, 0, block)
            rows = (inside - start) // HEADER_BYTES
            yield _slots(first, inside), block.reshape(-1, HEADER_BYTES)[rows]


def _sparse(
    tier: TierDevice, first: int, record_bytes: int, count: int
) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.uint8]]]:
    buffer = np.frombuffer(aligned_buffer(_BATCH * HEADER_BYTES), np.uint8)
    blocks = buffer.reshape(_BATCH, HEADER_BYTES)
    for start in range(0, count, _BATCH):
        offsets = np.arange(start, min(start + _BATCH, count), dtype=np.int64) * record_bytes
        slots = _slots(first, offsets)
        for row, slot in enumerate(slots.tolist()):
            tier.read(slot, 0, blocks[row])
        yield slots, blocks[: len(slots)]


def _slots(first: int, offsets: NDArray[np.int64]) -> NDArray[np.uint64]:
    return np.uint64(first) + (offsets // SLOT_BYTES).astype(np.uint64)


def _compact(fields: NDArray[Any]) -> NDArray[Any]:
    records = np.empty(len(fields), RECORD_DTYPE)
    for name in _KEPT:
        records[name] = fields[name]
    return records


assert HEADER_BYTES == RECORD_ALIGN == SLOT_BYTES
