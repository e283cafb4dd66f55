"""Files and directories of the NVMe tier that are not where they were: a device is known by what is
in its directory, and whatever does not fit together is named; no start serves wrong pages.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from fault_rig import GetCode, Pages, newest, records, refused, tier_of, warnings_of

from kvtier.cli import main

HIT, MISS = GetCode.HIT, GetCode.MISS
PAGES = Pages(60 << 10)
#: More than a segment, so that both devices have some.
NUMBERS = range(60)


@pytest.fixture
def a(base) -> Path:
    return base / "a"


@pytest.fixture
def b(base) -> Path:
    return base / "b"


@pytest.fixture
def over(make_daemon) -> Callable[..., object]:
    """A daemon over these directories; the next one over others has the same state."""

    def make(*paths: Path):
        named = ",".join(str(path) for path in paths)
        return make_daemon(f"nvme.paths={named}", "nvme.bytes=64MiB")

    return make


@pytest.fixture
def on_a(over, connect, a, b) -> list[bool]:
    """The pages are on `a` and `b`, and no daemon runs; which are on `a`."""
    daemon = over(a, b).start()
    with connect(daemon) as kv:
        PAGES.put(kv.namespace(PAGES.layout), NUMBERS)
    daemon.kill()
    there = {record.header.key for record in newest(records(a)).values()}
    found = [PAGES.key(number) in there for number in NUMBERS]
    assert 0 < sum(found) < len(NUMBERS)
    return found


def finds(daemon, connect) -> tuple[list[bool], str]:
    """(which pages are hits, all of their bytes right; the warnings)"""
    with connect(daemon.start()) as kv:
        found = PAGES.get(kv.namespace(PAGES.layout), NUMBERS)
        warnings = warnings_of(kv)
    assert set(found) <= {HIT, MISS}
    daemon.kill()
    return [code is HIT for code in found], warnings


ALL = [True] * len(NUMBERS)


def test_paths_in_another_order_or_swapped_or_renamed(over, connect, on_a, a, b, base):
    """Each is one more boot over the same devices; all of them have all pages, and nothing to
    warn of."""
    assert finds(over(b, a), connect) == (ALL, "")

    a.rename(base / "other")
    b.rename(a)
    (base / "other").rename(b)
    assert finds(over(a, b), connect) == (ALL, ""), "swapped"

    a.rename(base / "new")
    assert finds(over(base / "new", b), connect) == (ALL, ""), "renamed"
    b.rename(a)
    assert finds(over(a, base / "new"), connect) == (ALL, ""), "renamed to a name of before"


def test_a_path_that_is_not_mounted_is_named_and_the_others_serve(over, connect, on_a, a, b, base):
    """Its directory is there, and empty. What it has comes back with it, as far as it is true."""
    b.rename(base / "unmounted")
    b.mkdir(mode=0o700)
    daemon = over(a, b)
    with connect(daemon.start()) as kv:
        ns = kv.namespace(PAGES.layout)
        assert [code is HIT for code in PAGES.get(ns, NUMBERS)] == on_a
        assert f"nvme: {b} is not used: " in warnings_of(kv)
        assert "not mounted" in warnings_of(kv)
        online = {device.path: device.is_online for device in kv.status().devices}
        assert online == {str(a): True, str(b): False}
        assert list(b.iterdir()) == [], "nothing is written below a mount point"
        gone, again = on_a.index(False), len(NUMBERS) - 1 - on_a[::-1].index(False)
        ns.delete(PAGES.keys([gone]))
        PAGES.put(ns, [again], version=2)
    daemon.kill()

    b.rmdir()
    (base / "unmounted").rename(b)
    with connect(over(a, b).start()) as kv:
        assert warnings_of(kv) == ""
        ns = kv.namespace(PAGES.layout)
        assert PAGES.get(ns, [gone]) == [MISS]
        assert PAGES.get(ns, [again], version=2) == [HIT]
        # The others are back unless a checkpoint has been written without them: right, or a miss.
        left = [number for number in NUMBERS if number not in (gone, again)]
        found = PAGES.get(ns, left)
        expected = [number for number in left if on_a[number]]
        hits = [number for number, code in zip(left, found, strict=True) if code is HIT]
        assert set(expected) <= set(hits)


def test_no_path_mounted_stops_the_start(over, on_a, a, b, base):
    for path in (a, b):
        path.rename(base / f"{path.name}.unmounted")
        path.mkdir(mode=0o700)
    said = refused(over(a, b))
    assert "no path of nvme.paths can be used" in said
    assert "--discard-cache" in said


def copy_of(device: Path) -> Path:
    copy = device.with_name(f"{device.name}.copy")
    shutil.copytree(device, copy)
    copy.chmod(0o700)
    return copy


@pytest.mark.parametrize("order", ["copy last", "copy first"])
def test_a_copy_beside_its_device_stops_the_start_by_name(over, on_a, a, b, order):
    copy = copy_of(a)
    paths: Sequence[Path] = (a, b, copy) if order == "copy last" else (copy, a, b)
    said = refused(over(*paths))
    second = paths[-1] if order == "copy last" else a
    assert f"error: {second} is device 0 of this daemon directory, not " in said


def test_an_old_copy_in_place_of_its_device_brings_no_old_page_back(
    over, connect, on_a, a, b, base
):
    """A backup that was put back: what is no longer true in it is a miss."""
    copy = copy_of(a)
    on_both = [n for n in NUMBERS if on_a[n]]
    deleted, rewritten = on_both[:2], on_both[2:4]
    daemon = over(a, b)
    with connect(daemon.start()) as kv:
        ns = kv.namespace(PAGES.layout)
        ns.delete(PAGES.keys([*deleted, *rewritten]))
        PAGES.put(ns, rewritten, version=2)
    daemon.kill()
    a.rename(base / "gone")
    copy.rename(a)
    with connect(over(a, b).start()) as kv:
        ns = kv.namespace(PAGES.layout)
        assert PAGES.get(ns, deleted) == [MISS, MISS]
        PAGES.get(ns, rewritten, version=2)  # fails if a hit has bytes of before
        untouched = [n for n in NUMBERS if n not in (*deleted, *rewritten)]
        assert PAGES.get(ns, untouched).count(HIT) >= len(untouched) - 2


def test_a_geometry_that_is_missing_stops_the_start_by_name(make_daemon, connect, base, capsys):
    daemon = make_daemon().start()
    with connect(daemon) as kv:
        PAGES.put(kv.namespace(PAGES.layout), [1])
    daemon.kill()
    (base / "state" / "geometry").unlink()
    said = refused(daemon)
    assert "geometry is missing although" in said
    assert "--discard-cache" in said
    assert main(["fsck", str(base / "state")]) == 3
    assert "geometry is missing although" in capsys.readouterr().out
    with connect(daemon.start("--discard-cache")) as kv:
        assert PAGES.get(kv.namespace(PAGES.layout), [1]) == [MISS]


@pytest.mark.parametrize("what", ["bumped", "made", "deleted and made"])
def test_namespaces_older_than_the_pages_stop_the_start_by_name(
    make_daemon, connect, base, capsys, what
):
    """What was bumped since would be back, and the next bump would give its generation again."""
    daemon = make_daemon().start()
    file = base / "state" / "namespaces"
    with connect(daemon) as kv:
        if what != "made":
            ns = kv.namespace(PAGES.layout)
            PAGES.put(ns, [1, 2])
        saved = file.read_bytes()
        if what == "bumped":
            ns.bump()
        elif what == "deleted and made":
            kv.delete_namespace(PAGES.layout)
        PAGES.put(kv.namespace(PAGES.layout), [3])
    daemon.kill()
    newer = file.read_bytes()
    assert newer != saved
    file.write_bytes(saved)

    said = refused(daemon)
    assert "its file `namespaces` is older than the pages" in said
    assert "--discard-cache" in said
    assert "Do not put an older copy in its place" in said
    assert main(["fsck", str(base / "state")]) == 3
    assert "its file `namespaces` is older than the pages" in capsys.readouterr().out

    file.write_bytes(newer)
    with connect(daemon.start()) as kv:
        assert PAGES.get(kv.namespace(PAGES.layout), [1, 2, 3]) == [MISS, MISS, HIT]
    daemon.kill()
    file.write_bytes(saved)
    with connect(daemon.start("--discard-cache")) as kv:
        assert PAGES.get(kv.namespace(PAGES.layout), [1, 2, 3]) == [MISS, MISS, MISS]


def test_generations_older_than_the_pages_stop_the_start_by_name(make_daemon, connect, base):
    """Numbers would be given again, and an old record could pass for a new one."""
    daemon = make_daemon().start()
    saved = (base / "state" / "generations").read_bytes()
    daemon.kill()
    with connect(daemon.start()) as kv:
        PAGES.put(kv.namespace(PAGES.layout), [1, 2])
    daemon.kill()
    newer = (base / "state" / "generations").read_bytes()
    assert newer != saved
    (base / "state" / "generations").write_bytes(saved)

    said = refused(daemon)
    assert "its file `generations` is older than the pages" in said
    assert "remedy: Put the file back as it was last, or start once with `kvtier serve" in said
    assert "--discard-cache` (every cached page is then a miss)" in said

    (base / "state" / "generations").write_bytes(newer)
    with connect(daemon.start()) as kv:
        assert PAGES.get(kv.namespace(PAGES.layout), [1, 2]) == [HIT, HIT]
    daemon.kill()
    (base / "state" / "generations").write_bytes(saved)
    with connect(daemon.start("--discard-cache")) as kv:
        assert tier_of(kv).used_bytes == 0
        assert PAGES.get(kv.namespace(PAGES.layout), [1, 2]) == [MISS, MISS]
