"""The payload sum holds a page to its bytes and to its name."""

from __future__ import annotations

import dataclasses
import inspect
import struct

import numpy as np
import pytest
import xxhash
from packing_samples import FINGERPRINT, KEY, family, identity

from kvtier.core.page import NO_SUM, Codec
from kvtier.errors import KeyLengthError, PageSizeError
from kvtier.packing.checksum import (
    bind_sum,
    header_sum,
    payload_digest,
    payload_sum,
    verify_payload,
)

PAYLOAD = bytes(range(256)) * 5
BOUND = {
    "key": KEY,
    "fingerprint": FINGERPRINT,
    "namespace_generation": 3,
    "shard": 1,
    "codec": Codec.RAW,
    "length": len(PAYLOAD),
}
OTHER = {
    "key": KEY[::-1],
    "fingerprint": FINGERPRINT[::-1],
    "namespace_generation": 4,
    "shard": 2,
    "codec": Codec.FP8,
    "length": len(PAYLOAD) + 1,
}


def test_the_digest_is_canonical_xxh3_128():
    assert payload_digest(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert payload_digest(PAYLOAD) == xxhash.xxh3_128_digest(PAYLOAD)


def test_the_bound_block_is_as_documented():
    block = b"".join(
        (
            b"kvt-sum1",
            FINGERPRINT,
            KEY,
            struct.pack("<QQII", 3, len(PAYLOAD), 1, 1),
            xxhash.xxh3_128_digest(PAYLOAD),
            bytes(16),
        )
    )
    assert len(block) == 128
    assert payload_sum(PAYLOAD, **BOUND) == xxhash.xxh3_128_digest(block)
    assert payload_sum(PAYLOAD, **BOUND) == bind_sum(payload_digest(PAYLOAD), **BOUND)


def test_every_bound_field_counts():
    named = {*inspect.signature(bind_sum).parameters} - {"digest"}
    assert named == set(BOUND) == set(OTHER)
    digest = payload_digest(PAYLOAD)
    sums = [bind_sum(digest, **BOUND)]
    sums += [bind_sum(digest, **{**BOUND, name: OTHER[name]}) for name in OTHER]
    sums += [bind_sum(payload_digest(PAYLOAD[:-1]), **BOUND)]
    assert len(set(sums)) == len(sums) == 8


def test_shards_of_one_family_have_different_sums_for_equal_bytes():
    base = family()
    other = base.with_shard(dataclasses.replace(base.shard, index=2))
    assert base.fingerprint("t") == other.fingerprint("t")
    sums = {
        payload_sum(PAYLOAD, **identity(page, Codec.RAW, len(PAYLOAD))) for page in (base, other)
    }
    assert len(sums) == 2


def test_verify_accepts_the_page_and_nothing_else():
    made = payload_sum(PAYLOAD, **BOUND)
    assert verify_payload(PAYLOAD, made, **BOUND)
    assert verify_payload(memoryview(bytearray(PAYLOAD)), made, **BOUND)
    for name, value in OTHER.items():
        assert not verify_payload(PAYLOAD, made, **{**BOUND, name: value}), name
    for position in range(len(PAYLOAD)):
        damaged = bytearray(PAYLOAD)
        damaged[position] ^= 1 << position % 8
        assert not verify_payload(damaged, made, **BOUND), position
    assert not verify_payload(PAYLOAD[:-1], made, **BOUND)
    assert not verify_payload(PAYLOAD + b"\0", made, **BOUND)
    assert not verify_payload(PAYLOAD, made[:-1], **BOUND)
    assert not verify_payload(PAYLOAD, b"", **BOUND)


def test_zeros_are_no_free_pass():
    assert not verify_payload(PAYLOAD, NO_SUM, **BOUND)
    empty = {**BOUND, "length": 0}
    assert not verify_payload(b"", NO_SUM, **empty)
    assert verify_payload(b"", payload_sum(b"", **empty), **empty)


def test_lengths_count_bytes_not_items():
    words = np.arange(8, dtype=np.uint32)
    bound = {**BOUND, "length": 32}
    made = payload_sum(words.data, **bound)
    assert made == payload_sum(words.tobytes(), **bound)
    assert verify_payload(words.data, made, **bound)


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_key_of_another_length_is_refused(length):
    with pytest.raises(KeyLengthError, match=f"{length} bytes"):
        payload_sum(PAYLOAD, **{**BOUND, "key": bytes(length)})


def test_a_length_that_is_not_the_payloads_is_refused():
    with pytest.raises(PageSizeError, match="1280 bytes and its length is given as 1281"):
        payload_sum(PAYLOAD, **{**BOUND, "length": len(PAYLOAD) + 1})


def test_header_sum_is_xxh3_64():
    assert header_sum(bytes(4088)) == xxhash.xxh3_64_intdigest(bytes(4088))
