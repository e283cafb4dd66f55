"""A pool that keeps KV as fp8: bytes are those of the codec, and go to the service as they are."""

from __future__ import annotations

import pytest
import torch

import kvtier
from kvtier.client.device import DevicePool, PageTransfer, fp8_layout
from kvtier.packing import fp8_torch
from kvtier.testing.held_stream import HeldStream
from tests.client.device_rig import DEVICES


def numbers(layout, pages, seed, device="cpu"):
    """(pages, 2, layers, page_tokens, heads, dim) of very different sizes from head to head."""
    generator = torch.Generator().manual_seed(seed)
    layers, heads = layout.model_layers, layout.model_heads
    shape = (pages, 2, layers, layout.page_tokens, heads, 16)
    sizes = 10.0 ** torch.randint(-6, 5, (pages, 2, layers, 1, heads, 1), generator=generator)
    return (torch.randn(shape, generator=generator) * sizes).to(torch.bfloat16).to(device)


@pytest.fixture(params=DEVICES)
def pool(request, layout):
    return DevicePool(fp8_layout(layout), 8, request.param)


def written(pool, pages):
    """The ids of pages that hold these numbers, written layer by layer."""
    ids = pool.allocate(len(pages))
    for layer in range(pages.shape[2]):
        pool.write(layer, ids, pages[:, 0, layer], pages[:, 1, layer])
    return ids


def test_codes_and_scales_are_those_of_the_codec(pool, layout):
    """The formula of DESIGN has one home: a pool page is the fp8 payload of the plain page."""
    pages = numbers(layout, 5, 1)
    pages[2, 1, 0, :, 1] = 0
    ids = written(pool, pages.to(pool.device))
    start, count = layout.scales_span
    for page, place in zip(pages, ids, strict=True):
        payload = fp8_torch.pack(layout, page.reshape(-1).view(torch.uint8))
        codes = payload[: layout.raw_bytes // 2]
        scales = payload[start : start + 4 * count]
        row = pool.rows[place].cpu()
        assert torch.equal(row[: len(codes)], codes)
        assert torch.equal(row[pool.form.scales_offset :][: 4 * count], scales)


def test_scales_fold_into_attention(pool, layout):
    """q . (code x scale) = (q . code) x scale: nothing has to be unpacked."""
    pages = numbers(layout, 3, 2, pool.device)
    ids = written(pool, pages)
    for layer in range(2):
        scales = pool.scales(layer)[ids]
        for part, view in enumerate((pool.keys(layer), pool.values(layer))):
            got = view[ids].float() * scales[:, part, None, :, None]
            want = pages[:, part, layer].float()
            limit = want.abs().amax(dim=(1, 3), keepdim=True) / 448 * 16 + want.abs() / 16
            assert ((got - want).abs() <= limit).all()


def test_numbers_that_are_not_finite_are_refused_and_nothing_is_written(pool, layout):
    pages = numbers(layout, 2, 3, pool.device)
    ids = written(pool, pages)
    before = pool.rows.clone()
    pages[1, 1, 0, 3, 1, 5] = float("inf")
    with pytest.raises(kvtier.NonFinite, match=rf"page {ids[1]}, layer 0, V of token 3, head 1"):
        pool.write(0, ids, pages[:, 0, 0], pages[:, 1, 0])
    assert torch.equal(pool.rows, before)


@pytest.mark.parametrize("device", DEVICES)
def test_a_plain_pool_is_written_by_the_same_call(layout, device):
    pool = DevicePool(layout, 4, device)
    pages = numbers(layout, 3, 4, device)
    ids = written(pool, pages)
    assert torch.equal(pool.kv[ids], pages)


@pytest.mark.parametrize("way", ["direct", "staged"])
def test_fp8_pages_come_back_bit_for_bit_and_not_to_the_plain_family(kv, layout, way):
    pool = DevicePool(fp8_layout(layout), 8)
    ns = kv.namespace(pool.layout)
    stream = HeldStream(is_holding=False) if way == "staged" else None
    ids = written(pool, numbers(layout, 3, 5))
    before = pool.rows[ids].clone()
    keys = ns.keys(range(12))
    with PageTransfer(pool, ns, stream=stream, deadline=20) as transfer:
        assert transfer.offload(keys, ids).stored == 3
        places = pool.allocate(3)
        got = transfer.load(keys, places)
        assert (got.hits, got.lossy) == (3, (False,) * 3)
    assert torch.equal(pool.rows[places], before)
    assert kv.namespace(layout).lookup(keys).hits == 0
