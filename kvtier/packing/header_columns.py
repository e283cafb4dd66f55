"""Many header blocks at once, as columns: what a start or a check reads by the thousand.

Promise: a block is SOUND exactly when `decode_header` accepts it (a test holds the two together),
at a small part of the time. A block that is no header at all (zeros, a piece of a payload) is told
apart from a damaged one by its first sixteen bytes: no one-byte change can make a header look like
no header.

Pure functions, safe from any thread; the caller owns the blocks.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier.core.page import Codec, Tier
from kvtier.packing.checksum import header_sum
from kvtier.packing.record import HEADER_BYTES, RECORD_VERSION, SESSION_BYTES_MAX

__all__ = [
    "FLAG_LOSSY",
    "FLAG_PARENT",
    "HEADER_DTYPE",
    "HeaderVerdict",
    "SUM_OFFSET",
    "read_headers",
]

FLAG_LOSSY: Final = 1
FLAG_PARENT: Final = 2

_MAGIC: Final = int.from_bytes(b"\x89KVTREC\n", "little")
SUM_OFFSET: Final = HEADER_BYTES - 8
_SESSION_OFFSET: Final = 232
_CODECS: Final = np.array([int(codec) for codec in Codec], np.uint16)
_TIERS: Final = np.array([int(tier) for tier in Tier], np.uint16)

#: The fields that are read or written of many at once, where version 1 has them (see record.py).
_FIELDS: Final[tuple[tuple[str, Any, int], ...]] = (
    ("magic", "<u8", 0),
    ("version", "<u4", 8),
    ("header_bytes", "<u4", 12),
    ("fingerprint", ("u1", 32), 16),
    ("key", ("u1", 32), 48),
    ("parent", ("u1", 32), 80),
    ("payload_sum", ("u1", 16), 112),
    ("namespace_generation", "<u8", 144),
    ("length", "<u8", 152),
    ("boot_id", "<u8", 160),
    ("generation", "<u8", 168),
    ("sequence", "<u8", 176),
    ("slot", "<u8", 184),
    ("shard", "<u4", 208),
    ("depth", "<u4", 212),
    ("codec", "<u2", 220),
    ("tier", "<u2", 222),
    ("flags", "<u2", 224),
    ("session_bytes", "<u2", 226),
)
#: The front of a header block, before the session.
HEADER_DTYPE: Final = np.dtype(
    {
        "names": [name for name, _, _ in _FIELDS],
        "formats": [kind for _, kind, _ in _FIELDS],
        "offsets": [offset for _, _, offset in _FIELDS],
        "itemsize": _SESSION_OFFSET,
    }
)


class HeaderVerdict(IntEnum):
    NOTHING = 0  # no header was ever written here, or something else since
    SOUND = 1
    DAMAGED = 2  # a header once; its bytes are not what was written, or of another version


def _fields_of(blocks: NDArray[np.uint8]) -> NDArray[Any]:
    """The fields of `blocks` in place, shape (n,) of HEADER_DTYPE."""
    fields: NDArray[Any] = blocks[:, :_SESSION_OFFSET].view(HEADER_DTYPE)[:, 0]
    return fields


def read_headers(blocks: NDArray[np.uint8]) -> tuple[NDArray[Any], NDArray[np.uint8]]:
    """(fields, HeaderVerdict) of each of `blocks`, (n, 4096) uint8 and C-contiguous.

    `fields` is (n,) of HEADER_DTYPE, a copy; it means something where the verdict is SOUND.
    """
    # Contiguous: a look at every 4096th byte is a look at another line of the cache each time.
    fields = _fields_of(np.ascontiguousarray(blocks[:, :_SESSION_OFFSET]))
    has_magic = fields["magic"] == _MAGIC
    has_version = (fields["version"] == RECORD_VERSION) & (fields["header_bytes"] == HEADER_BYTES)
    flags = fields["flags"]
    is_plausible = (
        has_magic
        & has_version
        & np.isin(fields["codec"], _CODECS)
        & np.isin(fields["tier"], _TIERS)
        & (flags <= (FLAG_LOSSY | FLAG_PARENT))
        & ((flags & FLAG_PARENT != 0) | ~fields["parent"].any(axis=1))
        & (fields["session_bytes"] <= SESSION_BYTES_MAX)
    )
    verdicts = np.where(
        has_magic | has_version, np.uint8(HeaderVerdict.DAMAGED), np.uint8(HeaderVerdict.NOTHING)
    )
    rows = np.flatnonzero(is_plausible)
    stored = np.ascontiguousarray(blocks[rows, SUM_OFFSET:]).view("<u8")[:, 0].tolist()
    flat = blocks.reshape(-1).data
    for row, at, total in zip(rows.tolist(), (rows * HEADER_BYTES).tolist(), stored, strict=True):
        if header_sum(flat[at : at + SUM_OFFSET]) == total:
            verdicts[row] = HeaderVerdict.SOUND
    for row in np.flatnonzero(is_plausible & (fields["session_bytes"] > 0)).tolist():
        session = blocks[row, _SESSION_OFFSET:][: fields["session_bytes"][row]]
        if not _is_text(session.tobytes()):
            verdicts[row] = HeaderVerdict.DAMAGED
    return fields, verdicts


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
