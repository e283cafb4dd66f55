"""Headers in bulk: the same verdict as decode_header, block by block, and the same fields."""

from __future__ import annotations

import dataclasses
import random
import struct

import numpy as np
import pytest
import xxhash
from packing_samples import header

from kvtier.core.page import Codec, Tier
from kvtier.errors import CorruptRecord
from kvtier.packing.header_columns import FLAG_LOSSY, FLAG_PARENT, HeaderVerdict, read_headers
from kvtier.packing.record import HEADER_BYTES, decode_header, encode_header


def verdict_of(block: bytes) -> HeaderVerdict:
    _, verdicts = read_headers(np.frombuffer(block, np.uint8).reshape(-1, HEADER_BYTES))
    return HeaderVerdict(verdicts[0])


def decodes(block: bytes) -> bool:
    try:
        decode_header(block)
    except CorruptRecord:
        return False
    return True


def resealed(block: bytearray) -> bytes:
    block[4088:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(block[:4088])))
    return bytes(block)


def test_every_field():
    changes = [
        {},
        {"parent": b"", "lossy": False, "session": "", "codec": Codec.RAW, "tier": Tier.HOST},
        {"shard": 2**32 - 1, "length": 2**64 - 1, "slot": 0, "namespace_generation": 2**64 - 1},
    ]
    headers = [dataclasses.replace(header(), **change) for change in changes]
    blocks = b"".join(encode_header(one) for one in headers)
    fields, verdicts = read_headers(np.frombuffer(blocks, np.uint8).reshape(-1, HEADER_BYTES))
    assert verdicts.tolist() == [HeaderVerdict.SOUND] * 3
    for row, one in zip(fields, headers, strict=True):
        for name in ("fingerprint", "key"):
            assert row[name].tobytes() == getattr(one, name)
        assert row["parent"].tobytes() == (one.parent or bytes(32))
        for name in ("namespace_generation", "length", "boot_id", "generation", "sequence"):
            assert int(row[name]) == getattr(one, name)
        for name in ("slot", "shard", "codec", "tier"):
            assert int(row[name]) == getattr(one, name)
        assert row["flags"] == FLAG_LOSSY * one.lossy + FLAG_PARENT * bool(one.parent)


@pytest.mark.parametrize("seed", range(4))
def test_the_verdict_is_that_of_decode_header(seed):
    """One flipped bit anywhere, and any byte of the fields changed under a right sum."""
    rng = random.Random(seed)
    whole = encode_header(header())
    for at in [*range(seed, 490, 4), *rng.sample(range(490, 4096), 30)]:
        block = bytearray(whole)
        block[at] ^= 1 << rng.randrange(8)
        assert verdict_of(bytes(block)) is HeaderVerdict.DAMAGED, at
        assert not decodes(bytes(block))
        if at < 4088:
            faulty = resealed(block)
            wanted = HeaderVerdict.SOUND if decodes(faulty) else HeaderVerdict.DAMAGED
            assert verdict_of(faulty) is wanted, at


def test_a_session_that_is_no_text():
    block = bytearray(encode_header(header(session="ab")))
    block[232:234] = b"\xc3\x28"
    assert not decodes(resealed(block))
    assert verdict_of(resealed(block)) is HeaderVerdict.DAMAGED


def test_a_parent_without_its_flag():
    block = bytearray(encode_header(header()))
    block[224] &= ~FLAG_PARENT
    assert not decodes(resealed(block))
    assert verdict_of(resealed(block)) is HeaderVerdict.DAMAGED


@pytest.mark.parametrize("block", [bytes(4096), b"\xff" * 4096, random.Random(1).randbytes(4096)])
def test_what_was_never_a_header_is_nothing(block):
    assert verdict_of(block) is HeaderVerdict.NOTHING


def test_no_blocks():
    fields, verdicts = read_headers(np.zeros((0, HEADER_BYTES), np.uint8))
    assert len(fields) == len(verdicts) == 0
