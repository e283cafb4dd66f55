"""A transcode: the one place besides a page's maker where a payload_sum is computed.

The order is what makes it safe. The source may lie in memory that its client can still write, so it
is copied once to private memory; that copy, and nothing else, is compared with the maker's
payload_sum; the conversion reads that copy. A payload_sum computed over memory that a client can
write would give corruption a valid checksum.

Pure, safe from any thread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvtier.core.page import NO_SUM, Codec, PageMeta
from kvtier.errors import CorruptPage, LayoutError
from kvtier.packing.checksum import payload_sum, verify_payload
from kvtier.packing.codec import decode, encode
from kvtier.packing.payloads import check_bytes, host_bytes

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from kvtier.packing.layout import Layout

__all__ = ["Transcoded", "transcode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcoded:
    """The converted page: its bytes in private memory, and what is now known of it.

    `meta` has the new codec, length and payload_sum, the maker's sum in origin_sum, and lossy set.
    """

    payload: NDArray[np.uint8]
    meta: PageMeta


def transcode(
    layout: Layout,
    source: Buffer | NDArray[Any],
    meta: PageMeta,
    target: Codec,
    *,
    fingerprint: bytes,
    namespace_generation: int,
) -> Transcoded:
    """Converts the page that `meta` describes to the codec `target`.

    Raises CorruptPage if the copied bytes are not those of meta.payload_sum, PageSizeError if the
    source has another size, NonFinite if the page cannot be packed, LayoutError for a target that
    the page has already or the layout cannot have.
    """
    if target is meta.codec:
        raise LayoutError(
            f"the page is {target.name} already", remedy="copy it with its payload_sum as it is"
        )
    layout.payload_bytes(target)
    check_bytes(meta.length, layout.payload_bytes(meta.codec), "the page")
    shared = host_bytes(source)
    check_bytes(shared.nbytes, meta.length, "the source")
    private = shared.copy()
    is_intact = verify_payload(
        private.data,
        meta.payload_sum,
        key=meta.key,
        fingerprint=fingerprint,
        namespace_generation=namespace_generation,
        shard=layout.shard.index,
        codec=meta.codec,
        length=meta.length,
    )
    if not is_intact:
        raise CorruptPage(
            "the page to convert fails its payload_sum",
            remedy="fall through to the next tier that holds it, or recompute it",
        )
    raw = decode(meta.codec, layout, private)
    payload = encode(target, layout, raw)
    made = payload_sum(
        payload.data,
        key=meta.key,
        fingerprint=fingerprint,
        namespace_generation=namespace_generation,
        shard=layout.shard.index,
        codec=target,
        length=payload.nbytes,
    )
    origin = meta.payload_sum if meta.origin_sum == NO_SUM else meta.origin_sum
    converted = replace(
        meta,
        codec=target,
        length=payload.nbytes,
        payload_sum=made,
        origin_sum=origin,
        # Also on the way back to raw: the numbers are the rounded ones.
        lossy=True,
    )
    return Transcoded(payload=payload, meta=converted)
