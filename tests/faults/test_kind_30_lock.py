"""Kind 30, LOCK: what touches all pages of a tier holds the store's lock for a part of them at a
time, so that lookups are answered meanwhile; nothing leaves the lock taken.

Bounds on time are generous: what is exact is how much is done in one holding of the lock. The
times of a run are in its report (`record_property`).
"""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from kvtier.core import store as store_module
from kvtier.core.generations import Generations
from kvtier.core.handles import Filling
from kvtier.core.page import NO_SUM, Codec, GetCode, PageMeta, PutCode, Tier
from kvtier.core.slabs import SlabAllocator
from kvtier.core.snapshots import Copies
from kvtier.core.store import Store
from kvtier.core.store_config import StoreConfig
from kvtier.daemon.durability import DirectoryFiles, Durability
from tests.faults.kinds_rig import key_of, until

PAGES = 100_000
RECORD = 8192
SEGMENTS = 4
SEGMENT_BYTES = PAGES // SEGMENTS * RECORD
OTHER, BIG = 1, 2  # namespace numbers: one that is looked into, one that has all the pages
ASKED = 1000
#: A lookup of a thousand keys on a loaded machine; without slices it is seconds.
ANSWER_S = 1.0


class TimedLock:
    """A lock that knows for how long, and how often, it was held."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since = 0.0
        self.clear()

    def clear(self) -> None:
        self.count, self.longest_s = 0, 0.0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._since = time.monotonic()

    def __exit__(self, *exc: object) -> None:
        self.count += 1
        self.longest_s = max(self.longest_s, time.monotonic() - self._since)
        self._lock.release()

    def locked(self) -> bool:
        return self._lock.locked()


def copies(keys):
    """100,000 pages on NVMe, in chains of 64."""
    at = np.arange(PAGES)
    return Copies(
        namespace=np.full(PAGES, BIG, np.uint32),
        shard=np.zeros(PAGES, np.uint16),
        key=keys,
        generation=at.astype(np.uint64) + 1,
        slot=at.astype(np.uint64) * np.uint64(RECORD // 4096),
        length=np.full(PAGES, 4096, np.uint64),
        codec=np.full(PAGES, Codec.RAW, np.uint8),
        lossy=np.zeros(PAGES, np.uint8),
        parent=np.where(at % 64, at - 1, -1).astype(np.int32),
    )


@pytest.fixture(scope="module")
def keys():
    return np.random.default_rng(30).integers(0, 256, (PAGES, 32), np.uint8)


@pytest.fixture
def timed(monkeypatch):
    """The lock of every store that is made from now on."""
    made: list[TimedLock] = []

    def new():
        made.append(TimedLock())
        return made[-1]

    monkeypatch.setattr(store_module, "threading", SimpleNamespace(Lock=new))
    return made


@pytest.fixture
def store(timed, keys):
    made = Store(
        StoreConfig(boot_id=7, pages_max=PAGES + 1000, seed=1),
        tiers={
            Tier.HOST: SlabAllocator(slab_bytes=1 << 20, numbers=range(1)),
            Tier.NVME: SlabAllocator(slab_bytes=SEGMENT_BYTES, numbers=range(SEGMENTS)),
        },
        generations=Generations(1 << 30, lambda bound: None),
    )
    made.open_namespace(OTHER, 1)
    made.open_namespace(BIG, 1)
    made.room.grant(Tier.HOST, 0)
    for slab in range(SEGMENTS):
        made.room.grant(Tier.NVME, slab)
    loaded = made.snapshots.load(Tier.NVME, dict.fromkeys(range(SEGMENTS), RECORD), copies(keys))
    assert loaded == PAGES
    timed[0].clear()
    return made


class _Lookups:
    """Asks for a thousand keys again and again on a thread of its own."""

    def __init__(self, store, namespace, keys) -> None:
        self.slowest_s, self.count = 0.0, 0
        self._call = lambda: store.lookup(namespace, 0, keys[:: PAGES // ASKED])
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._ended.is_set():
            began = time.monotonic()
            self._call()
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            self.count += 1

    def __enter__(self) -> _Lookups:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()


def test_lookups_go_on_while_a_namespace_of_100_000_pages_ends(store, timed, keys, record_property):
    store.end_namespace(BIG)
    codes, _ = store.lookup(BIG, 0, keys[:10])
    assert codes.tolist() == [GetCode.STALE] * 10, "at once, before any page is touched"
    timed[0].clear()
    with _Lookups(store, OTHER, keys) as lookups:
        for _ in range(100):
            assert store.sweep(256) == 256, "so many in one holding"
            time.sleep(0)  # the daemon gives others a turn here, too
    assert store.status()[Tier.NVME].sealed == PAGES - 100 * 256
    assert lookups.count > 3
    assert lookups.slowest_s < ANSWER_S
    record_property("lookup_slowest_s", lookups.slowest_s)
    record_property("lock_longest_s", timed[0].longest_s)


def test_lookups_go_on_while_a_checkpoint_of_100_000_pages_is_taken(
    store, timed, keys, record_property, tmp_path
):
    """The store is copied as columns in one holding; what takes long is done without the lock, and
    off the event loop."""
    turns: list[float] = []

    async def beat(ended):
        while not ended.is_set():
            began = time.monotonic()
            await asyncio.sleep(0)
            turns.append(time.monotonic() - began)
            await asyncio.sleep(0.005)

    async def main():
        durability = Durability(
            DirectoryFiles(tmp_path, b"0123456789abcdef"),
            store,
            name_of=lambda number: (bytes([number]) * 32, 1),
            segment_bytes=SEGMENT_BYTES,
            journal_bytes_max=1 << 20,
        )
        await durability.begin(1, has_base=False)
        ended = asyncio.Event()
        beating = asyncio.create_task(beat(ended))
        timed[0].clear()
        with _Lookups(store, BIG, keys) as lookups:
            await durability.checkpoint()
        ended.set()
        await beating
        await durability.close()
        return durability, lookups

    durability, lookups = asyncio.run(main())
    assert durability.checkpoint_bytes > 40 * PAGES
    assert lookups.count > 3
    assert lookups.slowest_s < ANSWER_S
    assert max(turns) < ANSWER_S
    assert timed[0].longest_s < ANSWER_S / 2
    record_property("lookup_slowest_s", lookups.slowest_s)
    record_property("lock_longest_s", timed[0].longest_s)
    record_property("loop_longest_s", max(turns))


def test_lookups_go_on_while_a_device_with_100_000_pages_goes(store, timed, keys, record_property):
    """Nothing is stored there from the first moment on; its pages go a part at a time."""
    timed[0].clear()
    with _Lookups(store, OTHER, keys) as lookups:
        lost = store.room.close(Tier.NVME, list(range(SEGMENTS)))
        assert len(lost) == PAGES
        assert not store.room.has_free(Tier.NVME, RECORD)
        for _ in range(100):
            assert store.room.clear(lost, 256) == 256, "so many in one holding"
    assert store.status()[Tier.NVME].sealed == PAGES - 100 * 256
    codes, _ = store.lookup(BIG, 0, keys[: 100 * 256 : 100])
    assert not (codes == GetCode.HIT).any()
    store.survey.check()
    assert lookups.count > 3
    assert lookups.slowest_s < ANSWER_S
    record_property("lookup_slowest_s", lookups.slowest_s)
    record_property("lock_longest_s", timed[0].longest_s)


def test_a_session_with_leases_on_100_000_pages_ends_in_one_short_step(
    store, timed, keys, record_property
):
    lease, codes = store.pins.pin(5, BIG, 0, keys, deadline=1e9)
    assert lease
    assert (codes == GetCode.HIT).all()
    timed[0].clear()
    assert store.pins.end_session(5) == 1
    record_property("lock_longest_s", timed[0].longest_s)
    assert timed[0].longest_s < ANSWER_S
    assert store.status()[Tier.NVME].pinned == 0


# -- an exception inside --------------------------------------------------------------------------


def refuse(*_args):
    raise OSError("in the middle of an edit")


@pytest.mark.parametrize(
    ("where", "call"),
    [
        ("_index.find_many", lambda s, k: s.lookup(BIG, 0, k)),
        ("_index.find_many", lambda s, k: s.acquire(BIG, 0, k)),
        ("_index.find_many", lambda s, k: s.pins.pin(1, BIG, 0, k, deadline=9.0)),
        ("_index.find", lambda s, k: s.delete(BIG, 0, k)),
        ("_residents.begin_many", lambda s, k: reserve(s)),
        ("_residents.ledger.counts", lambda s, k: s.status()),
        ("_residents.retire_many", lambda s, k: s.room.withdraw(Tier.NVME, 0)),
        ("_generations.next", lambda s, k: reserve(s)),
    ],
)
def test_an_exception_in_the_lock_leaves_it_free(store, timed, keys, monkeypatch, where, call):
    """The next call of every kind returns."""
    *path, name = where.split(".")
    owner = store
    for step in path:
        owner = getattr(owner, step)
    monkeypatch.setattr(type(owner), name, refuse)
    with pytest.raises(OSError, match="in the middle"):
        call(store, keys[:5])
    monkeypatch.undo()
    assert not timed[0].locked()
    codes, _ = store.lookup(OTHER, 0, keys[:5])
    assert codes.tolist() == [GetCode.MISS] * 5
    filling = reserve(store)
    assert isinstance(filling, Filling)
    assert filling.seal() is PutCode.STORED
    assert store.status()[Tier.HOST].sealed == 1


def reserve(store):
    meta = PageMeta(key=key_of("new"), length=4096, codec=Codec.RAW, payload_sum=NO_SUM)
    return store.reserve(OTHER, 0, meta, RECORD)


def test_a_lookup_of_50_000_keys_lets_others_in_between(store, timed, keys, record_property):
    """Of two who ask at once, neither waits for more than one call of the other."""
    with _Lookups(store, OTHER, keys) as lookups:
        for _ in range(3):
            codes, _ = store.lookup(BIG, 0, keys[:50_000])
            assert (codes == GetCode.HIT).all()
    assert lookups.slowest_s < ANSWER_S
    record_property("lookup_slowest_s", lookups.slowest_s)


def test_the_timed_lock_sees_a_holding():
    lock = TimedLock()

    async def main():
        with lock:
            assert lock.locked()
        await until(lambda: lock.count == 1)

    asyncio.run(main())
    assert not lock.locked()
