"""Kind 16, DISKFULL, at a start: whatever a device cannot take, what is there is served, and
nothing is called durable or deleted that is not.
"""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from unittest import mock

import pytest
from fault_rig import GetCode, Pages, need_tmpfs, refused, segments, tier_of, warnings_of

from kvtier.config import NvmeConfig
from kvtier.daemon.nvme_open import prepare
from kvtier.errors import NotDurable

HIT, MISS = GetCode.HIT, GetCode.MISS
PAGES = Pages(5_000)
NUMBERS = range(40)


@pytest.fixture
def disk(base) -> Path:
    need_tmpfs(base)
    made = base / "disk"
    made.mkdir(mode=0o700)
    return made


def full(disk: Path) -> tuple[str, ...]:
    """The prefix of a command that sees what is below `disk` on a file system without room."""
    return _mounted(disk, f"! head -c 64M /dev/zero > {disk}/ballast 2> /dev/null")


def read_only(disk: Path) -> tuple[str, ...]:
    return _mounted(disk, f"mount -o remount,ro {disk}")


def _mounted(disk: Path, then: str) -> tuple[str, ...]:
    aside = disk.with_name("aside")
    script = (
        f"cp -a {disk} {aside} && mount -t tmpfs -o size=32m,mode=700 tmpfs {disk} "
        f'&& cp -a {aside}/. {disk} && {then} && exec "$@"'
    )
    return ("unshare", "-Urm", "sh", "-c", script, "sh")


def put(ns, numbers) -> int:
    """All are stored; how many are durable."""
    given = ns.put(
        PAGES.keys(numbers), [PAGES.page(n) for n in numbers], durable="nvme", chain=False
    )
    assert given.stored == len(numbers), given
    return given.durable


def settings(*paths: Path) -> tuple[str, ...]:
    named = ",".join(map(str, paths))
    return (f"nvme.paths={named}", "nvme.bytes=8MiB", "nvme.retry_s=0.2")


def test_a_full_device_serves_what_is_there(make_daemon, connect, disk):
    daemon = make_daemon(*settings(disk / "nv")).start()
    with connect(daemon) as kv:
        assert put(kv.namespace(PAGES.layout), NUMBERS) == len(NUMBERS)
    daemon.kill()
    before = len(segments(disk / "nv"))
    daemon = make_daemon(*settings(disk / "nv"), prefix=full(disk)).start()
    with connect(daemon) as kv:
        ns = kv.namespace(PAGES.layout)
        assert PAGES.get(ns, NUMBERS) == [HIT] * len(NUMBERS)
        (device,) = kv.status().devices
        assert device.is_online
        assert "No space left on device" in device.reason
        assert f"nvme: {disk / 'nv'} cannot grow: " in warnings_of(kv)
        for at in range(100, 200, 20):
            assert put(ns, range(at, at + 20)) == 20, "within the segments that it has"
        assert tier_of(kv).ready_bytes == before * (512 << 10)
    assert "event=nvme.no_room" in daemon.log
    assert "Traceback" not in daemon.log


def test_a_first_start_on_a_full_device_serves_host_memory(make_daemon, connect, disk):
    daemon = make_daemon(*settings(disk / "nv"), prefix=full(disk)).start()
    with connect(daemon) as kv:
        ns = kv.namespace(PAGES.layout)
        assert f"nvme: {disk / 'nv'} is not used until the next start: " in warnings_of(kv)
        assert "No space left on device" in warnings_of(kv)
        assert put(ns, NUMBERS) == 0
        assert PAGES.get(ns, NUMBERS) == [HIT] * len(NUMBERS)
    assert daemon.stop() == 0
    daemon = make_daemon(*settings(disk / "nv")).start()
    with connect(daemon) as kv:
        assert put(kv.namespace(PAGES.layout), NUMBERS) == len(NUMBERS)
        assert warnings_of(kv) == ""


def test_a_new_device_that_is_full_is_left_out_alone(make_daemon, connect, disk, base):
    """And is as new at the next start, when there is room."""
    paths = (base / "first", disk / "nv")
    daemon = make_daemon(*settings(paths[0])).start()
    with connect(daemon) as kv:
        assert put(kv.namespace(PAGES.layout), NUMBERS) == len(NUMBERS)
    daemon.kill()
    daemon = make_daemon(*settings(*paths), prefix=full(disk)).start()
    with connect(daemon) as kv:
        ns = kv.namespace(PAGES.layout)
        assert PAGES.get(ns, NUMBERS) == [HIT] * len(NUMBERS)
        assert f"nvme: {paths[1]} is not used: " in warnings_of(kv)
        assert put(ns, range(100, 120)) == 20
    daemon.kill()
    shutil.rmtree(disk / "nv", ignore_errors=True)
    daemon = make_daemon(*settings(*paths)).start()
    with connect(daemon) as kv:
        assert warnings_of(kv) == ""
        assert [device.is_online for device in kv.status().devices] == [True, True]


def test_a_device_that_became_read_only_is_read_and_deletes_hold(make_daemon, connect, disk):
    daemon = make_daemon(*settings(disk / "nv")).start()
    with connect(daemon) as kv:
        assert put(kv.namespace(PAGES.layout), NUMBERS) == len(NUMBERS)
    daemon.kill()
    lesser = make_daemon(*settings(disk / "nv"), prefix=read_only(disk)).start()
    with connect(lesser) as kv:
        ns = kv.namespace(PAGES.layout)
        (device,) = kv.status().devices
        assert device.is_online
        assert "Read-only file system" in device.reason
        assert PAGES.get(ns, NUMBERS) == [HIT] * len(NUMBERS)
        assert put(ns, [100]) == 0
        ns.delete(PAGES.keys([0, 1]))
    lesser.kill()
    daemon.start()
    with connect(daemon) as kv:
        ns = kv.namespace(PAGES.layout)
        assert PAGES.get(ns, [0, 1, 100]) == [MISS] * 3
        assert PAGES.get(ns, NUMBERS[2:]) == [HIT] * (len(NUMBERS) - 2)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_the_only_device_cannot_be_opened_for_a_while(make_daemon, base, number):
    """Then the tier is left out, as it is when none is configured (see test_nvme_absent)."""
    daemon = make_daemon("nvme.bytes=8MiB").start()
    daemon.kill()
    nv = base / "nv"

    def failing(path: Path):
        raise OSError(number, "as it is", str(path / "device"))

    config = NvmeConfig(paths=(nv,), bytes=8 << 20)
    with mock.patch("kvtier.daemon.nvme_open.read_identity", failing):
        parts = prepare(config, daemon.directory)
    assert parts.tier.devices == ()
    (said,) = parts.unusable.values()
    assert said.startswith(f"{nv / 'device'} cannot be used: as it is")
    assert ("chmod" in said) == (number == errno.EACCES)


def test_a_state_directory_without_room_names_itself(make_daemon, connect, disk, base):
    daemon = make_daemon("nvme.bytes=8MiB").start()
    daemon.kill()
    shutil.move(daemon.directory, disk / "state")
    other = make_daemon("nvme.bytes=8MiB", f"daemon.directory={disk / 'state'}", prefix=full(disk))
    said = refused(other)
    assert f"{disk / 'state'}/" in said
    assert "No space left on device" in said
    assert f"remedy: Make room on the file system of {disk / 'state'}" in said


def test_pages_longer_than_a_segment_name_the_cap(make_daemon, connect):
    """They can never be there, so to wait for room is no remedy."""
    daemon = make_daemon("nvme.bytes=4MiB").start()
    long = Pages(1 << 20)
    with connect(daemon) as kv:
        ns = kv.namespace(long.layout)
        given = ns.put(long.keys([1]), [long.page(1)], durable="nvme")
        assert (given.stored, given.durable) == (1, 0)
        record = long.record_bytes
        said = f"records of {record} bytes do not fit a segment (262144 bytes) and are never there"
        assert f"{said}: set nvme.bytes to 17MiB or more" in warnings_of(kv)
        with pytest.raises(NotDurable) as caught:
            given.raise_for_refused()
        assert "nvme.bytes" in caught.value.remedy
    daemon.kill()
    wider = make_daemon(f"nvme.bytes={16 * record}").start("--discard-cache")
    with connect(wider) as kv:
        given = kv.namespace(long.layout).put(long.keys([1]), [long.page(1)], durable="nvme")
        assert given.durable == 1
