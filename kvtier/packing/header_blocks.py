"""Header blocks of many pages at once, of pages that differ in what a put says of each of them.

Promise: the bytes are those of `encode_header` for each page (a test holds the two together), which
makes the block that all are copies of. Pure functions, safe from any thread.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier.packing.checksum import header_sum
from kvtier.packing.header_columns import FLAG_PARENT
from kvtier.packing.record import HEADER_BYTES, RecordHeader, encode_header

__all__ = ["encode_headers"]

_SUM_OFFSET: Final = HEADER_BYTES - 8
#: The fields of each page, at their places of version 1 (see record.py).
_FIELDS: Final[tuple[tuple[str, Any, int], ...]] = (
    ("key", ("u1", 32), 48),
    ("parent", ("u1", 32), 80),
    ("payload_sum", ("u1", 16), 112),
    ("generation", "<u8", 168),
    ("sequence", "<u8", 176),
    ("slot", "<u8", 184),
    ("depth", "<u4", 212),
    ("flags", "<u2", 224),
    ("header_sum", "<u8", _SUM_OFFSET),
)
_OF_EACH: Final = np.dtype(
    {
        "names": [name for name, _, _ in _FIELDS],
        "formats": [kind for _, kind, _ in _FIELDS],
        "offsets": [offset for _, _, offset in _FIELDS],
        "itemsize": HEADER_BYTES,
    }
)


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
    fields = blocks.view(_OF_EACH)[:, 0]
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
    fields["header_sum"] = [
        header_sum(flat[at : at + _SUM_OFFSET]) for at in range(0, len(flat), HEADER_BYTES)
    ]
    return blocks
