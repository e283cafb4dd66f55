"""Kind 23, WEIGHTS: after a bump no page of the old weights is a hit, in no tier, not after a
restart either, and their room is used again.
"""

from __future__ import annotations

import time

import pytest
from fault_rig import GetCode, Pages, disk_usage, newest, records, tier_of

from kvtier.core.page import PutCode, Tier
from kvtier.errors import NamespaceMismatch

HIT, MISS, STALE = GetCode.HIT, GetCode.MISS, GetCode.STALE
PAGES = Pages(20_000, "weights")
OTHER = Pages(20_000, "other")
SETTINGS = ("nvme.bytes=8MiB", "nvme.checkpoint_s=3600")


@pytest.fixture
def filled(make_daemon, connect):
    """(daemon, namespace, how many pages): each page is on NVMe, a third of them in host memory
    too, and two more are in host memory alone."""
    daemon = make_daemon(*SETTINGS).start()
    kv = connect(daemon)
    count = tier_of(kv).capacity_bytes * 7 // 10 // PAGES.record_bytes
    PAGES.put(kv.namespace(PAGES.layout), range(count))
    OTHER.put(kv.namespace(OTHER.layout), range(5))
    kv.close()
    daemon.kill()
    daemon.start()
    kv = connect(daemon)
    ns = kv.namespace(PAGES.layout)
    assert PAGES.get(ns, range(0, count, 3)) == [HIT] * len(range(0, count, 3))
    PAGES.put(ns, range(count, count + 2), durable=False)
    tiers = [item.tier for item in ns.lookup(PAGES.keys(range(count + 2)))]
    assert tiers == [Tier.HOST if n % 3 == 0 or n >= count else Tier.NVME for n in range(count + 2)]
    return daemon, kv, ns, count


def check_all_gone(kv, ns, count: int) -> None:
    """0 hits from every tier; another namespace is not touched."""
    hits = kv.status().counters
    assert [item.reason for item in ns.lookup(PAGES.keys(range(count + 2)))] == [MISS] * (count + 2)
    assert PAGES.get(ns, range(count + 2)) == [MISS] * (count + 2)
    after = kv.status().counters
    for tier in ("host", "nvme"):
        assert after.get(f"hit_{tier}", 0) == hits.get(f"hit_{tier}", 0)
    assert OTHER.get(kv.namespace(OTHER.layout), range(5)) == [HIT] * 5


def swept(kv, pages: int) -> bool:
    deadline = time.monotonic() + 10
    while tier_of(kv).used_bytes > pages * PAGES.record_bytes:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize("end", ["kill at once", "kill after the sweep", "stop"])
def test_a_bump_in_all_tiers_and_over_a_restart(filled, connect, end):
    daemon, kv, ns, count = filled
    generation = ns.generation
    assert ns.bump() == generation + 1
    if end != "kill at once":
        assert PAGES.get(ns, range(count)) == [STALE] * count
        ns.reopen()
        check_all_gone(kv, ns, count)
        assert swept(kv, 5)
    if end == "stop":
        kv.close()
        assert daemon.stop() == 0
    daemon.kill()
    on_disk = newest(records(daemon.base / "nv"))
    assert len(on_disk) > count, "their bytes are still there"

    daemon.start()
    kv = connect(daemon)
    ns = kv.namespace(PAGES.layout)
    assert ns.generation == generation + 1
    assert tier_of(kv).pages_sealed == 5
    check_all_gone(kv, ns, count)
    # Their room is the new pages' room: nothing has to give way for them.
    PAGES.put(ns, range(count), version=2)
    assert PAGES.get(ns, range(count), version=2) == [HIT] * count
    assert kv.status().counters["evicted_last"] == 0
    assert disk_usage(daemon.directory, daemon.base / "nv") <= 8 << 20
    kv.close()
    daemon.kill()
    daemon.start()
    kv = connect(daemon)
    assert PAGES.get(kv.namespace(PAGES.layout), range(count), version=2) == [HIT] * count


def test_other_weights_are_another_namespace(filled, connect):
    daemon, kv, ns, count = filled
    ns.bump("2")
    daemon.kill()
    daemon.start()
    kv = connect(daemon)
    with pytest.raises(NamespaceMismatch):
        kv.namespace(PAGES.layout)
    assert kv.bump_namespace(PAGES.layout, "1") > 0
    check_all_gone(kv, kv.namespace(PAGES.layout), count)


def test_a_deleted_namespace_does_not_come_back(filled, connect):
    daemon, kv, ns, count = filled
    generation = ns.generation
    assert kv.delete_namespace(PAGES.layout) > count
    kv.close()
    for _ in range(2):
        daemon.kill()
        daemon.start()
        kv = connect(daemon)
        ns = kv.namespace(PAGES.layout)
        assert ns.generation > generation
        check_all_gone(kv, ns, count)
        assert tier_of(kv).pages_sealed == 5
        kv.close()


def test_a_put_that_was_begun_before_the_bump(filled, connect):
    """Its handle is of the old weights: refused, whatever it waits for."""
    _, kv, ns, count = filled
    other = connect(filled[0]).namespace(PAGES.layout)
    other.bump()
    numbers = range(count + 10, count + 20)
    for durable in ("host", "nvme"):
        put = ns.put(PAGES.keys(numbers), [PAGES.page(n) for n in numbers], durable=durable)
        assert set(put.reasons) == {PutCode.STALE_GENERATION}
    ns.reopen()
    assert PAGES.get(ns, numbers) == [MISS] * 10
    assert swept(kv, 5)
