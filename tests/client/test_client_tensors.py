"""Tensors in and out: contiguous, strided, in a pool, on a GPU; fp8 on the way; segments of a
lease.
"""

from __future__ import annotations

import pytest
import torch

import kvtier

GetCode, PutCode, Codec = kvtier.GetCode, kvtier.PutCode, kvtier.Codec

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


def random_pages(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((count, 2, 2, 4, 2, 16), generator=generator).to(torch.bfloat16)


@pytest.mark.parametrize("device", DEVICES)
def test_contiguous(ns, device):
    pages = random_pages(5).to(device)
    keys = ns.keys(range(20))
    assert ns.put(keys, pages).stored == 5
    out = torch.zeros_like(pages)
    assert ns.get(keys, out=out).hits == 5
    assert torch.equal(out, pages)


@pytest.mark.parametrize("device", DEVICES)
def test_strided_tensors_are_filled_in_place(ns, device):
    pages = random_pages(5).to(device)
    keys = ns.keys(range(20))
    wide = torch.zeros((5, 2, 2, 4, 2, 32), dtype=torch.bfloat16, device=device)
    wide[..., ::2] = pages
    assert ns.put(keys, wide[..., ::2]).stored == 5
    out = torch.zeros_like(wide)
    assert ns.get(keys, out=out[..., 1::2]).hits == 5
    assert torch.equal(out[..., 1::2], pages)
    assert out[..., ::2].count_nonzero() == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ids", [[6, 1, 3], torch.tensor([6, 1, 3])])
def test_rows_of_a_pool(ns, device, ids):
    pages = random_pages(3).to(device)
    keys = ns.keys(range(12))
    ns.put(keys, pages)
    pool = torch.zeros((8, 2, 2, 4, 2, 16), dtype=torch.bfloat16, device=device)
    assert ns.get(keys, out=pool, at=ids).hits == 3
    assert torch.equal(pool[[6, 1, 3]], pages)
    assert pool[[0, 2, 4, 5, 7]].count_nonzero() == 0
    again = ns.keys(range(40, 52))
    assert ns.put(again, pool, at=ids).stored == 3
    out = torch.empty_like(pages)
    assert ns.get(again, out=out).hits == 3
    assert torch.equal(out, pages)


@pytest.mark.parametrize("device", DEVICES)
def test_layers_of_a_pool_that_is_layer_first(ns, layout, device):
    """One strided view a page, as an engine with (layers, pages, ...) has them."""
    pages = random_pages(3).to(device)
    keys = ns.keys(range(12))
    pool = torch.zeros((2, 2, 8, 4, 2, 16), dtype=torch.bfloat16, device=device)
    views = [pool[:, :, place] for place in (5, 0, 2)]
    for view, page in zip(views, pages, strict=True):
        view.copy_(page)
    assert ns.put(keys, views).stored == 3
    out = torch.zeros_like(pool)
    assert ns.get(keys, out=[out[:, :, place] for place in (5, 0, 2)]).hits == 3
    assert torch.equal(out, pool)


def test_a_slice_of_rows_and_a_tensor_with_grad(ns):
    pages = random_pages(4)
    keys = ns.keys(range(16))
    assert ns.put(keys, pages.clone().requires_grad_()).stored == 4
    pool = torch.zeros((10, *pages.shape[1:]), dtype=torch.bfloat16)
    assert ns.get(keys, out=pool[3:7]).hits == 4
    assert torch.equal(pool[3:7], pages)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: torch.zeros(2, 1023, dtype=torch.uint8), "page 0 has 1023 bytes"),
        (lambda: torch.zeros(1024, dtype=torch.uint8).expand(2, 1024), "share memory"),
        (lambda: torch.zeros(2048, 2, dtype=torch.uint8)[:, 0], "strided"),
        (lambda: torch.zeros(2, 1024, dtype=torch.uint8).to_sparse(), "sparse"),
        (lambda: torch.tensor(1, dtype=torch.int32), "has 4 bytes, needed are 2048"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(ns, make, match):
    with pytest.raises(kvtier.PageSizeError, match=match):
        ns.get([bytes(32), bytes(32)], out=make())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_put_waits_for_work_on_the_callers_stream(ns):
    keys = ns.keys(range(40))
    page = torch.zeros((10, 2, 2, 4, 2, 16), dtype=torch.bfloat16, device="cuda")
    stream = torch.cuda.Stream()
    for attempt in range(20):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            page.fill_(attempt + 1)
            ns.put(keys, page)
            page.fill_(-1)
        out = torch.zeros(page.shape, dtype=page.dtype)
        assert ns.get(keys, out=out).hits == 10
        assert (out == attempt + 1).all(), f"attempt {attempt}"
        ns.delete(keys)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_get_waits_for_work_on_the_callers_stream(ns):
    keys = ns.keys(range(40))
    pages = random_pages(10)
    ns.put(keys, pages)
    out = torch.zeros(pages.shape, dtype=pages.dtype, device="cuda")
    stream = torch.cuda.Stream()
    for attempt in range(20):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            out.fill_(-1)
            assert ns.get(keys, out=out).hits == 10
            assert torch.equal(out.cpu(), pages), f"attempt {attempt}"


@pytest.mark.parametrize("device", DEVICES)
def test_fp8_is_packed_before_it_is_sent_and_comes_back_within_its_error(
    ns, daemon, layout, device
):
    pages = random_pages(3).to(device)
    keys = ns.keys(range(12))
    assert ns.put(keys, pages, codec=Codec.FP8).reasons == [PutCode.STORED] * 3
    assert {len(stored.data) for stored in daemon.pages.values()} == {layout.fp8_bytes}
    assert all(stored.lossy and stored.origin_sum for stored in daemon.pages.values())

    assert ns.get(keys).reasons == [GetCode.MISS] * 3
    out = torch.zeros_like(pages)
    got = ns.get(keys, out=out, lossy_ok=True)
    assert got.reasons == [GetCode.HIT] * 3
    assert got[0].lossy
    assert got[0].codec is Codec.FP8
    # e4m3 has three bits of fraction: half a step is 1/16 of the number.
    limit = pages.abs().amax() / 448 * 16 + pages.abs().float() / 16
    assert ((out.float() - pages.float()).abs() <= limit).all()
    assert ns.get(keys, codec=Codec.FP8, lossy_ok=True).hits == 3
    assert ns.get(keys, codec=Codec.RAW, lossy_ok=True).hits == 0


def test_origin_sum_is_the_sum_of_the_raw_page(ns, daemon):
    pages = random_pages(1)
    raw, packed = ns.keys(range(4)), ns.keys(range(4, 8))
    ns.put(raw, pages)
    ns.delete(raw)
    ns.put(raw, pages, codec=Codec.FP8)
    ns.put(packed, pages)
    by_key = {place[2]: stored for place, stored in daemon.pages.items()}
    assert by_key[raw[0]].origin_sum != by_key[raw[0]].payload_sum
    assert by_key[packed[0]].origin_sum == b""
    daemon.pages.clear()
    ns.put(raw, pages)
    assert next(iter(daemon.pages.values())).payload_sum == by_key[raw[0]].origin_sum


def test_a_page_that_cannot_be_packed_is_nonfinite_and_the_others_go_on(ns):
    pages = random_pages(4)
    pages[1, 0, 0, 0, 0, 0] = float("inf")
    pages[3, 1, 1, 3, 1, 15] = float("nan")
    keys = ns.keys(range(16))
    put = ns.put(keys, pages, codec=Codec.FP8)
    assert put.reasons == [PutCode.STORED, PutCode.NONFINITE, PutCode.STORED, PutCode.NONFINITE]
    with pytest.raises(kvtier.NonFinite, match="page 1 is NONFINITE; 2 of 4"):
        put.raise_for_refused()
    got = ns.get(keys, lossy_ok=True)
    assert got.reasons == [GetCode.HIT, GetCode.MISS, GetCode.HIT, GetCode.MISS]


def test_a_batch_of_only_nonfinite_pages(ns):
    pages = torch.full((2, 2, 2, 4, 2, 16), float("nan"), dtype=torch.bfloat16)
    put = ns.put(ns.keys(range(8)), pages, codec=Codec.FP8)
    assert put.reasons == [PutCode.NONFINITE] * 2


def test_a_layout_without_numbers_to_pack_refuses_fp8(kv):
    opaque = kvtier.Layout.from_segments(
        [
            kvtier.Segment(
                name="o",
                role=kvtier.Role.OPAQUE,
                dtype="uint8",
                layers=1,
                heads=1,
                dim=64,
                scale_rule=kvtier.ScaleRule.NONE,
            )
        ],
        model_id="m",
        revision="r",
        page_tokens=1,
        kv_compute="bfloat16",
    )
    ns = kv.namespace(opaque)
    keys = ns.keys([1])
    with pytest.raises(kvtier.LayoutError):
        ns.put(keys, [bytes(64)], codec=Codec.FP8)
    assert ns.put(keys, [bytes(64)]).stored == 1
    assert ns.get(keys, lossy_ok=True).hits == 1


def test_a_lease_gives_segments(ns):
    pages = random_pages(2)
    keys = ns.keys(range(12))
    ns.put(keys[:2], pages)
    with ns.lease(keys) as held:
        assert held.prefix == 2
        first, second, third = held.tensors()
        assert third is None
        assert torch.equal(first["k"], pages[0, 0])
        assert torch.equal(second["v"], pages[1, 1])
        assert first["k"].dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_numbers_of_another_format_are_refused(ns, dtype):
    """As many bytes of another format would come back as other numbers."""
    pages = random_pages(3).view(torch.int16).view(torch.uint8).view(dtype)
    keys = ns.keys(range(12))
    with pytest.raises(kvtier.LayoutError, match="the layout has bfloat16"):
        ns.put(keys, pages)
    with pytest.raises(kvtier.LayoutError, match="the layout has bfloat16"):
        ns.get(keys, out=[page.numpy() for page in pages])
    assert ns.put(keys, pages.view(torch.uint8)).stored == 3


def test_a_tensor_without_memory_is_refused(ns):
    nowhere = torch.empty((2, ns.layout.raw_bytes), dtype=torch.uint8, device="meta")
    for call in (
        lambda: ns.put(ns.keys(range(8)), nowhere),
        lambda: ns.get(ns.keys(range(8)), out=nowhere),
    ):
        with pytest.raises(kvtier.PageSizeError, match="meta"):
            call()


def test_keys_that_are_no_sequence_are_refused(ns):
    for call in (ns.get, ns.lookup, ns.delete):
        with pytest.raises(kvtier.KeyLengthError, match="keys is 3"):
            call(3)
