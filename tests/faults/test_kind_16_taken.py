"""Kind 16, DISKFULL, files of the daemon directory taken away under a running daemon: nothing is
acknowledged as durable that a later start does not find, and what can be made good is made good.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_rig import GetCode, Pages, warnings_of

from kvtier.errors import DirectoryError

HIT, MISS = GetCode.HIT, GetCode.MISS
PAGES = Pages(5_000)
BEFORE, MORE, GONE = range(40), range(100, 120), range(5)
SETTINGS = ("nvme.bytes=32MiB", "nvme.checkpoint_s=3600")


def newest_journal(directory: Path) -> Path:
    return max(directory.glob("journal-*"))


def remove(*names: str) -> Callable[[Path], None]:
    def hurt(base: Path) -> None:
        for name in names:
            (base / name).unlink()

    return hurt


def garble(base: Path) -> None:
    for name in ("namespaces", "generations"):
        (base / "state" / name).write_bytes(b"something else")


# Each: what somebody does, and a text of the log that tells of the repair.
REPAIRED = {
    "journal": (lambda base: newest_journal(base / "state").unlink(), "nvme.state_rebuilt"),
    "journal-cut": (
        lambda base: os.truncate(newest_journal(base / "state"), 0),
        "nvme.state_rebuilt",
    ),
    "checkpoint": (remove("state/checkpoint"), "nvme.state_rebuilt"),
    "registry": (remove("state/namespaces", "state/generations"), "daemon.state_restored"),
    "garbled": (garble, "daemon.state_restored"),
    "format": (remove("state/format"), "daemon.state_restored"),
    "geometry": (remove("state/geometry"), "daemon.state_restored"),
}


@pytest.mark.parametrize("case", REPAIRED)
def test_what_was_taken_is_written_anew_before_anything_is_durable(make_daemon, connect, case):
    daemon = make_daemon(*SETTINGS).start()
    ns = connect(daemon).namespace(PAGES.layout)
    PAGES.put(ns, BEFORE)
    hurt, told = REPAIRED[case]
    hurt(daemon.base)
    PAGES.put(ns, MORE)  # all of them durable, or this fails
    assert ns.delete(PAGES.keys(GONE)).deleted == len(GONE)
    daemon.kill()
    assert told in daemon.log
    daemon.start()
    ns = connect(daemon).namespace(PAGES.layout)
    left = [n for n in BEFORE if n not in GONE]
    assert PAGES.get(ns, [*left, *MORE]) == [HIT] * (len(left) + len(MORE))
    assert PAGES.get(ns, GONE) == [MISS] * len(GONE)
    assert warnings_of(connect(daemon)) == ""


def test_a_bump_is_answered_when_a_start_can_find_it(make_daemon, connect):
    """In a directory without one of its files no daemon starts."""
    daemon = make_daemon(*SETTINGS).start()
    kv = connect(daemon)
    PAGES.put(kv.namespace(PAGES.layout), BEFORE)
    remove("state/generations", "state/geometry")(daemon.base)
    kv.bump_namespace(PAGES.layout)
    daemon.kill()
    daemon.start()
    ns = connect(daemon).namespace(PAGES.layout)
    assert PAGES.get(ns, BEFORE) == [MISS] * len(BEFORE)


def test_the_name_of_a_device_is_written_again(make_daemon, connect):
    daemon = make_daemon(*SETTINGS).start()
    ns = connect(daemon).namespace(PAGES.layout)
    PAGES.put(ns, BEFORE)
    remove("nv/device")(daemon.base)
    daemon.wait_logged("nvme.device_named_again")
    daemon.kill()
    daemon.start()
    ns = connect(daemon).namespace(PAGES.layout)
    assert PAGES.get(ns, BEFORE) == [HIT] * len(BEFORE)


def replace_by_copy(directory: Path) -> None:
    copy = directory.with_name("copy")
    shutil.copytree(directory, copy)
    shutil.rmtree(directory)
    copy.rename(directory)


@pytest.mark.parametrize("hurt", [shutil.rmtree, replace_by_copy])
def test_without_its_directory_nothing_is_durable(make_daemon, connect, hurt):
    daemon = make_daemon(*SETTINGS).start()
    kv = connect(daemon)
    ns = kv.namespace(PAGES.layout)
    PAGES.put(ns, BEFORE)
    hurt(daemon.directory)
    put = ns.put(PAGES.keys(MORE), [PAGES.page(n) for n in MORE], durable="nvme", chain=False)
    assert (put.stored, put.durable) == (len(MORE), 0)
    with pytest.raises(DirectoryError, match="is not the directory that this daemon has locked"):
        ns.delete(PAGES.keys(GONE))
    flushed = kv.flush()
    assert (flushed.pages, flushed.pages_lost) == (0, len(BEFORE) + len(MORE))
    assert "is not the directory that this daemon has locked" in warnings_of(kv)
    assert "remedy: Put it back, or restart this daemon" in warnings_of(kv)
    assert daemon.log.count("nvme.journal_failed") == 1
    assert PAGES.get(ns, MORE) == [HIT] * len(MORE)  # the cache goes on


def test_a_directory_that_comes_back_is_used_again(make_daemon, connect):
    daemon = make_daemon(*SETTINGS).start()
    kv = connect(daemon)
    ns = kv.namespace(PAGES.layout)
    PAGES.put(ns, BEFORE)
    away = daemon.directory.with_name("away")
    daemon.directory.rename(away)
    put = ns.put(PAGES.keys(MORE), [PAGES.page(n) for n in MORE], durable="nvme", chain=False)
    assert put.durable == 0
    away.rename(daemon.directory)
    until = time.monotonic() + 20
    while warnings_of(kv) and time.monotonic() < until:
        time.sleep(0.05)
    assert warnings_of(kv) == ""
    PAGES.put(ns, MORE)
    daemon.kill()
    daemon.start()
    ns = connect(daemon).namespace(PAGES.layout)
    assert PAGES.get(ns, [*BEFORE, *MORE]) == [HIT] * (len(BEFORE) + len(MORE))
