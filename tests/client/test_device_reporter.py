"""A pool tells the daemon how full it is, and `kvtier status` shows it among the other tiers."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

import kvtier
from kvtier.cli import main
from kvtier.client.device import DevicePool, PoolNameTaken, PoolReporter


def until(what, seconds=20.0):
    """The first answer of `what` that is not empty."""
    limit = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < limit
        time.sleep(0.02)
    return found


@pytest.fixture
def engine(process):
    with kvtier.connect(process.url, deadline=20, client_name="engine 7") as connection:
        yield connection


def test_a_pool_is_in_status_while_it_is_told_of(process, engine, layout, capsys):
    pool = DevicePool(layout, 8, name="kv pool")
    ids = pool.allocate(3)
    pool.pin(ids[:1])
    ns = engine.namespace(layout)
    with PoolReporter(engine, pool, fingerprint=ns.fingerprint):
        (told,) = until(lambda: engine.status().pools)
        assert told.client_name == "engine 7"
        report = told.pool
        assert (report.name, report.device) == ("kv pool", "cpu")
        assert report.fingerprint == ns.fingerprint
        assert (report.pages, report.held, report.draining, report.pinned) == (8, 3, 0, 1)
        assert report.page_bytes == layout.raw_bytes
        assert main(["status", "--url", process.url]) == 0
        shown = capsys.readouterr().out
        assert "kv pool" in shown
        assert "engine 7" in shown
        pool.free(ids)
        until(lambda: engine.status().pools[0].pool.draining == 1)
        assert engine.status().pools[0].pool.held == 0
        pool.unpin(ids[:1])
    assert engine.status().pools == ()


def test_it_is_told_at_most_once_a_second(engine, layout, monkeypatch):
    pool = DevicePool(layout, 8)
    engine.namespace(layout)
    times = []
    send = engine.report_pool

    def counted(report, **options):
        times.append(time.monotonic())
        send(report, **options)

    monkeypatch.setattr(engine, "report_pool", counted)
    with PoolReporter(engine, pool, every=0.01):
        until(lambda: len(times) >= 3 or flicker(pool))
    # The last one takes the pool back, which does not wait.
    gaps = [after - before for before, after in pairwise(times[:3])]
    assert min(gaps) >= 0.95


def flicker(pool):
    """Changes how many pages are held; None."""
    if pool.occupancy.held < 7:
        pool.allocate(1)
    else:
        pool.free([page for page in range(8) if pool.references(page)][:1])


def test_an_absent_daemon_hinders_nothing(tmp_path, layout):
    pool = DevicePool(layout, 2)
    with kvtier.connect(f"unix://{tmp_path}/none.sock", deadline=0.2) as connection:
        connection.namespace(layout)
        began = time.monotonic()
        with PoolReporter(connection, pool):
            pool.allocate(2)
        assert time.monotonic() - began < 10


def test_pools_without_a_name_do_not_hide_each_other(engine, layout):
    pools = [DevicePool(layout, pages) for pages in (3, 5)]
    engine.namespace(layout)
    with PoolReporter(engine, pools[0]), PoolReporter(engine, pools[1]):
        until(lambda: len(engine.status().pools) == 2)
        told = {one.pool.name: one.pool.pages for one in engine.status().pools}
    assert told == {pools[0].name: 3, pools[1].name: 5}


def test_a_name_that_another_pool_has_is_refused(process, engine, layout):
    pools = [DevicePool(layout, pages, name="mine") for pages in (3, 5)]
    engine.namespace(layout)
    with PoolReporter(engine, pools[0]) as first:
        for pool in pools:  # also the same one: the first that closes would take it back
            with pytest.raises(PoolNameTaken, match="'mine'"):
                PoolReporter(engine, pool)
        # Another connection is another engine.
        with kvtier.connect(process.url, deadline=20) as other:
            other.namespace(layout)
            with PoolReporter(other, pools[1]):
                until(lambda: len(engine.status().pools) == 2)
        first.close()
        with PoolReporter(engine, pools[1]) as second:
            first.close()  # a second time: the name is another's by now
            with pytest.raises(PoolNameTaken):
                PoolReporter(engine, pools[0])
            assert second.report().pages == 5
