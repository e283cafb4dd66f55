"""A boot without nvme.paths over a directory that has pages on NVMe: what is deleted in it stays
deleted when the tier is back, whatever else happens, and all other pages are back.
"""

from __future__ import annotations

from fault_rig import GetCode, Pages, refused, warnings_of

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


def journals_bytes(daemon) -> int:
    return sum(path.stat().st_size for path in daemon.directory.glob("journal-*"))


def test_deletes_without_the_tier_are_kept_as_long_as_there_is_room(make_daemon, connect):
    """Then the pages are given up, and what was deleted is no more back than all the others; the
    directory does not grow, in this boot or in any later one."""
    kept_bytes = 3 * (64 << 10)  # three journals of a tier of 4 MiB
    with_tier = make_daemon("nvme.bytes=4MiB")
    without = make_daemon("nvme.paths=", "nvme.bytes=4MiB")
    puts(connect(with_tier.start()), range(8))
    assert with_tier.stop() == 0
    for boot in range(2):
        kv = connect(without.start())
        assert "were given up" not in warnings_of(kv)
        for first in range(1000, 9000, 500):
            deletes(kv, range(first, first + 500))
            assert journals_bytes(without) <= kept_bytes
        deletes(kv, [1])
        said = "what was deleted without the tier filled 192KiB of journals: the pages on NVMe were"
        assert (said in warnings_of(kv)) is (boot == 0)
        without.kill()
    assert without.log.count("nvme.pages_given_up") == 1
    assert journals_bytes(without) == 0
    kv = connect(with_tier.start())
    assert finds(kv, range(8)) == [MISS] * 8
    assert "there is no whole checkpoint" in warnings_of(kv)
    puts(kv, [0])
    with_tier.kill()
    assert finds(connect(with_tier.start()), range(8)) == [HIT] + [MISS] * 7


def test_files_that_are_put_back_after_a_boot_without_them_bring_nothing_back(
    make_daemon, connect, base
):
    """Deletes are journalled as long as anything tells of pages, and say which files they go on
    from."""
    with_tier, without = make_daemon(), make_daemon("nvme.paths=")
    puts(connect(with_tier.start()), range(4))
    assert with_tier.stop() == 0
    state, away = base / "state", base / "away"
    away.mkdir()
    for path in state.glob("journal*"):
        path.rename(away / path.name)
    deletes(connect(without.start()), [0])
    without.kill()
    for path in away.iterdir():
        if path.name != "journals":  # the newest one is that of now
            path.rename(state / path.name)
    assert finds(connect(with_tier.start()), range(4)) == [MISS, HIT, HIT, HIT]


def test_a_missing_geometry_stops_a_start_without_the_tier_too(make_daemon, connect, base):
    """What it deletes could not be said to whoever finds the file again."""
    with_tier, without = make_daemon(), make_daemon("nvme.paths=")
    puts(connect(with_tier.start()), range(4))
    with_tier.kill()
    (base / "state" / "geometry").rename(base / "geometry")
    said = refused(without)
    assert "geometry is missing although" in said
    (base / "geometry").rename(base / "state" / "geometry")
    deletes(connect(without.start()), [0])
    without.kill()
    assert finds(connect(with_tier.start()), range(4)) == [MISS, HIT, HIT, HIT]
