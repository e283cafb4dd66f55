"""Header blocks of many pages at once, of pages that differ in what a put says of each of them.

Promise: the bytes are those of `encode_header` for each page (a test holds the two together), which
makes the block that all are copies of. Pure functions, safe from any thread.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvtier.packing.checksum import header_sum
from kvtier.packing.header_columns import FLAG_PARENT, SUM_OFFSET, fields_of
from kvtier.packing.record import HEADER_BYTES, RecordHeader, encode_header

__all__ = ["encode_headers"]


def encode_headers(
    common: RecordHeader,
    *,
    keys: NDArray[np.uint8],
    parents: NDArray[np.uint8],
    payload_sums: NDArray[np.uint8],
    depths: NDArray[np.uint32],
    slots: NDArray[np.uint64],
    generations: NDArray[np.uint64],
) -> NDArray[np.uint8]:
    """The header blocks of n pages, shape (n, 4096): `common` with what is of each page, keys and
    parents (n, 32; zeros: none), sums (n, 16), and columns of n. The sequence is the generation.

    Raises as `encode_header`.
    """
    blocks = np.empty((len(keys), HEADER_BYTES), np.uint8)
    blocks[:] = np.frombuffer(encode_header(common), np.uint8)
    fields = fields_of(blocks)
    fields["key"] = keys
    fields["parent"] = parents
    fields["payload_sum"] = payload_sums
    fields["generation"] = fields["sequence"] = generations
    fields["slot"] = slots
    fields["depth"] = depths
    has_parent = parents.any(axis=1)
    fields["flags"] = (fields["flags"] & ~np.uint16(FLAG_PARENT)) | has_parent * np.uint16(
        FLAG_PARENT
    )
    flat = blocks.reshape(-1).data
    blocks[:, SUM_OFFSET:].view("<u8")[:, 0] = [
        header_sum(flat[at : at + SUM_OFFSET]) for at in range(0, len(flat), HEADER_BYTES)
    ]
    return blocks
