"""Flush counts pages, however often each of them was put."""

from __future__ import annotations

import pytest

from kvtier.client import FlushResult
from kvtier.core.page import Tier
from tests.faults.kinds_rig import keys_of, on_loop, pages_of, running


@on_loop
async def test_a_page_that_was_put_twice_is_one_page(base):
    keys, more = keys_of(range(6)), keys_of(range(4, 10))
    async with running(base) as daemon:
        ns, other = await daemon.namespace(), await daemon.namespace(tenant="u")
        await ns.put(keys, pages_of(keys))
        await ns.put(more, pages_of(more))
        await ns.put(keys[:1], pages_of(keys[:1]), durable="nvme")
        await other.put(keys[:2], pages_of(keys[:2], tenant="u"))
        assert await daemon.kv.flush() == FlushResult(pages=12, pages_lost=0)
        assert await daemon.kv.flush() == FlushResult(pages=0, pages_lost=0)
        assert daemon.counts(Tier.NVME).sealed == 12
        await ns.put(keys, pages_of(keys))
        await ns.put(more, pages_of(more))
        await ns.delete(keys[:5])
        assert await daemon.kv.flush() == FlushResult(pages=5, pages_lost=5)


@pytest.mark.parametrize("often", [1, 3])
@on_loop
async def test_a_long_list_counts_pages_too(base, monkeypatch, often):
    """When it is shortened too, and what does not fit counts as lost."""
    monkeypatch.setattr("kvtier.daemon.flushing._KEYS_MAX", 8)
    keys = keys_of(range(12))
    async with running(base) as daemon:
        ns = await daemon.namespace()
        for _ in range(often):
            await ns.put(keys[:4], pages_of(keys[:4]))
        assert (await daemon.kv.flush()).pages_lost == 0
