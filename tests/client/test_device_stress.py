"""An engine that frees pages as early as it may, with copies that take their time: what comes back
is always what was stored, and no page has two owners.
"""

from __future__ import annotations

import random
import threading

import pytest

import kvtier
from kvtier.client.device import DevicePool, PageTable, PageTransfer, PoolExhausted, TagTracker
from kvtier.testing.held_stream import HeldStream

PAGES, KEYS = 24, 40


class Engine:
    """Numbers of a page are those of its key; a free page is filled with something else at once."""

    def __init__(self, transfer: PageTransfer, seed: int) -> None:
        self.transfer = transfer
        self.pool = transfer.pool
        self.tracker = TagTracker(self.pool)
        self.random = random.Random(seed)
        self.keys = transfer.namespace.keys(range(4 * KEYS))
        self.offloads = []
        self.loads = []
        self.stored: set[int] = set()
        self.hits = self.deferred = 0

    def allocated(self, count: int) -> PageTable | None:
        table = PageTable(self.pool)
        try:
            table.append(self.pool.allocate(count))
        except PoolExhausted:
            return None
        # Nobody reads or writes these: what is done here must be seen by nobody else.
        self.pool.kv[list(table.ids)] = -1.0
        return table

    def offload(self) -> None:
        first = self.random.randrange(KEYS - 4)
        names = range(first, first + self.random.randint(1, 4))
        table = self.allocated(len(names))
        if table is None:
            return
        for page, name in zip(table.ids, names, strict=True):
            self.pool.kv[page] = name
        keys = self.keys[names.start : names.stop]
        self.offloads.append((names, self.transfer.start_offload(keys, table.ids)))
        table.release()  # while it is read
        self.deferred += self.pool.occupancy.draining > 0

    def load(self) -> None:
        first = self.random.randrange(KEYS - 4)
        names = range(first, first + self.random.randint(1, 4))
        table = self.allocated(len(names))
        if table is None:
            return
        keys = self.keys[names.start : names.stop]
        transfer = self.transfer.start_load(keys, table.ids)
        if self.random.random() < 0.2:
            table.release()  # nobody wants it any more
            table = None
        self.loads.append((names, table, transfer))

    def look(self) -> None:
        """What has ended meanwhile is checked."""
        for entry in [entry for entry in self.offloads if entry[1].is_done]:
            self.offloads.remove(entry)
            names, transfer = entry
            assert transfer.poll().stored == len(names)
            self.stored.update(names)
        for entry in [entry for entry in self.loads if entry[2].is_done]:
            self.loads.remove(entry)
            names, table, transfer = entry
            got = transfer.poll()
            assert set(got.reasons) <= {kvtier.GetCode.HIT, kvtier.GetCode.MISS}
            if table is None:
                continue
            assert self.tracker.verify([table]).all()
            for page, name, reason in zip(table.ids, names, got.reasons, strict=True):
                expected = name if reason is kvtier.GetCode.HIT else -1.0
                assert (self.pool.kv[page] == expected).all(), f"page {page} is not key {name}"
                self.hits += reason is kvtier.GetCode.HIT
            assert table.release() == ()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_pages_are_whole_whatever_the_order(ns, seed):
    stream = HeldStream()
    pool = DevicePool(ns.layout, PAGES)
    staging = 2 * 2 * ns.layout.raw_bytes
    stopped = threading.Event()

    def device():
        pace = random.Random(seed)
        while not stopped.wait(pace.random() * 0.002):
            if stream.held:
                stream.release_one()

    thread = threading.Thread(target=device)
    with PageTransfer(pool, ns, stream=stream, deadline=50, staging_bytes_max=staging) as transfer:
        engine = Engine(transfer, seed)
        thread.start()
        try:
            for _ in range(2000):
                engine.random.choice((engine.offload, engine.load))()
                engine.look()
                pool.check()
            for _, transfer_left in engine.offloads:
                transfer_left.wait(50)
            for *_, transfer_left in engine.loads:
                transfer_left.wait(50)
            engine.look()
        finally:
            stopped.set()
            thread.join()
            stream.let_go()
    assert (engine.offloads, engine.loads) == ([], [])
    assert pool.free_pages == PAGES
    assert engine.deferred > 0
    assert engine.hits > 0
