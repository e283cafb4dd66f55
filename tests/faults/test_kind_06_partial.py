"""Kind 6, PARTIAL: full pages have keys, the rest of the tokens has none, and a hit is never longer
than what was stored, also after the pages have been on NVMe alone.
"""

from __future__ import annotations

import random

import pytest

from kvtier.core.page import GetCode, Tier
from tests.faults.kinds_rig import get_checked, on_loop, opaque, pages_of, running, until

P = 16
COUNTS = (0, 1, P - 1, P, P + 1, 2 * P - 1, 2 * P, 2 * P + 1, 40)
SIZE = 16 << 10
TOKENS = [random.Random(6).randrange(32_000) for _ in range(64)]


async def opened(daemon, tenant):
    return await daemon.kv.namespace(opaque(SIZE // P, page_tokens=P), tenant=tenant)


@on_loop
async def test_no_prefix_is_longer_than_what_was_stored(base):
    """For every stored length, in a tenant of its own, and every length asked for."""
    async with running(base) as daemon:
        for stored in COUNTS:
            ns = await opened(daemon, f"t{stored}")
            keys = ns.keys(TOKENS[:stored])
            assert len(keys) == stored // P
            put = await ns.put(keys, pages_of(keys, SIZE, tenant=ns.tenant), durable="nvme")
            assert (put.stored, put.durable) == (len(keys), len(keys))
    for is_up in (False, True):
        async with running(base) as daemon:
            for stored in COUNTS:
                ns = await opened(daemon, f"t{stored}")
                if is_up:
                    await ns.prefetch(ns.keys(TOKENS))
                    pages = daemon.store.survey.pages_by_namespace().get(daemon.number(ns), 0)
                    assert pages >= stored // P
                for asked in COUNTS:
                    keys = ns.keys(TOKENS[:asked])
                    expected = min(stored // P, asked // P) * P
                    looked_up = await ns.lookup(keys)
                    assert looked_up.prefix_tokens == expected, (stored, asked)
                    got = await get_checked(ns, keys, SIZE)
                    assert got.prefix_tokens == expected, (stored, asked)
                    assert got.prefix_tokens <= asked
                    assert got.hits == expected // P, "nothing that was not stored"
            await daemon.settled()


@pytest.mark.parametrize("rest", [0, 1, P - 1])
@on_loop
async def test_the_last_page_of_a_turn_is_found_by_the_next(base, rest):
    """A turn that ends exactly at a page's end has stored that page; one that does not, goes on
    from the last full page under the same keys."""
    turn = TOKENS[: 2 * P + rest]
    async with running(base) as daemon:
        ns = await opened(daemon, "t")
        keys = ns.keys(turn)
        await ns.put(keys, pages_of(keys, SIZE), durable="nvme")
    async with running(base) as daemon:
        ns = await opened(daemon, "t")
        prompt = TOKENS[: 3 * P]
        longer = ns.keys(prompt)
        assert list(longer[:2]) == list(keys)
        assert (await get_checked(ns, longer, SIZE)).prefix_tokens == 2 * P
        more = ns.keys(prompt[2 * P :], parent=keys)
        assert list(more) == [longer[2]]
        put = await ns.put(more, pages_of(more, SIZE), durable="nvme")
        assert put.durable == 1
    async with running(base) as daemon:
        ns = await opened(daemon, "t")
        assert (await get_checked(ns, longer, SIZE)).prefix_tokens == 3 * P
        await daemon.settled()


@pytest.mark.parametrize("gap", [0, 1, 3])
@on_loop
async def test_a_gap_ends_the_prefix_and_pages_after_it_are_no_part_of_it(base, gap):
    async with running(base) as daemon:
        ns = await opened(daemon, "t")
        keys = ns.keys(TOKENS)
        await ns.put(keys, pages_of(keys, SIZE), durable="nvme")
        await ns.delete(keys[gap : gap + 1])
    async with running(base) as daemon:
        ns = await opened(daemon, "t")
        got = await get_checked(ns, keys, SIZE)
        assert got.prefix_tokens == gap * P
        assert got.reasons[gap] is GetCode.MISS
        assert got.hits == len(keys) - 1
        await daemon.settled()


@on_loop
async def test_no_tokens_no_call(base):
    async with running(base) as daemon:
        ns = await opened(daemon, "t")
        before = daemon.metric("kvtier_lookup_keys_total", result="miss")
        calls = daemon.metric("kvtier_rpc_seconds_count", rpc="Lookup")
        for tokens in ([], TOKENS[:1], TOKENS[: P - 1]):
            keys = ns.keys(tokens)
            assert len(keys) == 0
            assert len(await ns.lookup(keys)) == len(await ns.get(keys)) == 0
            assert (await ns.put(keys, [], durable="nvme")).durable == 0
            assert len(await ns.prefetch(keys)) == len(await ns.demote(keys)) == 0
        assert daemon.metric("kvtier_rpc_seconds_count", rpc="Lookup") == calls
        assert daemon.metric("kvtier_rpc_seconds_count", rpc="Get") == 0
        assert daemon.metric("kvtier_lookup_keys_total", result="miss") == before
        await until(lambda: daemon.counts(Tier.NVME).sealed == 0)
        await daemon.settled()
