"""A boot without nvme.paths over a directory that has pages on NVMe: what is deleted in it stays
deleted when the tier is back, whatever else happens, and all other pages are back.
"""

from __future__ import annotations

import pytest
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


def end(daemon, how: str) -> None:
    if how == "SIGKILL":
        daemon.kill()
    else:
        assert daemon.stop() == 0


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM"])
def test_a_delete_without_the_tier_holds(make_daemon, connect, how):
    with_tier, without = make_daemon(), make_daemon("nvme.paths=")
    kv = connect(with_tier.start())
    puts(kv, range(8))
    assert NOT_SERVED not in warnings_of(kv)
    end(with_tier, how)

    # Twice, for what the first boot of this kind leaves must not be lost to the second.
    for at in (0, 1):
        kv = connect(without.start())
        assert NOT_SERVED in warnings_of(kv)
        assert finds(kv, range(8)) == [MISS] * 8
        deletes(kv, [at, at + 4])
        end(without, how)

    kv = connect(with_tier.start())
    assert NOT_SERVED not in warnings_of(kv)
    assert finds(kv, range(8)) == [MISS, MISS, HIT, HIT] * 2
    end(with_tier, "SIGTERM")
    assert finds(connect(with_tier.start()), range(8)) == [MISS, MISS, HIT, HIT] * 2


def test_what_is_put_after_the_delete_is_another_page(make_daemon, connect):
    """In host memory alone: it ends with that boot, and the one on NVMe is not what comes back."""
    with_tier, without = make_daemon(), make_daemon("nvme.paths=")
    puts(connect(with_tier.start()), [1, 2])
    with_tier.kill()

    kv = connect(without.start())
    deletes(kv, [1])
    PAGES.put(kv.namespace(PAGES.layout), [1], durable=False, version=2)
    assert PAGES.get(kv.namespace(PAGES.layout), [1], version=2) == [HIT]
    without.kill()

    kv = connect(with_tier.start())
    assert finds(kv, [1, 2]) == [MISS, HIT]
    PAGES.put(kv.namespace(PAGES.layout), [1], version=3)
    with_tier.kill()
    assert PAGES.get(connect(with_tier.start()).namespace(PAGES.layout), [1], version=3) == [HIT]


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
