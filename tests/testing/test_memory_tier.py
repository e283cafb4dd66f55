"""The fake tier is held to what real ones are."""

from __future__ import annotations

from kvtier.core.page import Tier
from kvtier.testing.memory_tier import MemoryTier
from kvtier.testing.tier_suite import TierSuite, read_back


class TestMemoryTier(TierSuite):
    def make_tier(self, capacity_bytes, directory):
        return MemoryTier(capacity_bytes)


def test_it_is_sparse():
    tier = MemoryTier(1 << 50, tier=Tier.SHARED)
    assert (tier.tier, tier.capacity_bytes, tier.used_bytes) == (Tier.SHARED, 1 << 50, 0)
    tier.write((1 << 38) - 2, [b"x" * 4097], 4095)
    assert tier.used_bytes == 2 * 4096
    assert read_back(tier, (1 << 38) - 2, 4094, 3) == b"\0xx"
    assert read_back(tier, 12345, 0, 4096) == bytes(4096)
