"""A boot without nvme.paths over a directory that has pages on NVMe: what is deleted in it stays
deleted when the tier is back, whatever else happens, and all other pages are back.
"""

from __future__ import annotations

from fault_rig import GetCode, Pages, warnings_of

HIT, MISS = GetCode.HIT, GetCode.MISS
PAGES = Pages(16 << 10)
NOT_SERVED = "nvme.paths is empty, and there are pages on NVMe"


def puts(kv, numbers) -> None:
    PAGES.put(kv.namespace(PAGES.layout), numbers)


def deletes(kv, numbers) -> None:
    kv.namespace(PAGES.layout).delete(PAGES.keys(numbers))


def finds(kv, numbers) -> list[GetCode]:
    return PAGES.get(kv.namespace(PAGES.layout), numbers)


def test_a_delete_without_the_tier_holds(make_daemon, connect):
    with_tier, without = make_daemon(), make_daemon("nvme.paths=")
    kv = connect(with_tier.start())
    puts(kv, range(8))
    assert NOT_SERVED not in warnings_of(kv)
    with_tier.kill()

    # Twice, for what the first boot of this kind leaves must not be lost to the second.
    kv = connect(without.start())
    assert NOT_SERVED in warnings_of(kv)
    assert finds(kv, range(8)) == [MISS] * 8
    deletes(kv, [0, 4])
    without.kill()
    kv = connect(without.start())
    deletes(kv, [1, 5])
    # Put anew, in host memory alone: it ends with this boot, and no older one takes its place.
    PAGES.put(kv.namespace(PAGES.layout), [5], durable=False, version=2)
    assert without.stop() == 0

    kv = connect(with_tier.start())
    assert NOT_SERVED not in warnings_of(kv)
    assert finds(kv, range(8)) == [MISS, MISS, HIT, HIT] * 2
    assert with_tier.stop() == 0
    assert finds(connect(with_tier.start()), range(8)) == [MISS, MISS, HIT, HIT] * 2


def test_a_bump_without_the_tier_holds(make_daemon, connect):
    with_tier, without = make_daemon(), make_daemon("nvme.paths=")
    puts(connect(with_tier.start()), range(4))
    with_tier.kill()

    kv = connect(without.start())
    kv.namespace(PAGES.layout)
    kv.bump_namespace(PAGES.layout)
    without.kill()
    assert finds(connect(with_tier.start()), range(4)) == [MISS] * 4


def test_a_directory_that_never_had_the_tier_has_nothing_to_warn_of(make_daemon, connect):
    kv = connect(make_daemon("nvme.paths=").start())
    deletes(kv, [1])
    assert NOT_SERVED not in warnings_of(kv)
