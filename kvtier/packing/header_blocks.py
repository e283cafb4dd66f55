"""Header blocks of pages that differ in what a put says of each of them.

Promise: the bytes are those of `encode_header` for each page (a test holds the two together), whose
block for what they have in common is made once. One thread.
"""

from __future__ import annotations

import struct
from typing import Final

from kvtier.packing.checksum import header_sum
from kvtier.packing.header_columns import FLAG_PARENT, HEADER_DTYPE, SUM_OFFSET
from kvtier.packing.record import RecordHeader, encode_header

__all__ = ["HeaderBlocks"]

assert HEADER_DTYPE.fields is not None
_AT: Final = {name: offset for name, (_, offset, *_) in HEADER_DTYPE.fields.items()}
#: Fields that lie one behind the other: key, parent, payload_sum; generation, sequence, slot.
_NAMES: Final = struct.Struct("<32s32s16s")
_NAMES_AT: Final = _AT["key"]
_PLACE: Final = struct.Struct("<QQQ")
_PLACE_AT: Final = _AT["generation"]
_DEPTH: Final = struct.Struct("<I")
_DEPTH_AT: Final = _AT["depth"]
_FLAGS: Final = struct.Struct("<H")
_FLAGS_AT: Final = _AT["flags"]
_SUM: Final = struct.Struct("<Q")


class HeaderBlocks:
    """Of pages with `common` in common. Raises as `encode_header`."""

    def __init__(self, common: RecordHeader) -> None:
        self._block = bytearray(encode_header(common))
        self._summed = memoryview(self._block)[:SUM_OFFSET]
        (flags,) = _FLAGS.unpack_from(self._block, _FLAGS_AT)
        self._flags = flags & ~FLAG_PARENT

    def of(
        self,
        *,
        key: bytes,
        parent: bytes,
        payload_sum: bytes,
        depth: int,
        slot: int,
        generation: int,
    ) -> bytearray:
        """The block of one page, good until the next is asked for. The key has 32 bytes, as the
        parent if there is one, the sum 16. The sequence is the generation.
        """
        block = self._block
        flags = self._flags | FLAG_PARENT if parent else self._flags
        _NAMES.pack_into(block, _NAMES_AT, key, parent, payload_sum)
        _PLACE.pack_into(block, _PLACE_AT, generation, generation, slot)
        _DEPTH.pack_into(block, _DEPTH_AT, depth)
        _FLAGS.pack_into(block, _FLAGS_AT, flags)
        _SUM.pack_into(block, SUM_OFFSET, header_sum(self._summed))
        return block
