"""Loads that may be used from their first layer on, with copies that happen when a test says so."""

from __future__ import annotations

import threading

import pytest
import torch

from kvtier import GetCode
from kvtier.client.device import DevicePool, PageTransfer, fp8_layout
from kvtier.testing.held_stream import HeldStream
from tests.client.device_rig import random_rows

PAGES = 3


@pytest.fixture(params=["plain", "fp8"])
def pool(request, layout):
    return DevicePool(fp8_layout(layout) if request.param == "fp8" else layout, 8)


@pytest.fixture
def stored(pool, kv):
    """(namespace, keys, bytes) of pages that are in the service."""
    ns = kv.namespace(pool.layout)
    ids = pool.allocate(PAGES)
    for place, page in zip(ids, random_rows(pool, PAGES, 3), strict=True):
        pool.kv[place].view(torch.uint8).copy_(page.view(torch.uint8))
    if pool.form.is_fp8:
        for layer in range(pool.form.layers):
            pool.scales(layer)[ids] = 0.25 + layer
    keys = ns.keys(range(PAGES * pool.form.page_tokens))
    with PageTransfer(pool, ns, deadline=20) as transfer:
        assert transfer.offload(keys, ids).stored == PAGES
    rows = pool.rows[ids].clone()
    pool.free(ids)
    pool.rows.zero_()
    return ns, keys, rows


def layer_of(pool, rows, layer):
    """Bytes of one layer of pages."""
    kv = rows[:, : pool.form.scales_offset].view(torch.uint8)
    run = pool.form.scales_offset // (2 * pool.form.layers)
    return kv.view(len(rows), 2, pool.form.layers, run)[:, :, layer]


def until_known(load):
    ended = threading.Event()
    for _ in range(4000):
        if (result := load.arrived()) is not None:
            return result
        ended.wait(0.005)
    raise TimeoutError("the outcome never came")


def test_a_layer_is_there_when_its_copy_has_been_made(pool, stored):
    ns, keys, rows = stored
    stream = HeldStream()
    ids = pool.allocate(PAGES)
    with PageTransfer(pool, ns, stream=stream, deadline=20) as transfer:
        load = transfer.start_layered_load(keys, ids)
        result = until_known(load)
        assert (result.hits, load.is_done) == (PAGES, False)
        assert stream.held == pool.form.layers
        for layer in range(pool.form.layers):
            assert not layer_of(pool, pool.rows[ids], layer).any()
            stream.release_one()
            load.hold(layer)
            assert torch.equal(layer_of(pool, pool.rows[ids], layer), layer_of(pool, rows, layer))
            if pool.form.is_fp8:
                # Scales come with the first.
                assert pool.scales(layer)[ids].unique().tolist() == [0.25 + layer]
        assert load.wait(20) == load.arrived() == result
    assert torch.equal(pool.rows[ids], rows)


def test_pages_stay_pinned_until_the_last_layer(pool, stored):
    ns, keys, _ = stored
    stream = HeldStream()
    ids = pool.allocate(PAGES)
    with PageTransfer(pool, ns, stream=stream, deadline=20) as transfer:
        load = transfer.start_layered_load(keys, ids)
        until_known(load)
        pool.free(ids)
        stream.release_one()
        assert pool.occupancy.draining == PAGES
        stream.let_go()
        load.wait(20)
    assert pool.occupancy.draining == 0


def test_a_page_that_is_missing_is_told_and_not_touched(pool, stored):
    ns, keys, rows = stored
    ns.delete(keys[1:2])
    ids = pool.allocate(PAGES)
    pool.rows[ids[1]] = 7
    stream = HeldStream(is_holding=False)
    with PageTransfer(pool, ns, stream=stream, deadline=20) as transfer:
        load = transfer.start_layered_load(keys, ids)
        result = load.wait(20)
    assert result.reasons == (GetCode.HIT, GetCode.MISS, GetCode.HIT)
    assert torch.equal(pool.rows[[ids[0], ids[2]]], rows[[0, 2]])
    assert bool((pool.rows[ids[1]] == 7).all())


def test_parts_before_the_last_are_whole_first(pool, stored):
    """Staging memory for a page at a time: the layers are of the last one."""
    ns, keys, rows = stored
    stream = HeldStream(is_holding=False)
    ids = pool.allocate(PAGES)
    size = 2 * pool.form.nbytes
    with PageTransfer(pool, ns, stream=stream, deadline=20, staging_bytes_max=size) as transfer:
        load = transfer.start_layered_load(keys, ids)
        assert load.wait(20).hits == PAGES
        load.hold(pool.form.layers - 1)
    assert torch.equal(pool.rows[ids], rows)


def test_a_pool_in_host_memory_has_them_all_at_once(pool, stored):
    ns, keys, rows = stored
    ids = pool.allocate(PAGES)
    with PageTransfer(pool, ns, deadline=20) as transfer:
        load = transfer.start_layered_load(keys, ids)
        assert load.wait(20).hits == PAGES
        for layer in range(pool.form.layers):
            load.hold(layer)
    assert torch.equal(pool.rows[ids], rows)
