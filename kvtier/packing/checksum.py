"""The two checksums: `payload_sum` follows a page from its maker to its reader, `header_sum` one
copy.

`payload_sum` is the xxh3-128 of a fixed block that holds the payload's own xxh3-128 and everything
that makes these bytes this page: key, family, namespace generation, shard, codec and length. Right
bytes under the wrong name therefore fail like wrong bytes under the right one. Only the maker of a
page and a transcode compute it; everyone else compares.

xxh3 finds accidents, not forgeries. Pure functions, safe from any thread. The caller must own the
buffer: a sum over memory that someone else can write proves nothing.

The bound block, 128 bytes, little-endian:

      0   8  magic "kvt-sum1"
      8  32  fingerprint
     40  32  key
     72   8  namespace_generation   u64
     80   8  length                 u64, payload bytes as packed
     88   4  shard                  u32
     92   4  codec                  u32
     96  16  payload digest, xxh3-128 in canonical (big-endian) form
    112  16  zero
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvtier.core.page import KEY_BYTES, SUM_BYTES, Codec
from kvtier.errors import KeyLengthError, PageSizeError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "DIGEST_WORD",
    "KEY_WORD",
    "bind_sum",
    "bound_block",
    "bound_blocks",
    "header_sum",
    "payload_digest",
    "payload_sum",
    "verify_payload",
]

_BOUND: Final = struct.Struct("<8s32s32sQQII16s16x")
_MAGIC: Final = b"kvt-sum1"
_FINGERPRINT_BYTES: Final = 32
_BLOCK_WORDS: Final = 16
#: Where in the bound block the key and the payload digest begin, in words of 8 bytes.
KEY_WORD: Final = 5
DIGEST_WORD: Final = 12


def payload_digest(buffer: Buffer) -> bytes:
    """The 16 bytes of xxh3-128 over all of `buffer` (C-contiguous), in canonical order."""
    return xxhash.xxh3_128_digest(buffer)


def bind_sum(
    digest: bytes,
    *,
    key: bytes,
    fingerprint: bytes,
    namespace_generation: int,
    shard: int,
    codec: Codec,
    length: int,
) -> bytes:
    """The payload_sum (16 bytes) of a page whose payload has `digest` and `length` bytes.

    Raises KeyLengthError; the other lengths are the programmer's to keep.
    """
    if len(key) != KEY_BYTES:
        raise KeyLengthError(
            f"key has {len(key)} bytes", remedy=f"keys are the {KEY_BYTES} bytes of a chain hash"
        )
    # struct would cut or pad silently, and two different identities would then share a sum.
    assert len(digest) == SUM_BYTES, "digest"
    assert len(fingerprint) == _FINGERPRINT_BYTES, "fingerprint"
    block = _BOUND.pack(
        _MAGIC, fingerprint, key, namespace_generation, length, shard, codec, digest
    )
    return xxhash.xxh3_128_digest(block)


def bound_block(
    *, fingerprint: bytes, namespace_generation: int, shard: int, codec: Codec, length: int
) -> NDArray[np.uint64]:
    """What the bound blocks of many pages have in common, shape (16,): without key and digest."""
    assert len(fingerprint) == _FINGERPRINT_BYTES, "fingerprint"
    nothing = bytes(KEY_BYTES)
    block = _BOUND.pack(
        _MAGIC, fingerprint, nothing, namespace_generation, length, shard, codec, bytes(SUM_BYTES)
    )
    return np.frombuffer(block, np.uint64)


def bound_blocks(
    keys: Sequence[bytes] | NDArray[np.uint8],
    *,
    fingerprint: bytes,
    namespace_generation: int,
    shard: int,
    codec: Codec,
    length: int,
) -> NDArray[np.uint64]:
    """The bound blocks of many pages without their digests, shape (n, 16): words of 8 bytes.
    Keys are a list, or uint8 of shape (n, 32).

    Raises KeyLengthError.
    """
    joined = keys.tobytes() if isinstance(keys, np.ndarray) else b"".join(keys)
    if len(joined) != KEY_BYTES * len(keys):
        raise KeyLengthError(
            f"{len(keys)} keys have {len(joined)} bytes together",
            remedy=f"keys are the {KEY_BYTES} bytes of a chain hash",
        )
    blocks = np.empty((len(keys), _BLOCK_WORDS), np.uint64)
    blocks[:] = bound_block(
        fingerprint=fingerprint,
        namespace_generation=namespace_generation,
        shard=shard,
        codec=codec,
        length=length,
    )
    blocks[:, KEY_WORD : KEY_WORD + 4] = np.frombuffer(joined, np.uint64).reshape(-1, 4)
    return blocks


def payload_sum(
    buffer: Buffer,
    *,
    key: bytes,
    fingerprint: bytes,
    namespace_generation: int,
    shard: int,
    codec: Codec,
    length: int,
) -> bytes:
    """The payload_sum of `buffer`, for the page's maker and for transcodes only.

    Raises KeyLengthError, and PageSizeError if the buffer has not `length` bytes.
    """
    have = memoryview(buffer).nbytes
    if have != length:
        raise PageSizeError(
            f"the payload has {have} bytes and its length is given as {length}",
            remedy="pass exactly the payload as packed by the codec",
        )
    return bind_sum(
        payload_digest(buffer),
        key=key,
        fingerprint=fingerprint,
        namespace_generation=namespace_generation,
        shard=shard,
        codec=codec,
        length=length,
    )


def verify_payload(
    buffer: Buffer,
    expected_sum: bytes,
    *,
    key: bytes,
    fingerprint: bytes,
    namespace_generation: int,
    shard: int,
    codec: Codec,
    length: int,
) -> bool:
    """Whether `buffer` is, whole and under this identity, what the page's maker summed up.

    Sixteen zero bytes are a sum like any other: they do not mean "not checked".
    """
    if memoryview(buffer).nbytes != length:
        return False
    made = bind_sum(
        payload_digest(buffer),
        key=key,
        fingerprint=fingerprint,
        namespace_generation=namespace_generation,
        shard=shard,
        codec=codec,
        length=length,
    )
    return made == expected_sum


def header_sum(block: Buffer) -> int:
    """The xxh3-64 of a record's header block without its last 8 bytes, as a number."""
    return xxhash.xxh3_64_intdigest(block)
