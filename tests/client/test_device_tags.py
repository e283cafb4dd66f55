"""Tags find a request whose pages are not those that it was given, and no other one."""

from __future__ import annotations

import random

import pytest
import torch

from kvtier.client.device import DevicePool, NoopTracker, PageTable, TagTracker
from kvtier.client.device.tags import verify_on_device
from tests.client.device_rig import DEVICES, table_of


@pytest.fixture(params=DEVICES)
def pool(request, layout):
    return DevicePool(layout, 64, request.param)


def reallocated(pool, tables, victim):
    """A page is freed under a request, and somebody else gets it."""
    page = tables[victim].ids[1]
    pool.free([page])
    assert pool.allocate(1) == [page]


def off_by_one(pool, tables, victim):
    tables[victim].pages[-1] += 1


def off_by_one_at_an_end_of_the_pool(pool, tables, victim):
    ids = list(tables[victim].ids)
    tables[victim].pages[0] = -1 if 0 in ids else pool.pages


def far_outside_of_the_pool(pool, tables, victim):
    tables[victim].pages[0] = 2**31 - 1


def swapped(pool, tables, victim):
    pages = tables[victim].pages
    pages[[0, 1]] = pages[[1, 0]].clone()


def swapped_with_another_request(pool, tables, victim):
    other = tables[(victim + 1) % len(tables)]
    tables[victim].pages[0] = other.pages[0].clone()


def stale_after_a_resume(pool, tables, victim):
    """A preempted request gave its pages back, and goes on with the table of before."""
    ids = list(tables[victim].ids)
    pool.free(ids)
    fresh = pool.allocate(len(ids))
    assert sorted(fresh) == sorted(ids)


def shifted(pool, tables, victim):
    """The first page is left out: every later one is read in the place of its neighbour."""
    pages = tables[victim].pages
    pages[:-1] = pages[1:].clone()


FAULTS = [
    reallocated,
    off_by_one,
    off_by_one_at_an_end_of_the_pool,
    far_outside_of_the_pool,
    swapped,
    swapped_with_another_request,
    stale_after_a_resume,
    shifted,
]


@pytest.mark.parametrize("victim", [0, 2, 4])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found_for_that_request_alone(pool, fault, victim):
    tables = [table_of(pool, pages) for pages in (3, 5, 2, 4, 3)]
    tracker = TagTracker(pool)
    assert tracker.verify(tables).tolist() == [True] * 5
    assert verify_on_device(pool.edged_tags, tables).tolist() == [True] * 5
    fault(pool, tables, victim)
    sound = [number != victim for number in range(5)]
    assert tracker.verify(tables).tolist() == sound
    assert verify_on_device(pool.edged_tags, tables).tolist() == sound
    assert NoopTracker().verify(tables).tolist() == [True] * 5


def test_sound_requests_stay_sound_while_others_come_and_go(pool):
    rng = random.Random(7)
    tracker = TagTracker(pool)
    tables = [table_of(pool, 4) for _ in range(6)]
    for _ in range(100):
        table = rng.choice(tables)
        if len(table) > 6 or (len(table) and rng.random() < 0.3):
            table.truncate(rng.randrange(len(table)))
        else:
            table.append(pool.allocate(1))
        assert tracker.verify(tables).all()
    for table in tables:
        assert table.release() == ()
    assert pool.free_pages == 64


def test_a_shared_prefix_is_sound_for_all_who_have_it(pool):
    first = table_of(pool, 3)
    pool.share(first.ids[:2])
    second = PageTable(pool)
    second.append(first.ids[:2])
    second.append(pool.allocate(1))
    tracker = TagTracker(pool)
    assert tracker.verify([first, second]).tolist() == [True, True]
    first.release()
    assert tracker.verify([second]).tolist() == [True]


def test_empty_tables_and_batches(pool):
    tracker = TagTracker(pool)
    empty, full = PageTable(pool), table_of(pool, 2)
    assert tracker.verify([]).tolist() == []
    assert tracker.verify([empty]).tolist() == [True]
    assert tracker.verify([empty, full, empty]).tolist() == [True, True, True]
    assert verify_on_device(pool.edged_tags, [empty, full, empty]).tolist() == [True] * 3
    full.pages[1] = full.pages[0].clone()
    assert verify_on_device(pool.edged_tags, [empty, full, empty]).tolist() == [True, False, True]
    assert tracker.verify([empty, full, empty]).tolist() == [True, False, True]
    assert NoopTracker().verify([]).tolist() == []


def test_a_verify_changes_no_table(pool):
    table = table_of(pool, 3)
    table.pages[0] = 5000
    before = table.pages.tolist()
    TagTracker(pool).verify([table])
    assert table.pages.tolist() == before
    assert torch.equal(pool.tags.cpu()[list(table.ids)], table.tags.cpu())
