"""The pool of device pages: who has which page, how pages lie, and what tags they get."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch

import kvtier
from kvtier.client.device import (
    DevicePool,
    PageNotHeld,
    PageTable,
    PoolExhausted,
    PoolInconsistent,
    fp8_layout,
)
from tests.client.device_rig import DEVICES, fill
from tests.client.local_rig import opaque, two_segments


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_page_is_the_bytes_of_its_keys_then_its_values(dtype, device):
    layout = two_segments(layers=3, heads=2, dim=16)
    layout = replace(
        layout, segments=tuple(replace(segment, dtype=dtype) for segment in layout.segments)
    )
    pool = DevicePool(layout, 5, device)
    assert pool.kv.shape == (5, 2, 3, layout.page_tokens, 2, 16)
    assert pool.kv.dtype == getattr(torch, dtype)
    assert pool.kv.is_contiguous()
    for layer in range(3):
        pool.keys(layer)[4] = layer + 1
        pool.values(layer)[4] = -layer - 1
    numbers = pool.rows[4].cpu().view(pool.kv.dtype)
    want = torch.tensor([1, 2, 3, -1, -2, -3]).repeat_interleave(layout.page_tokens * 2 * 16)
    assert numbers.tolist() == want.tolist()
    assert pool.rows[:4].count_nonzero() == 0
    assert pool.rows.shape == (5, layout.raw_bytes)


def test_layouts_that_are_not_plain_keys_and_values_are_refused(layout):
    with pytest.raises(kvtier.LayoutError, match="storage order 'LHTD'"):
        DevicePool(replace(layout, storage_order="LHTD"), 4)
    with pytest.raises(kvtier.LayoutError, match="segments"):
        DevicePool(opaque(4096), 4)
    with pytest.raises(kvtier.LayoutError, match="pool of 0 pages"):
        DevicePool(layout, 0)
    with pytest.raises(kvtier.LayoutError, match="no scales"):
        DevicePool(layout, 1).scales(0)


def test_allocate_gives_all_or_nothing(layout):
    pool = DevicePool(layout, 4)
    first = pool.allocate(3)
    assert sorted({*first, *pool.allocate(0)}) == sorted(first)
    with pytest.raises(PoolExhausted, match="2 pages asked for, 1 of 4 are free") as caught:
        pool.allocate(2)
    assert caught.value.remedy
    assert pool.free_pages == 1
    last = pool.allocate(1)
    assert sorted(first + last) == [0, 1, 2, 3]
    pool.free(first + last)
    assert pool.free_pages == 4
    pool.check()


def test_a_shared_page_is_free_when_the_last_one_has_let_go(layout):
    pool = DevicePool(layout, 4)
    ids = pool.allocate(2)
    pool.share(ids)
    pool.share(ids[:1])
    assert [pool.references(page) for page in ids] == [3, 2]
    pool.free(ids)
    pool.free(ids)
    assert pool.free_pages == 3
    pool.free(ids[:1])
    assert pool.free_pages == 4


@pytest.mark.parametrize(
    ("call", "ids"),
    [
        ("free", [0, 0]),
        ("free", [0, 3]),
        ("free", [0, 4]),
        ("free", [0, -1]),
        ("share", [0, 3]),
        ("share", [0, 4]),
        ("pin", [0, 3]),
        ("pin", [0, -1]),
        ("unpin", [0]),
        ("unpin", [17]),
    ],
)
def test_ids_that_are_not_held_are_refused_and_change_nothing(layout, call, ids):
    pool = DevicePool(layout, 4)
    (held,) = pool.allocate(1)
    ids = [held if page == 0 else 0 if page == held else page for page in ids]
    before = pool.occupancy
    with pytest.raises(PageNotHeld, match=call):
        getattr(pool, call)(ids)
    assert pool.occupancy == before
    assert pool.references(held) == 1
    pool.check()


def test_a_page_under_copy_is_given_to_nobody_before_the_copy_is_done(layout):
    pool = DevicePool(layout, 2)
    ids = pool.allocate(2)
    pool.pin(ids)
    pool.pin(ids[:1])
    pool.free(ids)
    assert (pool.occupancy.draining, pool.occupancy.free, pool.occupancy.pinned) == (2, 0, 2)
    with pytest.raises(PoolExhausted, match="2 wait for copies"):
        pool.allocate(1)
    with pytest.raises(PageNotHeld):
        pool.share(ids)
    pool.unpin(ids)
    assert pool.allocate(1) == ids[1:]
    pool.unpin(ids[:1])
    assert pool.allocate(1) == ids[:1]
    pool.check()


@pytest.mark.parametrize(
    "damage",
    [
        lambda account: account._free.append(account._free[0]),
        lambda account: account._free.pop(),
        lambda account: account._references.__setitem__(0, 1),
        lambda account: account._pins.__setitem__(0, 1),
    ],
    ids=["free twice", "lost", "held and free", "pinned and free"],
)
def test_accounts_that_do_not_add_up_are_seen(layout, damage):
    pool = DevicePool(layout, 4)
    pool.check()
    damage(pool._account)
    with pytest.raises(PoolInconsistent):
        pool.check()


@pytest.mark.parametrize("device", DEVICES)
def test_every_allocation_has_a_tag_that_no_page_had_before(layout, device):
    pools = [DevicePool(layout, 3, device), DevicePool(layout, 2, device)]
    assert all(pool.tags.tolist() == [0] * pool.pages for pool in pools)
    seen = set()
    for _ in range(5):
        for pool in pools:
            ids = pool.allocate(2)
            tags = pool.tags[torch.tensor(ids, device=device)].tolist()
            assert tags == pool.known_tags(ids)
            assert not seen.intersection(tags)
            assert len(set(tags)) == 2
            seen.update(tags)
            pool.free(ids)
            assert pool.known_tags(ids) == [0, 0]


def test_sharing_a_page_keeps_its_tag(layout):
    pool = DevicePool(layout, 3)
    ids = pool.allocate(2)
    before = pool.known_tags(ids)
    pool.share(ids)
    pool.free(ids)
    assert pool.known_tags(ids) == before


@pytest.mark.parametrize("device", DEVICES)
def test_a_table_holds_its_pages_and_gives_them_back(layout, device):
    pool = DevicePool(layout, 60, device)
    table = PageTable(pool)
    ids = pool.allocate(2)
    table.append(ids)
    for _ in range(50):  # past the room that it has at first
        more = pool.allocate(1)
        table.append(more)
        ids += more
    assert len(table) == 52
    assert table.ids == tuple(ids)
    assert table.pages.dtype == torch.int32
    assert table.pages.tolist() == ids
    assert table.tags.tolist() == pool.known_tags(ids)
    assert table.truncate(50) == ()
    assert table.pages.tolist() == ids[:50]
    assert pool.free_pages == 10
    assert table.release() == ()
    assert (len(table), pool.free_pages) == (0, 60)
    table.append(pool.allocate(1))
    assert len(table.pages) == 1


def test_a_table_takes_no_page_that_is_free(layout):
    pool = DevicePool(layout, 3)
    ids = pool.allocate(2)
    pool.free(ids[:1])
    table = PageTable(pool)
    with pytest.raises(PageNotHeld, match=f"page {ids[0]} is free"):
        table.append(ids)
    assert (len(table), pool.references(ids[1])) == (0, 1)


def test_a_table_does_not_free_what_belongs_to_another_by_now(layout):
    pool = DevicePool(layout, 3)
    table = PageTable(pool)
    ids = pool.allocate(3)
    table.append(ids)
    pool.free(ids[:2])  # behind the back of the table
    (theirs,) = pool.allocate(1)
    assert sorted(table.release()) == sorted(ids[:2])
    assert pool.references(theirs) == 1
    pool.check()


@pytest.mark.parametrize("device", DEVICES)
def test_pages_go_to_the_service_and_back_without_a_gather(ns, device):
    pool = DevicePool(ns.layout, 8, device)
    ids = pool.allocate(3)
    pages = fill(pool, ids, 1)
    keys = ns.keys(range(12))
    assert ns.put(keys, pool.kv, at=ids).stored == 3
    places = pool.allocate(3)
    assert ns.get(keys, out=pool.kv, at=places).hits == 3
    for page, place in zip(pages, places, strict=True):
        assert torch.equal(pool.kv[place].cpu(), page)


def test_threads_share_a_pool(layout):
    pool = DevicePool(layout, 8)
    tags = [[] for _ in range(4)]

    def use(mine):
        for _ in range(300):
            ids = pool.allocate(2)
            mine += pool.known_tags(ids)
            pool.pin(ids)
            pool.free(ids)
            pool.unpin(ids)

    threads = [threading.Thread(target=use, args=(mine,)) for mine in tags]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({tag for mine in tags for tag in mine}) == 4 * 600
    assert pool.free_pages == 8
    pool.check()


def test_an_fp8_pool_holds_codes_and_scales_of_a_family_of_its_own(layout):
    packed = fp8_layout(layout)
    assert packed.kv_compute == "fp8_e4m3"
    assert packed.fingerprint("t") != layout.fingerprint("t")
    pool = DevicePool(packed, 6)
    assert pool.kv.dtype == torch.float8_e4m3fn
    assert pool.kv.shape == (6, 2, 2, 4, 2, 16)
    assert pool.scales(1).shape == (6, 2, 2)
    assert pool.rows.shape == (6, layout.raw_bytes // 2 + 2 * 2 * 2 * 4)
    assert pool.scales(0).eq(1).all()
    pool.scales(1)[3, 1, 0] = 2.5
    tail = pool.rows[3, layout.raw_bytes // 2 :].view(torch.float32).view(2, 2, 2)
    assert tail[1, 1, 0] == 2.5
    assert tail.sum() == 7 + 2.5
    with pytest.raises(kvtier.LayoutError, match="no fp8 form"):
        fp8_layout(packed)


@pytest.mark.parametrize("page_tokens", [1, 3, 16, 64])
def test_an_fp8_page_is_hardly_more_than_half_of_a_plain_one(page_tokens):
    layout = replace(two_segments(layers=30, heads=3, dim=64), page_tokens=page_tokens)
    packed = fp8_layout(layout)
    codes = layout.raw_bytes // 2
    scales = 2 * 30 * 3 * 4
    assert codes + scales <= packed.raw_bytes <= codes + scales + 4 * page_tokens


def test_without_torch_the_package_says_what_to_install():
    code = """if True:
        import sys
        sys.modules["torch"] = None
        import kvtier
        try:
            import kvtier.client.device
        except kvtier.MissingExtra as error:
            print(error.remedy)
    """
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "pip install torch\n"
