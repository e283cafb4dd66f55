"""Kind 16, DISKFULL, a device that is away for some boots, or for part of one: when it is back, so
are its pages, whatever was checkpointed meanwhile; what was deleted or bumped meanwhile is not.
"""

from __future__ import annotations

import os

import pytest
from fault_rig import GetCode, Pages, warnings_of

from kvtier.cli import main

HIT, MISS = GetCode.HIT, GetCode.MISS
PAGES, OTHERS = Pages(16 << 10), Pages(16 << 10, name="others")
NUMBERS, MORE = range(60), range(100, 120)
SETTINGS = ("nvme.bytes=32MiB", "nvme.checkpoint_s=0.3", "nvme.retry_s=3600")


def puts(kv, numbers, pages=PAGES) -> None:
    pages.put(kv.namespace(pages.layout), numbers)


def finds(kv, numbers, pages=PAGES) -> list[GetCode]:
    return pages.get(kv.namespace(pages.layout), numbers)


@pytest.mark.parametrize(
    ("began_by", "ends_by"),
    [
        ("stop", "stop"),
        ("kill", "stop"),
        pytest.param("stop", "kill", marks=pytest.mark.soak),
        pytest.param("kill", "kill", marks=pytest.mark.soak),
    ],
)
def test_pages_of_a_device_left_out_of_boots_come_back(
    make_daemon, connect, base, began_by, ends_by, capsys
):
    both = make_daemon(f"nvme.paths={base / 'a'},{base / 'b'}", *SETTINGS)
    one = make_daemon(f"nvme.paths={base / 'b'}", *SETTINGS)
    kv = connect(both.start())
    puts(kv, NUMBERS)
    puts(kv, NUMBERS, OTHERS)
    getattr(both, began_by)()
    gone: list[int] = []
    for boot in range(3):
        kv = connect(one.start())
        there = finds(kv, NUMBERS)
        assert MISS in there
        assert HIT in there or boot
        kv.namespace(PAGES.layout).delete(PAGES.keys([boot, 30 + boot]))
        gone += [boot, 30 + boot]
        if boot == 1:
            kv.namespace(OTHERS.layout)
            kv.bump_namespace(OTHERS.layout)
        puts(kv, [n + 7 * boot for n in MORE])
        kv.close()
        getattr(one, ends_by)()
    kv = connect(both.start())
    wanted = [MISS if number in gone else HIT for number in NUMBERS]
    assert finds(kv, NUMBERS) == wanted
    assert finds(kv, MORE) == [HIT] * len(MORE)
    assert finds(kv, NUMBERS, OTHERS) == [MISS] * len(NUMBERS)
    puts(kv, [500])
    kv.close()
    both.stop()
    assert main(["fsck", str(both.directory)]) == 0, capsys.readouterr().out
    # Nothing waits any more, and all is in the newest checkpoint.
    kv = connect(both.start())
    assert finds(kv, NUMBERS) == wanted
    assert warnings_of(kv) == ""


@pytest.mark.parametrize("how", ["not mounted", "identity cannot be read"])
def test_pages_of_a_device_that_a_start_could_not_use_come_back(make_daemon, connect, base, how):
    a, b = base / "a", base / "b"
    daemon = make_daemon(f"nvme.paths={a},{b}", *SETTINGS)
    kv = connect(daemon.start())
    puts(kv, NUMBERS)
    kv.close()
    daemon.kill()
    if how == "not mounted":
        a.rename(base / "away")
        a.mkdir(mode=0o700)
    else:
        (a / "device").rename(base / "away")
        (a / "device").mkdir()
    for number in range(3):
        kv = connect(daemon.start())
        assert "wait for it" in warnings_of(kv)
        assert f"{a} is not used" in warnings_of(kv)
        puts(kv, [100 + number])
        kv.close()
        daemon.stop()
    if how == "not mounted":
        a.rmdir()
        (base / "away").rename(a)
    else:
        (a / "device").rmdir()
        (base / "away").rename(a / "device")
    kv = connect(daemon.start())
    assert finds(kv, [*NUMBERS, 100, 101, 102]) == [HIT] * (len(NUMBERS) + 3)
    assert warnings_of(kv) == ""


@pytest.mark.parametrize("returns", [False, True])
def test_pages_of_a_device_that_goes_while_up_come_back_with_a_start(
    make_daemon, connect, base, returns
):
    a, b = base / "a", base / "b"
    settings = [item for item in SETTINGS if "retry_s" not in item]
    daemon = make_daemon(f"nvme.paths={a},{b}", *settings, "nvme.retry_s=0.2")
    kv = connect(daemon.start())
    puts(kv, NUMBERS)
    kv.close()
    daemon.stop()
    kv = connect(daemon.start())
    a.rename(base / "away")
    daemon.wait_logged("nvme.device_offline")
    kv.namespace(PAGES.layout).delete(PAGES.keys([1, 2]))
    if returns:
        (base / "away").rename(a)
        daemon.wait_logged("nvme.device_online")
    # What is written to it now lies in a segment of before, beside pages of before.
    puts(kv, MORE)
    kv.close()
    daemon.stop()
    if not returns:
        (base / "away").rename(a)
    kv = connect(daemon.start())
    found = finds(kv, NUMBERS)
    assert found[1] == found[2] == MISS
    assert finds(kv, MORE) == [HIT] * len(MORE)
    if not returns:
        assert found.count(HIT) == len(NUMBERS) - 2


def test_entries_that_are_lost_while_a_device_is_away_bring_no_page_back(
    make_daemon, connect, base
):
    """The newest checkpoint knows what was deleted: what waited is given up, and named."""
    settings = ("nvme.bytes=32MiB", "nvme.checkpoint_s=3600")
    both = make_daemon(f"nvme.paths={base / 'a'},{base / 'b'}", *settings)
    one = make_daemon(f"nvme.paths={base / 'b'}", *settings)
    kv = connect(both.start())
    puts(kv, NUMBERS)
    kv.close()
    both.stop()
    kv = connect(one.start())
    left = [number for number, code in zip(NUMBERS, finds(kv, NUMBERS), strict=True) if code is HIT]
    kv.namespace(PAGES.layout).delete(PAGES.keys(range(20)))
    kv.close()
    one.stop()
    deletes = max(one.directory.glob("journal-*"), key=lambda path: path.stat().st_size)
    os.truncate(deletes, deletes.stat().st_size - 300)
    wanted = [HIT if number in left and number >= 20 else MISS for number in NUMBERS]
    kv = connect(both.start())
    assert finds(kv, NUMBERS) == wanted
    assert f"are lost: {deletes.name} is damaged" in warnings_of(kv)
    kv.close()
    both.kill()
    newest = both.directory / "checkpoint"
    newest.write_bytes(newest.read_bytes()[:-1])
    assert finds(connect(both.start()), NUMBERS) == wanted
