"""An older copy of the daemon directory, or of some of its files, beside devices that were written
since: what was deleted or bumped since would be back, and no daemon starts with it. A directory
that is as it was left always starts: test_kind_17_torn kills around what devices note.
"""

from __future__ import annotations

import shutil

import pytest
from fault_rig import GetCode, Pages, refused

from kvtier.cli import main
from kvtier.tiers.nvme_directory import read_identity
from kvtier.tiers.nvme_noted import Noted

HIT, MISS = GetCode.HIT, GetCode.MISS
PAGES = Pages(16 << 10)
OLDER_NAMES = "its file `namespaces` is older than the pages"
OLDER = "the directory, or its checkpoint and journals, is an older copy"


def puts(kv, numbers) -> None:
    PAGES.put(kv.namespace(PAGES.layout), numbers)


def finds(daemon, connect, numbers) -> list[GetCode]:
    with connect(daemon) as kv:
        return PAGES.get(kv.namespace(PAGES.layout), numbers)


def noted(daemon) -> Noted:
    identity = read_identity(daemon.base / "nv")
    assert identity is not None
    return identity.noted


def keep(daemon) -> None:
    """A copy of the daemon directory alone."""
    shutil.copytree(daemon.directory, daemon.base / "kept", ignore=shutil.ignore_patterns("*.sock"))


def put_back(daemon, *names: str) -> None:
    """The copy, or these files of it, in place of what there is now."""
    kept = daemon.base / "kept"
    if names:
        for name in names:
            shutil.copy2(kept / name, daemon.directory / name)
        return
    shutil.rmtree(daemon.directory)
    shutil.copytree(kept, daemon.directory)


def check_refused(daemon, connect, capsys, numbers, said: str) -> None:
    """By the start and by fsck; with `--discard-cache` it goes on, empty."""
    error = refused(daemon)
    assert said in error
    assert "--discard-cache" in error
    assert main(["fsck", str(daemon.directory)]) == 3
    assert said in capsys.readouterr().out
    daemon.start("--discard-cache")
    assert finds(daemon, connect, numbers) == [MISS] * len(numbers)
    daemon.kill()
    daemon.start()


@pytest.mark.parametrize(
    ("taken", "since"), [("while it was down", "bumped"), ("while it ran", "deleted")]
)
def test_a_whole_older_directory_is_refused(make_daemon, connect, capsys, taken, since):
    daemon = make_daemon().start()
    with connect(daemon) as kv:
        puts(kv, range(4))
        if taken == "while it was down":
            assert daemon.stop() == 0
            keep(daemon)
            daemon.start()
            kv = connect(daemon)
        else:
            keep(daemon)
        if since == "deleted":
            kv.namespace(PAGES.layout).delete(PAGES.keys([0, 1]))
        else:
            kv.bump_namespace(PAGES.layout)
        kv.close()
    assert daemon.stop() == 0
    put_back(daemon)
    # Nor without the devices: numbers would rise until nobody saw it any more.
    assert OLDER in refused(make_daemon("nvme.paths="))
    check_refused(daemon, connect, capsys, range(4), OLDER)


def test_older_checkpoint_and_journals_are_refused(make_daemon, connect, capsys):
    """The small files are the newest ones, so nothing else shows it."""
    daemon = make_daemon().start()
    with connect(daemon) as kv:
        puts(kv, range(4))
    assert daemon.stop() == 0
    keep(daemon)
    daemon.start()
    with connect(daemon) as kv:
        kv.namespace(PAGES.layout).delete(PAGES.keys([0, 1]))
    assert daemon.stop() == 0
    for path in daemon.directory.glob("journal*"):
        path.unlink()
    (daemon.directory / "checkpoint.old").unlink()
    names = [path.name for path in (daemon.base / "kept").iterdir()]
    put_back(daemon, *(name for name in names if name.startswith(("journal", "checkpoint"))))
    check_refused(daemon, connect, capsys, range(4), OLDER)


@pytest.mark.parametrize(
    ("between", "end", "what"),
    [
        ("with the tier", "kill", "bumped"),
        ("with the tier", "stop", "deleted"),
        ("without the tier", "kill", "deleted"),
        ("without the tier", "stop", "bumped"),
    ],
)
def test_older_namespaces_are_refused_though_no_page_shows_it(
    make_daemon, connect, capsys, between, end, what
):
    """Nothing was put under the new generation, so no page is of it."""
    daemon = make_daemon()
    other = daemon if between == "with the tier" else make_daemon("nvme.paths=")
    daemon.start()
    with connect(daemon) as kv:
        puts(kv, range(2))
    daemon.kill()
    keep(daemon)
    other.start()
    with connect(other) as kv:
        kv.namespace(PAGES.layout)
        if what == "bumped":
            kv.bump_namespace(PAGES.layout)
        else:
            kv.delete_namespace(PAGES.layout)
    if end == "kill":
        other.kill()
    else:
        assert other.stop() == 0
    put_back(daemon, "namespaces")
    assert OLDER_NAMES in refused(other)
    check_refused(daemon, connect, capsys, range(2), OLDER_NAMES)


def test_older_generations_are_said_by_fsck_and_without_the_tier_too(make_daemon, connect, capsys):
    """A delete of a boot without the tier would cover too little: what it deleted would be back."""
    daemon, without = make_daemon(), make_daemon("nvme.paths=")
    daemon.start()
    assert daemon.stop() == 0
    keep(daemon)
    for _ in range(2):
        with connect(daemon.start()) as kv:
            puts(kv, range(2))
        assert daemon.stop() == 0
    put_back(daemon, "generations")
    said = "its file `generations` is older than the pages"
    assert said in refused(without)
    check_refused(daemon, connect, capsys, range(2), said)


def test_a_start_that_is_refused_changes_nothing_on_devices(make_daemon, connect):
    """Not even where nvme.bytes is less than it was: with the right directory all is there."""
    daemon = make_daemon("nvme.bytes=64MiB")
    less = make_daemon("nvme.bytes=8MiB")
    daemon.start()
    assert daemon.stop() == 0
    keep(daemon)
    with connect(daemon.start()) as kv:
        puts(kv, range(300))
    assert daemon.stop() == 0
    shutil.copytree(daemon.directory, daemon.base / "right")
    segments = sorted(path.name for path in (daemon.base / "nv").glob("segment-*"))
    assert len(segments) > 1
    put_back(daemon)
    assert OLDER in refused(less)
    assert sorted(path.name for path in (daemon.base / "nv").glob("segment-*")) == segments
    shutil.rmtree(daemon.directory)
    (daemon.base / "right").rename(daemon.directory)
    assert finds(daemon.start(), connect, range(300)) == [HIT] * 300


def test_an_older_device_or_one_that_has_noted_nothing_is_no_older_directory(make_daemon, connect):
    """It was away, or is a copy itself: the directory judges what is on it."""
    daemon = make_daemon().start()
    with connect(daemon) as kv:
        puts(kv, range(4))
    daemon.kill()
    nv, copy = daemon.base / "nv", daemon.base / "nv.copy"
    shutil.copytree(nv, copy)
    with connect(daemon.start()) as kv:
        kv.namespace(PAGES.layout).delete(PAGES.keys([0]))
    daemon.kill()
    shutil.rmtree(nv)
    copy.rename(nv)
    nv.chmod(0o700)
    assert finds(daemon.start(), connect, range(4)) == [MISS, HIT, HIT, HIT]


def test_what_devices_note_rises_and_a_full_loss_of_journals_goes_on_above_it(make_daemon, connect):
    """No page of before is trusted then, and the numbers do not begin again below what is noted."""
    daemon = make_daemon().start()
    with connect(daemon) as kv:
        puts(kv, range(2))
    first = noted(daemon)
    assert first.journal == 1
    assert daemon.stop() == 0
    second = noted(daemon)
    assert second.journal > first.journal
    assert second.generation > 0 < second.names
    for path in (*daemon.directory.glob("journal*"), *daemon.directory.glob("checkpoint*")):
        path.unlink()
    daemon.start()
    with connect(daemon) as kv:
        assert PAGES.get(kv.namespace(PAGES.layout), [0, 1]) == [MISS, MISS]
        puts(kv, [0])
    assert noted(daemon).journal > second.journal
    daemon.kill()
    assert finds(daemon.start(), connect, [0, 1]) == [HIT, MISS]


def test_a_device_that_was_away_while_everything_was_given_up_comes_back(make_daemon, connect):
    """What it noted is before the numbers that journals got since: the directory goes on from those
    of before, also where no journal of then is left."""
    daemon = make_daemon("nvme.bytes=8MiB")
    for _ in range(4):
        daemon.start()
        with connect(daemon) as kv:
            puts(kv, range(4))
        assert daemon.stop() == 0
    before = noted(daemon).journal
    without = make_daemon("nvme.paths=", "nvme.bytes=8MiB").start()
    with connect(without) as kv:
        ns = kv.namespace(PAGES.layout)
        for first in range(0, 12_000, 500):
            ns.delete(PAGES.keys(range(first, first + 500)))
        assert any("given up" in warning for warning in kv.status().warnings)
    without.kill()
    assert not list(daemon.directory.glob("journal-*"))
    new = daemon.base / "new"
    other = make_daemon(f"nvme.paths={new}", "nvme.bytes=8MiB").start()
    with connect(other) as kv:
        puts(kv, range(100, 104))
    assert other.stop() == 0
    identity = read_identity(new)
    assert identity is not None
    assert identity.noted.journal > before
    both = make_daemon(f"nvme.paths={new},{daemon.base / 'nv'}", "nvme.bytes=8MiB").start()
    assert finds(both, connect, range(100, 104)) == [HIT] * 4
    assert finds(both, connect, range(4)) == [MISS] * 4
