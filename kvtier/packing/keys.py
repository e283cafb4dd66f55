"""Page keys: a SHA-256 chain over token ids, byte for byte the page hashes that SGLang makes.

    key[i] = sha256(key[i - 1] || tokens of page i as u32, little-endian)

At the head of a chain there is nothing in front, or the 32-byte seed of a salt. A page with a token
id above 2^32 - 1 is hashed as 0xff and then u64 words; the odd length keeps it apart from every
page of u32 words. As all pages of a chain have the same number of tokens, no two different inputs
of a key have the same bytes.

Only full pages have keys: what is left over after the last one is recomputed, never stored.

Pure functions, safe from any thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier.core.page import KEY_BYTES
from kvtier.errors import KeyLengthError, LimitExceeded

if TYPE_CHECKING:
    import torch

__all__ = ["TOKEN_ID_MAX", "chain_keys", "salt_seed"]

#: The largest token id that SGLang's own hash takes; multimodal placeholders reach above 2^32.
TOKEN_ID_MAX: Final = 2**63 - 1
_NARROW_MAX: Final = 2**32 - 1
_WIDE_TAG: Final = b"\xff"
# What SGLang puts in front of the chains of a namespace; equal keys need the equal constant.
_SEED_DOMAIN: Final = b"sglang-cache-namespace-v1"
_ABSENT: Final = b"\x00"
_PRESENT: Final = b"\x01"


def chain_keys(
    token_ids: Sequence[int] | NDArray[Any] | torch.Tensor,
    page_tokens: int,
    *,
    parent: bytes | None,
    seed: bytes = b"",
) -> list[bytes]:
    """One 32-byte key for each full page of `token_ids` (one dimension, list, array or tensor).

    `parent` is the key of the page before the first token here, None at the head of a chain; only
    there is `seed` used (a parent already holds it). Raises KeyLengthError for a parent or seed
    that is not a hash, and LimitExceeded for token ids that are not whole numbers from 0 to
    TOKEN_ID_MAX or a page_tokens below 1.
    """
    if parent is not None and len(parent) != KEY_BYTES:
        raise KeyLengthError(
            f"parent has {len(parent)} bytes", remedy="pass the last key of the chain, or None"
        )
    if len(seed) not in (0, KEY_BYTES):
        raise KeyLengthError(f"seed has {len(seed)} bytes", remedy="pass what salt_seed returned")
    if page_tokens < 1:
        raise LimitExceeded(f"page_tokens is {page_tokens}", remedy="a page has at least one token")
    tokens = _as_uint64(token_ids)
    pages = len(tokens) // page_tokens
    tokens = tokens[: pages * page_tokens].reshape(pages, page_tokens)
    is_wide: list[bool] = np.any(tokens > _NARROW_MAX, axis=1).tolist()
    narrow = tokens.astype("<u4").reshape(-1).view(np.uint8).data
    step = 4 * page_tokens
    keys: list[bytes] = []
    before = seed if parent is None else parent
    for page, wide in enumerate(is_wide):
        digest = hashlib.sha256(before)
        if wide:
            digest.update(_WIDE_TAG + tokens[page].astype("<u8").tobytes())
        else:
            digest.update(narrow[page * step : (page + 1) * step])
        before = digest.digest()
        keys.append(before)
    return keys


def salt_seed(salt: bytes) -> bytes:
    """What stands in front of every chain under `salt`: 32 bytes, or none for the empty salt.

    Equal to the seed that SGLang makes of a `cache_salt` with this UTF-8 text and no `extra_key`.
    """
    if not salt:
        return b""
    length = len(salt).to_bytes(8, "little")
    return hashlib.sha256(_SEED_DOMAIN + _ABSENT + _PRESENT + length + salt).digest()


def _as_uint64(token_ids: Any) -> NDArray[np.uint64]:
    try:
        tokens = np.asarray(token_ids)
    except (OverflowError, TypeError, ValueError) as error:
        raise _bad_tokens(str(error)) from error
    if tokens.ndim != 1:
        raise _bad_tokens(f"an array of {tokens.ndim} dimensions")
    if tokens.size == 0:
        return np.empty(0, np.uint64)
    if tokens.dtype.kind not in "iu":
        raise _bad_tokens(f"numbers of type {tokens.dtype}")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high > TOKEN_ID_MAX:
        raise _bad_tokens(f"the ids {low} to {high}")
    return tokens.astype(np.uint64)


def _bad_tokens(found: str) -> LimitExceeded:
    return LimitExceeded(
        f"token_ids holds {found}",
        remedy=f"pass a flat sequence of whole numbers from 0 to {TOKEN_ID_MAX}",
    )
