"""Pages between a pool and the service: what arrives, and who may have a page meanwhile.

`held` copies happen when the test says so, as on a device that takes its time; `staged` go the same
way at once; `direct` is a pool in host memory.
"""

from __future__ import annotations

import threading

import pytest
import torch

import kvtier
from kvtier.client.device import DevicePool, PageNotHeld, PageTransfer, PoolExhausted
from kvtier.testing.held_stream import HeldStream
from tests.client.device_rig import DEVICES, fill, random_rows

GetCode, PutCode, Codec, Tier = kvtier.GetCode, kvtier.PutCode, kvtier.Codec, kvtier.Tier

WAYS = ["direct", "staged", pytest.param("cuda", marks=DEVICES[1].marks)]


@pytest.fixture(params=WAYS)
def transfer(request, ns):
    """A pool of 12 pages; three of them fit into a half of the staging memory."""
    pool = DevicePool(ns.layout, 12, "cuda" if request.param == "cuda" else "cpu")
    stream = HeldStream(is_holding=False) if request.param == "staged" else None
    size = 2 * 3 * ns.layout.raw_bytes
    with PageTransfer(pool, ns, stream=stream, deadline=20, staging_bytes_max=size) as made:
        yield made
    pool.check()
    assert pool.occupancy.pinned == 0


@pytest.fixture
def stream():
    return HeldStream()


@pytest.fixture
def held(ns, stream):
    """The same with copies that are held back."""
    pool = DevicePool(ns.layout, 6)
    size = 2 * 3 * ns.layout.raw_bytes
    with PageTransfer(pool, ns, stream=stream, deadline=20, staging_bytes_max=size) as made:
        yield made
        stream.let_go()
    pool.check()
    assert pool.occupancy.pinned == 0


def test_nothing_to_move(transfer, ns):
    assert transfer.offload([], []).reasons == ()
    assert transfer.load([], []).reasons == ()
    assert transfer.offload(ns.keys(range(3)), []).stored == 0


@pytest.mark.parametrize("count", [1, 3, 8])
def test_there_and_back(transfer, ns, count):
    pool = transfer.pool
    ids = pool.allocate(count)
    pages = fill(pool, ids, count)
    keys = ns.keys(range(4 * count))
    assert transfer.offload(keys, ids).reasons == (PutCode.STORED,) * count
    assert transfer.offload(keys, ids).reasons == (PutCode.EXISTS,) * count
    pool.free(ids)
    places = pool.allocate(4 + count)[4:]
    got = transfer.load(keys, places)
    assert got.reasons == (GetCode.HIT,) * count
    assert got.tiers == (Tier.HOST,) * count
    assert got.lossy == (False,) * count
    assert (got.hits, got.prefix, got.failed) == (count, count, ())
    for page, place in zip(pages, places, strict=True):
        assert torch.equal(pool.kv[place].cpu(), page)
    assert pool.occupancy.pinned == 0


def test_every_page_has_its_own_outcome(transfer, ns, daemon):
    pool = transfer.pool
    ids = pool.allocate(8)
    pages = fill(pool, ids, 1)
    keys = ns.keys(range(32))
    daemon.put_codes[keys[4]] = int(PutCode.QUOTA)
    put = transfer.offload(keys, ids)
    assert put.reasons == (*[PutCode.STORED] * 4, PutCode.QUOTA, *[PutCode.STORED] * 3)
    assert (put.stored, put.failed) == (7, (4,))
    ns.delete(keys[1:2])
    got = transfer.load(keys, ids)
    assert got.failed == (1, 4)
    assert got.reasons[1] is got.reasons[4] is GetCode.MISS
    assert (got.prefix, got.hits) == (1, 6)
    assert got.tiers[1] is None
    for place, page in enumerate(pages):
        if place not in got.failed:
            assert torch.equal(pool.kv[ids[place]].cpu(), page)


def test_a_chain_goes_on_from_part_to_part(transfer, ns, daemon):
    """The daemon hears of each page which one comes before it, however the call is cut."""
    ids = transfer.pool.allocate(8)
    keys = ns.keys(range(40))
    assert transfer.offload(keys[2:], ids).stored == 8
    found = {key: (page.parent, page.depth) for (_, _, key), page in daemon.pages.items()}
    assert found == {keys[n]: (keys[n - 1], n) for n in range(2, 10)}


def test_fp8_on_the_way(transfer, ns, layout, daemon):
    pool = transfer.pool
    ids = pool.allocate(5)
    pages = fill(pool, ids, 2)
    pool.kv[ids[3], 1, 1, 2, 0, 7] = float("inf")
    keys = ns.keys(range(20))
    put = transfer.offload(keys, ids, codec=Codec.FP8)
    assert put.reasons == tuple(PutCode.NONFINITE if n == 3 else PutCode.STORED for n in range(5))
    assert {len(stored.data) for stored in daemon.pages.values()} == {layout.fp8_bytes}
    assert transfer.load(keys, ids).hits == 0
    got = transfer.load(keys, ids, lossy_ok=True)
    assert got.reasons == tuple(GetCode.MISS if n == 3 else GetCode.HIT for n in range(5))
    assert got.lossy == (True, True, True, False, True)
    for n in (0, 1, 2, 4):
        limit = pages[n].abs().amax() / 448 * 16 + pages[n].abs().float() / 16
        assert ((pool.kv[ids[n]].cpu().float() - pages[n].float()).abs() <= limit).all()


def test_a_page_that_is_no_hit_is_not_written_by_way_of_staging(ns, held, stream):
    stream.let_go()
    ids = held.pool.allocate(2)
    pages = fill(held.pool, ids, 3)
    assert held.load(ns.keys(range(8)), ids).reasons == (GetCode.MISS,) * 2
    assert torch.equal(held.pool.kv[ids], pages)


def test_freed_while_it_is_read_a_page_is_given_to_nobody(ns, held, stream):
    """The copy sees what the page held, although its owner has let go of it long ago."""
    pool = held.pool
    ids = pool.allocate(6)
    pages = fill(pool, ids, 4)
    keys = ns.keys(range(24))
    under_way = held.start_offload(keys, ids)
    stream.wait_for_copies(1)
    pool.free(ids)
    assert pool.occupancy.draining == 6
    with pytest.raises(PoolExhausted):
        pool.allocate(1)
    stream.release_one()
    stream.wait_for_copies(1)  # the first half has been read: its pages are free
    assert (pool.free_pages, pool.occupancy.draining) == (3, 3)
    fill(pool, pool.allocate(3), 5)
    assert under_way.poll() is None
    stream.release_one()
    assert under_way.wait(20).stored == 6
    assert pool.free_pages == 3
    out = torch.zeros_like(pages)
    assert ns.get(keys, out=out).hits == 6
    assert torch.equal(out, pages)


def test_freed_while_it_is_written_a_page_is_given_to_nobody(ns, held, stream):
    pool = held.pool
    keys = ns.keys(range(12))
    assert ns.put(keys, random_rows(pool, 3, 6)).stored == 3
    ids = pool.allocate(3)
    under_way = held.start_load(keys, ids)
    stream.wait_for_copies(1)
    pool.free(ids)
    theirs = pool.allocate(3)
    assert not set(theirs) & set(ids)
    pages = fill(pool, theirs, 7)
    with pytest.raises(PoolExhausted):
        pool.allocate(1)
    stream.release_one()
    assert under_way.wait(20).hits == 3
    assert pool.free_pages == 3
    ours = pool.allocate(3)
    fresh = fill(pool, ours, 8)
    assert stream.held == 0
    assert torch.equal(pool.kv[theirs], pages)
    assert torch.equal(pool.kv[ours], fresh)


def test_staging_memory_is_not_used_anew_before_its_copy_is_done(ns, layout, stream):
    """Three parts, two halves: the third part waits for the copy of the first."""
    pool = DevicePool(layout, 9)
    size = 2 * 3 * layout.raw_bytes
    keys = ns.keys(range(36))
    pages = random_rows(pool, 9, 12)
    assert ns.put(keys, pages).stored == 9
    with PageTransfer(pool, ns, stream=stream, deadline=20, staging_bytes_max=size) as made:
        ids = pool.allocate(9)
        under_way = made.start_load(keys, ids)
        stream.wait_for_copies(2)
        with pytest.raises(TimeoutError):  # never a third one; a wrong one comes at once
            stream.wait_for_copies(3, timeout_s=0.2)
        stream.let_go()
        assert under_way.wait(20).hits == 9
    assert torch.equal(pool.kv[ids], pages)


def test_a_load_waits_for_those_who_read_the_page_before(ns, held, stream):
    """Kernels that are queued still read what was in the page; until they end nothing is written,
    and past the deadline nothing at all.
    """
    stream.let_go()
    pool = held.pool
    keys = ns.keys(range(12))
    stored = random_rows(pool, 3, 9)
    ns.put(keys, stored)
    ids = pool.allocate(3)
    before = fill(pool, ids, 10)
    flag = stream.hold_work()
    assert held.load(keys, ids, deadline=0.2).reasons == (GetCode.TIMEOUT,) * 3
    assert torch.equal(pool.kv[ids], before)
    assert held.offload(ns.keys(range(50, 62)), ids, deadline=0.1).reasons == (PutCode.TIMEOUT,) * 3
    under_way = held.start_load(keys, ids)
    assert under_way.poll() is None
    assert torch.equal(pool.kv[ids], before)
    flag.set()
    assert under_way.wait(20).hits == 3
    assert torch.equal(pool.kv[ids], stored)


def test_waiting_has_an_end_and_the_transfer_goes_on(ns, held, stream):
    ids = held.pool.allocate(2)
    pages = fill(held.pool, ids, 11)
    keys = ns.keys(range(8))
    under_way = held.start_offload(keys, ids)
    with pytest.raises(kvtier.DeadlineExceeded, match="not done in"):
        under_way.wait(0.05)
    assert not under_way.is_done
    stream.let_go()
    assert under_way.wait(20).stored == 2
    assert under_way.is_done
    assert under_way.poll() == under_way.wait()
    out = torch.zeros_like(pages)
    assert ns.get(keys, out=out).hits == 2


def test_one_transfer_too_many_is_busy_at_once(ns, layout, stream):
    pool = DevicePool(layout, 8)
    with PageTransfer(pool, ns, stream=stream, deadline=20, queue_transfers_max=2) as made:
        ids = pool.allocate(8)
        keys = ns.keys(range(32))
        waiting = [made.start_offload(keys[n : n + 1], ids[n : n + 1]) for n in range(2)]
        refused = made.start_offload(keys[2:5], ids[2:5])
        assert refused.is_done
        assert refused.wait().reasons == (PutCode.BUSY,) * 3
        assert pool.occupancy.pinned == 2
        # Loads have a line of their own.
        loads = [made.start_load(keys[n : n + 1], ids[n : n + 1]) for n in range(5, 8)]
        assert loads[-1].wait(0).reasons == (GetCode.BUSY,)
        stream.let_go()
        assert [transfer.wait(20).stored for transfer in waiting] == [1, 1]
        assert [transfer.wait(20).hits for transfer in loads[:2]] == [0, 0]
        assert made.offload(keys[2:5], ids[2:5]).stored == 3
    pool.free(ids)
    assert pool.free_pages == 8


def test_a_call_whose_turn_does_not_come_ends_at_its_deadline(ns, held, stream):
    ids = held.pool.allocate(3)
    keys = ns.keys(range(12))
    first = held.start_offload(keys[:1], ids[:1])
    stream.wait_for_copies(1)
    assert held.offload(keys[1:], ids[1:], deadline=0.1).reasons == (PutCode.TIMEOUT,) * 2
    assert held.pool.occupancy.pinned == 1
    stream.let_go()
    assert first.wait(20).stored == 1
    assert ns.lookup(keys).hits == 1


def test_closing_drops_what_has_not_begun(ns, layout, stream):
    pool = DevicePool(layout, 4)
    made = PageTransfer(pool, ns, stream=stream, deadline=20)
    ids = pool.allocate(4)
    keys = ns.keys(range(16))
    first = made.start_offload(keys[:2], ids[:2])
    stream.wait_for_copies(1)
    second = made.start_offload(keys[2:], ids[2:])
    assert not first.cancel()
    closing = threading.Thread(target=made.close)
    closing.start()
    assert second.wait(20).reasons == (PutCode.UNAVAILABLE,) * 2
    stream.let_go()
    closing.join(20)
    assert not closing.is_alive()
    assert first.wait(0).stored == 2
    pool.free(ids)
    assert pool.free_pages == 4
    with pytest.raises(kvtier.ClientClosed):
        made.start_load(keys, pool.allocate(4))
    assert pool.occupancy.pinned == 0
    made.close()


def test_cancelled_before_it_begins_a_transfer_lets_go_of_its_pages(ns, held, stream):
    ids = held.pool.allocate(4)
    keys = ns.keys(range(16))
    first = held.start_load(keys[:2], ids[:2])
    stream.wait_for_copies(1)
    second = held.start_load(keys[2:], ids[2:])
    assert second.cancel()
    assert held.pool.occupancy.pinned == 2
    assert second.wait(0).reasons == (GetCode.UNAVAILABLE,) * 2
    stream.let_go()
    assert first.wait(20).reasons == (GetCode.MISS,) * 2


def test_mistakes_are_told_at_once_and_pin_nothing(transfer, ns, layout):
    pool = transfer.pool
    ids = pool.allocate(3)
    keys = ns.keys(range(12))
    for start in (transfer.start_offload, transfer.start_load):
        with pytest.raises(kvtier.PageSizeError, match="3 keys and 2 different pages"):
            start(keys, ids[:2])
        with pytest.raises(kvtier.PageSizeError):
            start(keys, [ids[0], ids[0], ids[1]])
        with pytest.raises(PageNotHeld):
            start(keys, [ids[0], ids[1], ids[2] + 9])
        with pytest.raises(kvtier.KeyLengthError):
            start([b"short"], ids[:1])
        with pytest.raises(kvtier.LimitExceeded):
            start(keys, ids, deadline=-1)
    assert pool.occupancy.pinned == 0
    other = kvtier.Layout.from_segments(
        layout.segments, model_id="m", revision="r2", page_tokens=4, kv_compute="bfloat16"
    )
    with pytest.raises(kvtier.LayoutError, match="weights_revision"):
        PageTransfer(DevicePool(other, 1), ns)


def test_an_error_of_the_client_is_raised_where_the_caller_waits(daemon, layout):
    pool = DevicePool(layout, 2)
    kv = kvtier.connect(daemon.url, deadline=5)
    ns = kv.namespace(layout)
    with PageTransfer(pool, ns) as made:
        kv.close()
        ids = pool.allocate(2)
        for call in (made.offload, made.load):
            with pytest.raises(kvtier.ClientClosed):
                call(ns.keys(range(8)), ids)
        with pytest.raises(kvtier.ClientClosed):
            made.start_load(ns.keys(range(8)), ids).wait(20)
    assert pool.occupancy.pinned == 0
