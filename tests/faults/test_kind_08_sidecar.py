"""Kind 8, SIDECAR: a page's scales are part of the page: stored, moved, checked and lost with it.

fp8 pages are made by hand here, code by code; only where the daemon packs them is torch needed.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import kvtier
from kvtier.core.page import Codec, GetCode, PutCode, Tier
from kvtier.packing.record import HEADER_BYTES
from kvtier.v1 import transfer_pb2
from tests.daemon.raw_calls import RawClient, put_page
from tests.faults.kinds_rig import (
    get_checked,
    key_of,
    keys_of,
    on_loop,
    opaque,
    pages_of,
    running,
    until,
)

KEYS = keys_of(range(6))
#: 512 numbers of one byte and their scales, in one row.
ROW, ROWS = 528, 64


def layout(dtype: str = "bfloat16") -> kvtier.Layout:
    """4 layers of k and v, 2 heads: 16 scales a page."""
    segments = [
        kvtier.Segment(
            name=name,
            role=role,
            dtype=dtype,
            layers=4,
            heads=2,
            dim=64,
            scale_rule=kvtier.ScaleRule.LAYER_HEAD,
        )
        for name, role in (("k", kvtier.Role.KEY), ("v", kvtier.Role.VALUE))
    ]
    return kvtier.Layout.from_segments(
        segments, model_id="m", revision="r1", page_tokens=16, kv_compute=dtype
    )


LAYOUT = layout()
SCALES_AT, SCALES = LAYOUT.scales_span


def packed(seed: int) -> bytes:
    """An fp8 page: finite codes, and scales of its own."""
    rng = np.random.default_rng(seed)
    page = rng.integers(0, 0x7F, LAYOUT.fp8_bytes).astype(np.uint8)
    scales = np.exp2(rng.uniform(-8, 8, SCALES)).astype("<f4")
    page[SCALES_AT : SCALES_AT + 4 * SCALES] = scales.view(np.uint8)
    return page.tobytes()


PAGES = [packed(seed) for seed in range(6)]


@on_loop
async def test_rows_with_their_scales_inline_come_back_whole(base):
    """528 of 528 bytes of each row, into memory that holds another page's rows."""
    keys, size = KEYS[:4], ROW * ROWS
    pages = pages_of(keys, size)
    for tier in (Tier.HOST, Tier.NVME):
        async with running(base) as daemon:
            ns = await daemon.namespace(size)
            if tier is Tier.HOST:
                assert (await ns.put(keys, pages, durable="nvme")).durable == 4
            others = [pages[1], pages[0], pages[3], pages[2]]
            out = np.frombuffer(b"".join(others), np.uint8).reshape(4, ROWS, ROW).copy()
            got = await ns.get(keys, out=out)
            assert {item.tier for item in got} == {tier}
            assert [row.tobytes() for row in out] == pages
            for item in got:
                assert item.ref is not None


@on_loop
async def test_a_pool_without_room_for_the_scales_is_refused(base):
    async with running(base) as daemon:
        ns = await daemon.namespace(ROW * ROWS)
        await ns.put(KEYS[:1], pages_of(KEYS[:1], ROW * ROWS), durable="nvme")
        with pytest.raises(kvtier.PageSizeError):
            await ns.get(KEYS[:1], out=np.zeros((1, ROWS, 512), np.uint8))


# -- fp8 pages, put by a client that packs them ---------------------------------------------------


async def put_packed(daemon):
    """PAGES under KEYS, durably, as fp8."""

    def put():
        with RawClient(daemon.url) as client:
            opened = client.open(LAYOUT, tenant="t")
            fields = {"codec": int(Codec.FP8), "lossy": True, "origin_sum": b"o" * 16}
            request = transfer_pb2.PutRequest(
                open=transfer_pb2.PutOpen(handle=opened.handle, durability=2),
                pages=[
                    put_page(opened, key, page, **fields)
                    for key, page in zip(KEYS, PAGES, strict=True)
                ],
                data=b"".join(PAGES),
            )
            return client.put_messages([request])

    answer = await asyncio.to_thread(put)
    assert list(answer.codes) == [PutCode.STORED] * 6
    assert list(answer.reached) == [2] * 6


async def get_packed(daemon, keys=KEYS):
    def get():
        with RawClient(daemon.url) as client:
            opened = client.open(LAYOUT, tenant="t")
            return client.get(opened, keys, accept=[int(Codec.FP8)], lossy_ok=True)

    return await asyncio.to_thread(get)


def flip_scale(daemon, ns, key, at, bit=0):
    """One bit of byte `at` of the scales of a page, where it lies on NVMe."""
    slot = daemon.slots(ns, [key])[0]
    cell = bytearray(1)
    daemon.disk.read(slot, HEADER_BYTES + SCALES_AT + at, cell)
    cell[0] ^= 1 << bit
    daemon.disk.write(slot, [cell], HEADER_BYTES + SCALES_AT + at)


@on_loop
async def test_scales_travel_with_their_page_through_both_tiers(base):
    async with running(base) as daemon:
        await put_packed(daemon)
    async with running(base) as daemon:
        for tier in (Tier.NVME, Tier.HOST):
            got = await get_packed(daemon)
            assert got.codes == [GetCode.HIT] * 6
            assert [got.payloads[n] for n in range(6)] == PAGES
            assert {(page.tier, page.codec, page.lossy) for page in got.pages} == {
                (tier, Codec.FP8, True)
            }
        await daemon.settled()


@pytest.mark.parametrize("at", [0, 1, 4 * SCALES // 2, 4 * SCALES - 1])
@on_loop
async def test_a_flipped_scale_is_a_lost_page(base, at):
    """Nothing but one bit of one scale: the page is no hit, and the prefix ends before it."""
    async with running(base) as daemon:
        await put_packed(daemon)
    async with running(base) as daemon:
        ns = await daemon.kv.namespace(LAYOUT, tenant="t")
        flip_scale(daemon, ns, KEYS[3], at, bit=at % 8)
        got = await get_packed(daemon)
        hit, bad = GetCode.HIT, GetCode.CORRUPT
        assert got.codes == [hit, hit, hit, bad, hit, hit]
        assert [got.payloads[n] for n in (0, 1, 2, 4, 5)] == [PAGES[n] for n in (0, 1, 2, 4, 5)]
        assert (await get_packed(daemon)).codes[3] == GetCode.MISS
        assert (await ns.lookup(KEYS)).prefix == 3
        assert daemon.metric("kvtier_pages_total", event="condemned") == 1
        await daemon.settled()


@on_loop
async def test_scales_of_another_page_are_a_lost_page(base):
    """Sound numbers, of the right length, of the same family: and not this page's."""
    async with running(base) as daemon:
        await put_packed(daemon)
    async with running(base) as daemon:
        ns = await daemon.kv.namespace(LAYOUT, tenant="t")
        one, two = daemon.slots(ns, KEYS[1:3])
        scales = bytearray(4 * SCALES)
        daemon.disk.read(two, HEADER_BYTES + SCALES_AT, scales)
        daemon.disk.write(one, [scales], HEADER_BYTES + SCALES_AT)
        got = await get_packed(daemon)
        assert got.codes == [GetCode.HIT, GetCode.CORRUPT] + [GetCode.HIT] * 4
        assert got.payloads[2] == PAGES[2]
        await daemon.settled()


@on_loop
async def test_a_reader_that_does_not_ask_for_packed_pages_gets_none(base):
    async with running(base) as daemon:
        await put_packed(daemon)
    async with running(base) as daemon:
        ns = await daemon.kv.namespace(LAYOUT, tenant="t")
        assert (await ns.lookup(KEYS)).prefix == 6, "advice"
        assert (await ns.get(KEYS)).reasons == [GetCode.MISS] * 6
        assert daemon.counts(Tier.HOST).sealed == 0, "nothing was read for it"


# -- fp8 pages that the daemon packs --------------------------------------------------------------


@on_loop
async def test_scales_that_the_daemon_makes_on_the_way_down_travel(base):
    """Pages of very different size: with another page's scale, or none, a page would be off by
    powers of four."""
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(8)
    shape = (6, LAYOUT.raw_bytes // 2)
    pages = (
        torch.randn(shape, generator=generator) * torch.tensor([4.0**n for n in range(6)])[:, None]
    )
    pages = pages.to(torch.bfloat16)
    async with running(base, "nvme.codec=fp8") as daemon:
        ns = await daemon.kv.namespace(LAYOUT, tenant="t")
        put = await ns.put(KEYS, pages, durable="nvme")
        assert put.durable == 6
        out = torch.zeros_like(pages)
        got = await ns.get(KEYS, out=out)
        assert {(item.tier, item.lossy) for item in got} == {(Tier.HOST, False)}
        assert torch.equal(out, pages), "the copy above is exact"
        await until(lambda: daemon.counts(Tier.NVME).pinned == 0)
    async with running(base, "nvme.codec=fp8") as daemon:
        ns = await daemon.kv.namespace(LAYOUT, tenant="t")
        assert (await ns.get(KEYS)).reasons == [GetCode.MISS] * 6, "not what was put"
        out = pages.flip(0).clone()
        got = await ns.get(KEYS, out=out, lossy_ok=True)
        assert {(item.tier, item.codec, item.lossy) for item in got} == {
            (Tier.NVME, Codec.FP8, True)
        }
        limit = pages.float().abs() / 16 + pages.float().abs().amax(1, keepdim=True) / 448
        assert ((out.float() - pages.float()).abs() <= limit).all()
        again = torch.zeros_like(pages)
        got = await ns.get(KEYS, out=again, lossy_ok=True)
        assert {item.tier for item in got} == {Tier.HOST}
        assert torch.equal(again, out), "the same from both tiers"
    async with running(base, "nvme.codec=fp8") as daemon:
        ns = await daemon.kv.namespace(LAYOUT, tenant="t")
        flip_scale(daemon, ns, KEYS[2], 3, bit=6)
        got = await ns.get(KEYS, out=torch.zeros_like(pages), lossy_ok=True)
        assert got.prefix == 2
        assert got.reasons == [GetCode.HIT] * 2 + [GetCode.CORRUPT] + [GetCode.HIT] * 3
        # An exact page that is put again takes the place of the packed one.
        put = await ns.put(KEYS[2:4], pages[2:4], durable="nvme")
        assert put.reasons == [PutCode.STORED] * 2
        exact = torch.zeros_like(pages[2:4])
        assert (await ns.get(KEYS[2:4], out=exact)).prefix == 2
        assert torch.equal(exact, pages[2:4])
        await daemon.settled()


@on_loop
async def test_pages_that_cannot_be_packed_stay_exact_or_above(base):
    """Opaque bytes go down as they are; a page with an infinity is not packed, and not durable."""
    torch = pytest.importorskip("torch")
    pages = torch.ones((2, LAYOUT.raw_bytes // 2), dtype=torch.bfloat16)
    pages[1, 5] = float("inf")
    async with running(base, "nvme.codec=fp8") as daemon:
        ns = await daemon.kv.namespace(LAYOUT, tenant="t")
        plain = await daemon.kv.namespace(opaque(), tenant="t")
        put = await ns.put(KEYS[:2], pages, durable="nvme", chain=False)
        assert [item.durable for item in put] == [True, False]
        assert daemon.metric("kvtier_moves_total", way="down", result="refused") == 1
        assert (await plain.put(KEYS[:2], pages_of(KEYS[:2]), durable="nvme")).durable == 2
    async with running(base, "nvme.codec=fp8") as daemon:
        ns = await daemon.kv.namespace(LAYOUT, tenant="t")
        plain = await daemon.kv.namespace(opaque(), tenant="t")
        got = await get_checked(plain, KEYS[:2])
        assert {(item.codec, item.lossy) for item in got} == {(Codec.RAW, False)}
        assert (await ns.lookup(KEYS[:2])).reasons == [GetCode.HIT, GetCode.MISS]
        assert (await ns.get([key_of("never")], lossy_ok=True)).reasons == [GetCode.MISS]
