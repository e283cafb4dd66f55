"""The family fingerprint: 32 bytes that are equal exactly when pages may be shared.

It is the SHA-256 of a list of items, each a tag (u16), the number of its bytes (u64) and its bytes,
all little-endian: no text can run into the next. Numbers are eight bytes, text is UTF-8, a segment
is the list of its own items. The first item is the format's version, so that a new rule can never
collide with an old one.

Every field of the layout has a row here but `shard`, which a page's checksum and address hold
instead. A test walks the dataclasses and fails on a field without a row.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TYPE_CHECKING, Final

from kvtier.packing.segments import Segment

if TYPE_CHECKING:
    from kvtier.packing.layout import Layout

__all__ = ["FINGERPRINT_VERSION", "family_fingerprint"]

FINGERPRINT_VERSION: Final = 1
_ITEM: Final = struct.Struct("<HQ")

# Tags are part of the format: never renumbered, never reused.
_VERSION, _TENANT, _SALT, _SEGMENT = 0, 1, 2, 3
_LAYOUT_TAGS: Final = {
    "model_id": 16,
    "weights_revision": 17,
    "adapter_id": 18,
    "adapter_revision": 19,
    "kv_compute": 20,
    "rope": 21,
    "key_scheme": 22,
    "page_tokens": 23,
    "storage_order": 24,
    "shard_count": 25,
}
_SEGMENT_TAGS: Final = {
    "name": 48,
    "role": 49,
    "dtype": 50,
    "layers": 51,
    "heads": 52,
    "dim": 53,
    "scale_rule": 54,
}


def family_fingerprint(layout: Layout, tenant: str, salt: bytes) -> bytes:
    """The fingerprint of `layout` for one tenant; an absent salt is the empty one."""
    items = [
        _item(_VERSION, FINGERPRINT_VERSION),
        _item(_TENANT, tenant),
        _item(_SALT, bytes(salt)),
        *(_item(tag, getattr(layout, field)) for field, tag in _LAYOUT_TAGS.items()),
        *(_item(_SEGMENT, _segment(segment)) for segment in layout.segments),
    ]
    return hashlib.sha256(b"".join(items)).digest()


def _segment(segment: Segment) -> bytes:
    return b"".join(_item(tag, getattr(segment, field)) for field, tag in _SEGMENT_TAGS.items())


def _item(tag: int, value: str | int | bytes) -> bytes:
    if isinstance(value, str):
        value = value.encode()
    elif isinstance(value, int):
        value = value.to_bytes(8, "little")
    return _ITEM.pack(tag, len(value)) + value
