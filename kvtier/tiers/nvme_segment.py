"""A segment file: one header block, then `segment_bytes` of slots.

    offset size field
         0    8 magic 89 4b 56 54 53 45 47 0a ("\\x89KVTSEG\\n")
         8    4 version          u32, 1
        12    4 header bytes     u32, 4096
        16   16 directory_id     of the daemon directory that the file belongs to
        32    4 device number    u32
        36    4 local number     u32, of the segment on its device
        40    8 segment_bytes    u64
        48 4040 zero
      4088    8 header_sum       u64, xxh3-64 of bytes 0 to 4087

All numbers are little-endian. The header is written once, before the file gets its name, so a file
that was copied, renamed or taken from another directory does not say what its name says.

Pure functions, safe from any thread.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import Final

from kvtier.errors import CorruptRecord
from kvtier.packing.checksum import header_sum
from kvtier.tiers.base import Buffer, flat_bytes

__all__ = [
    "SEGMENT_HEADER_BYTES",
    "SEGMENT_VERSION",
    "SegmentHeader",
    "decode_segment_header",
    "encode_segment_header",
    "segment_name",
    "segment_number",
]

SEGMENT_HEADER_BYTES: Final = 4096
SEGMENT_VERSION: Final = 1

_MAGIC: Final = b"\x89KVTSEG\n"
_FIELDS: Final = struct.Struct("<8sII16sIIQ4040x")
_SUM: Final = struct.Struct("<Q")
_SUM_OFFSET: Final = SEGMENT_HEADER_BYTES - _SUM.size
_NAME: Final = re.compile(r"segment-([0-9]{8})")

assert _FIELDS.size == _SUM_OFFSET


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentHeader:
    """Which segment of which daemon directory a file is."""

    directory_id: bytes
    device: int
    local: int
    segment_bytes: int

    def difference(self, found: SegmentHeader) -> str:
        """How `found` differs from this header, in words; "" if it does not."""
        if found.directory_id != self.directory_id:
            return "it belongs to another daemon directory"
        if (found.device, found.local) != (self.device, self.local):
            return f"it is segment {found.local} of device {found.device}"
        if found.segment_bytes != self.segment_bytes:
            return f"its slots take {found.segment_bytes} bytes, not {self.segment_bytes}"
        return ""


def segment_name(local: int) -> str:
    return f"segment-{local:08d}"


def segment_number(name: str) -> int | None:
    """The local number in a segment file's name; None for the name of something else."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def encode_segment_header(header: SegmentHeader) -> bytes:
    """The 4096 bytes of the header block."""
    assert len(header.directory_id) == 16, "directory_id"
    block = _FIELDS.pack(
        _MAGIC,
        SEGMENT_VERSION,
        SEGMENT_HEADER_BYTES,
        header.directory_id,
        header.device,
        header.local,
        header.segment_bytes,
    )
    return block + _SUM.pack(header_sum(block))


def decode_segment_header(buffer: Buffer) -> SegmentHeader:
    """Reads the header block at the start of `buffer`.

    Raises CorruptRecord, naming what is wrong.
    """
    block = bytes(flat_bytes(buffer)[:SEGMENT_HEADER_BYTES])
    if len(block) < SEGMENT_HEADER_BYTES:
        raise _corrupt(f"its header is cut off after {len(block)} bytes")
    magic, version, header_bytes, directory_id, device, local, segment_bytes = _FIELDS.unpack_from(
        block
    )
    if magic != _MAGIC:
        raise _corrupt("it does not start as a segment does")
    if version != SEGMENT_VERSION:
        raise _corrupt(f"it has version {version}, this build knows version {SEGMENT_VERSION}")
    if _SUM.unpack_from(block, _SUM_OFFSET)[0] != header_sum(memoryview(block)[:_SUM_OFFSET]):
        raise _corrupt("the checksum of its header does not match")
    if header_bytes != SEGMENT_HEADER_BYTES:
        raise _corrupt(f"its header has {header_bytes} bytes, not {SEGMENT_HEADER_BYTES}")
    return SegmentHeader(
        directory_id=directory_id, device=device, local=local, segment_bytes=segment_bytes
    )


def _corrupt(message: str) -> CorruptRecord:
    return CorruptRecord(message, remedy="nothing: what the file held is a miss")
