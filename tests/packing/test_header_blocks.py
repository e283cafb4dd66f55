"""Header blocks of many pages are those of each page."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvtier.core.page import Codec, Tier
from kvtier.errors import LimitExceeded
from kvtier.packing.header_blocks import HeaderBlocks
from kvtier.packing.record import RecordHeader, decode_header, encode_header
from tests.seeds import seeds


def common_header(rng: np.random.Generator) -> RecordHeader:
    return RecordHeader(
        fingerprint=rng.bytes(32),
        namespace_generation=int(rng.integers(1, 2**62)),
        shard=int(rng.integers(0, 2**16)),
        key=bytes(32),
        length=int(rng.integers(1, 2**40)),
        codec=Codec(int(rng.integers(1, 3))),
        lossy=bool(rng.integers(0, 2)),
        payload_sum=bytes(16),
        origin_sum=rng.bytes(16),
        generation=0,
        sequence=0,
        tier=Tier.HOST,
        slot=0,
        parent=rng.bytes(32) if rng.integers(0, 2) else b"",
        session="s" * int(rng.integers(0, 257)),
        ttl_ms=int(rng.integers(0, 2**62)),
        priority=int(rng.integers(-(2**31), 2**31)),
        boot_id=int(rng.integers(0, 2**62)),
        created_ms=0,
    )


@pytest.mark.parametrize("seed", seeds(5, of=20))
def test_the_bytes_are_those_of_each_page(seed: int) -> None:
    rng = np.random.default_rng(seed)
    common, count = common_header(rng), int(rng.integers(1, 40))
    keys, parents = rng.integers(0, 256, (2, count, 32)).astype(np.uint8)
    parents[rng.random(count) < 0.3] = 0
    sums = rng.integers(0, 256, (count, 16)).astype(np.uint8)
    depths = rng.integers(0, 2**32, count).astype(np.uint32)
    slots, generations = rng.integers(0, 2**64, (2, count), np.uint64)
    blocks = HeaderBlocks(common)
    for i in range(count):
        block = blocks.of(
            key=keys[i].tobytes(),
            parent=parents[i].tobytes() if parents[i].any() else b"",
            payload_sum=sums[i].tobytes(),
            depth=int(depths[i]),
            slot=int(slots[i]),
            generation=int(generations[i]),
        )
        header = replace(
            common,
            key=keys[i].tobytes(),
            parent=parents[i].tobytes() if parents[i].any() else b"",
            payload_sum=sums[i].tobytes(),
            depth=int(depths[i]),
            slot=int(slots[i]),
            generation=int(generations[i]),
            sequence=int(generations[i]),
        )
        assert block == encode_header(header)
        assert decode_header(memoryview(block)) == header


def test_what_no_record_holds_is_refused() -> None:
    with pytest.raises(LimitExceeded):
        HeaderBlocks(replace(common_header(np.random.default_rng(1)), ttl_ms=1 << 64))
