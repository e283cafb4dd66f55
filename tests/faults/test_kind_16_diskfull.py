"""Kind 16, DISKFULL: no room, no directory, no rights. The daemon goes on, says what it lacks,
stays under its cap, and comes back by itself.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from fault_rig import (
    DiskWatch,
    GetCode,
    Pages,
    disk_usage,
    leftovers,
    metrics,
    need_tmpfs,
    records,
    refused,
    segments,
    tier_of,
    until,
    warnings_of,
)

from kvtier.errors import DirectoryError

MIB = 1 << 20
HIT, MISS = GetCode.HIT, GetCode.MISS


def put(pages: Pages, ns, numbers: Sequence[int]) -> int:
    """How many of them are durable then; all are stored."""
    given = ns.put(
        pages.keys(numbers), [pages.page(n) for n in numbers], durable="nvme", chain=False
    )
    assert given.stored == len(numbers), given
    return given.durable


# -- a disk that is full ---------------------------------------------------------------------------


@pytest.fixture
def on_tmpfs(base) -> Iterator[Callable[[Path, int], tuple[str, ...]]]:
    """The prefix of a command under which `path` is a tmpfs of so many MiB of its own."""
    need_tmpfs(base)

    def prefix(path: Path, size_mib: int) -> tuple[str, ...]:
        path.mkdir(mode=0o700)
        script = f'mount -t tmpfs -o size={size_mib}m,mode=700 tmpfs {path} && exec "$@"'
        return ("unshare", "-Urm", "sh", "-c", script, "sh")

    return prefix


def as_it_sees(daemon, path: Path) -> Path:
    """`path` in the daemon's own namespace."""
    return Path(f"/proc/{daemon.pid}/root{path}")


def test_a_device_smaller_than_its_cap(base, on_tmpfs, make_daemon, connect):
    disk = base / "disk"
    daemon = make_daemon(
        f"nvme.paths={disk / 'nv'}", "nvme.bytes=128MiB", "nvme.retry_s=0.2",
        prefix=on_tmpfs(disk, 64),
    ).start()  # fmt: skip
    pages = Pages(1_000_000)
    seen = as_it_sees(daemon, disk)
    ballast = seen / "ballast"
    ballast.write_bytes(bytes(24 * MIB))
    kv = connect(daemon)
    ns = kv.namespace(pages.layout)
    for at in range(0, 200, 5):
        assert put(pages, ns, range(at, at + 5)) == 5, "what is there gives way"
        if at % 50 == 45:
            assert pages.get(ns, range(at - 5, at + 5)) == [HIT] * 10
    assert metrics(daemon)["kvtier_nvme_no_room_total"] > 0
    assert f"{disk / 'nv'} cannot grow: " in warnings_of(kv)
    (device,) = kv.status().devices
    assert device.is_online
    assert "No space left on device" in device.reason
    full = tier_of(kv)
    sizes = {path.stat().st_size for path in segments(seen / "nv")}
    assert sizes == {8 * MIB + 4096}, "no part of a segment stays"
    assert full.ready_bytes == 8 * MIB * len(segments(seen / "nv")) <= 40 * MIB
    assert not leftovers(seen)

    ballast.unlink()
    at = iter(range(200, 1000, 5))

    def has_grown() -> bool:
        first = next(at)
        assert put(pages, ns, range(first, first + 5)) == 5
        return tier_of(kv).ready_bytes > full.ready_bytes + 8 * MIB

    assert until(has_grown)
    assert disk_usage(seen) <= 64 * MIB
    assert "Traceback" not in daemon.log
    assert daemon.stop() == 0


def fill(ballast: Path) -> None:
    with ballast.open("ab", buffering=0) as file:
        for size in (65536, 4096):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass


def test_a_state_directory_that_is_full(base, on_tmpfs, make_daemon, connect):
    """The journal cannot be written: nothing is called durable or deleted that is not."""
    daemon = make_daemon(
        "nvme.bytes=8MiB", "nvme.checkpoint_s=0.2", prefix=on_tmpfs(base / "state", 4)
    ).start()
    pages = Pages(5_000)
    kv = connect(daemon)
    ns = kv.namespace(pages.layout)
    assert put(pages, ns, range(20)) == 20
    ballast = as_it_sees(daemon, daemon.directory) / "ballast"
    number = iter(range(1000, 1_000_000))

    def is_refused() -> bool:
        fill(ballast)
        at = next(number)
        assert put(pages, ns, [at]) in (0, 1)
        try:
            ns.delete(pages.keys([at]))
        except DirectoryError:
            return True
        return False

    assert until(is_refused)
    assert pages.get(ns, range(20)) == [HIT] * 20
    ballast.unlink()

    def is_deleted() -> bool:
        try:
            ns.delete(pages.keys(range(10)))
        except DirectoryError:
            return False
        return put(pages, ns, [next(number)]) == 1

    assert until(is_deleted)
    assert pages.get(ns, range(20)) == [MISS] * 10 + [HIT] * 10
    assert "Traceback" not in daemon.log
    assert daemon.stop() == 0
    assert "nvme.checkpoint_failed" not in daemon.log


# -- the cap ---------------------------------------------------------------------------------------


def test_never_over_the_cap(make_daemon, connect):
    """With everything that the tier keeps: segments, checkpoints, journals; pages of three sizes on
    two devices."""
    cap = 32 * MIB
    daemon = make_daemon(f"nvme.bytes={cap}", "nvme.checkpoint_s=0.05", name="one")
    places = [daemon.base / name for name in ("a", "b")]
    daemon = make_daemon(
        f"nvme.bytes={cap}",
        "nvme.checkpoint_s=0.05",
        f"nvme.paths={','.join(map(str, places))}",
        name="one",
    )
    sizes = [Pages(5_000, "small"), Pages(100_000, "middle"), Pages(700_000, "large")]
    with DiskWatch(daemon.base) as disk:
        daemon.start()
        kv = connect(daemon)
        spaces = [kv.namespace(pages.layout) for pages in sizes]
        for turn in range(8):
            for pages, ns, count in zip(sizes, spaces, (100, 20, 8), strict=True):
                numbers = range(turn * count, (turn + 1) * count)
                assert put(pages, ns, numbers) == count
                ns.delete(pages.keys(numbers[::5]))
        assert kv.status().counters["evicted"] > 0
        assert metrics(daemon)["kvtier_nvme_checkpoints_total"] > 2
        used = [status.disk_bytes for status in kv.status().devices]
        assert used == [disk_usage(place) for place in places]
        kv.close()
        daemon.kill()
        daemon.start()
        kv = connect(daemon)
        for pages, count in zip(sizes, (100, 20, 8), strict=True):
            ns = kv.namespace(pages.layout)
            codes = pages.get(ns, range(8 * count))
            assert not any(code is not MISS for code in codes[::5][: count // 5])
            assert set(codes) <= {HIT, MISS}
    assert 0 < disk.highest <= cap


# -- a directory that is gone ----------------------------------------------------------------------


def test_a_device_that_goes_and_comes_back(make_daemon, connect):
    daemon = make_daemon("nvme.bytes=8MiB", "nvme.retry_s=0.1").start()
    nv, away = daemon.base / "nv", daemon.base / "away"
    pages = Pages(5_000)
    kv = connect(daemon)
    ns = kv.namespace(pages.layout)
    assert put(pages, ns, range(60)) == 60
    nv.rename(away)
    number = iter(range(1000, 10_000))
    assert until(lambda: put(pages, ns, [next(number)]) == 0 and put(pages, ns, [2000]) == 0)
    assert until(lambda: not kv.status().devices[0].is_online)
    assert f"nvme: {nv} is offline: " in warnings_of(kv)
    assert metrics(daemon)[f'kvtier_nvme_device_online{{path="{nv}"}}'] == 0
    assert pages.get(ns, range(60)) == [HIT] * 60, "host memory has them"
    ns.delete(pages.keys(range(0, 60, 2)))
    away.rename(nv)
    assert until(lambda: kv.status().devices[0].is_online)
    assert put(pages, ns, range(100, 160)) == 60
    assert until(lambda: "offline" not in warnings_of(kv))
    (said,) = warnings_of(kv).splitlines()
    assert "come back there with the next start" in said
    assert "Traceback" not in daemon.log
    kv.close()
    daemon.kill()
    daemon.start()
    ns = connect(daemon).namespace(pages.layout)
    assert pages.get(ns, range(100, 160)) == [HIT] * 60
    assert pages.get(ns, range(0, 60, 2)) == [MISS] * 30, "deleted while the device was away"


def test_segments_that_are_removed_from_under_it(make_daemon, connect):
    daemon = make_daemon("nvme.bytes=8MiB", "nvme.retry_s=0.1").start()
    nv = daemon.base / "nv"
    pages = Pages(5_000)
    kv = connect(daemon)
    ns = kv.namespace(pages.layout)
    assert put(pages, ns, range(150)) == 150
    removed = segments(nv)[1:3]
    lost = {record.header.key for record in records(nv) if record.path in removed}
    for path in removed:
        path.unlink()
    at = iter(range(1000, 100_000, 20))

    def is_back() -> bool:
        first = next(at)
        put(pages, ns, range(first, first + 20))
        return all(path.exists() for path in removed)

    assert until(is_back)
    for _ in range(10):
        first = next(at)
        assert put(pages, ns, range(first, first + 20)) == 20, "it stays well"
    kv.close()
    daemon.kill()
    daemon.start()
    ns = connect(daemon).namespace(pages.layout)
    assert pages.get(ns, range(first, first + 20)) == [HIT] * 20
    codes = pages.get(ns, range(150))
    assert set(codes) <= {HIT, MISS}
    assert all(codes[n] is MISS for n in range(150) if pages.key(n) in lost)


def test_a_name_that_is_taken(make_daemon, connect):
    daemon = make_daemon("nvme.bytes=8MiB", "nvme.retry_s=0.1")
    nv = daemon.base / "nv"
    nv.mkdir(mode=0o700)
    (nv / "segment-00000000").mkdir()
    daemon.start()
    kv = connect(daemon)
    pages = Pages(5_000)
    ns = kv.namespace(pages.layout)
    assert "segment-00000000: it is not a regular file" in warnings_of(kv)
    numbers = iter(range(1_000_000))
    assert until(lambda: put(pages, ns, [next(numbers)]) == 1, within_s=1)


def test_a_directory_that_is_replaced_is_not_used(make_daemon, connect):
    """Its file system may not be mounted: what is written there would fill another one."""
    daemon = make_daemon("nvme.bytes=8MiB", "nvme.retry_s=0.1").start()
    nv = daemon.base / "nv"
    pages = Pages(5_000)
    kv = connect(daemon)
    ns = kv.namespace(pages.layout)
    assert put(pages, ns, range(60)) == 60
    shutil.rmtree(nv)
    nv.mkdir(mode=0o700)
    number = iter(range(1000, 10_000))
    assert until(lambda: put(pages, ns, [next(number)]) == 0)
    assert until(lambda: "replaced by another" in kv.status().devices[0].reason)
    assert not list(nv.iterdir())
    kv.close()
    daemon.kill()
    said = refused(daemon)
    assert f"{nv} has no file `device`: it is not mounted, or was emptied" in said
    assert "--discard-cache" in said
    assert not list(nv.iterdir())
    daemon.start("--discard-cache")
    kv = connect(daemon)
    ns = kv.namespace(pages.layout)
    assert pages.get(ns, range(60)) == [MISS] * 60
    assert put(pages, ns, range(60)) == 60
    assert warnings_of(kv) == ""


@pytest.mark.skipif(os.geteuid() == 0, reason="the rights of a directory do not stop root")
def test_a_device_that_may_not_be_entered(make_daemon, connect):
    daemon = make_daemon("nvme.bytes=8MiB", "nvme.retry_s=0.1").start()
    nv = daemon.base / "nv"
    pages = Pages(5_000)
    kv = connect(daemon)
    ns = kv.namespace(pages.layout)
    assert put(pages, ns, range(20)) == 20
    nv.chmod(0)
    at = iter(range(1000, 100_000, 20))

    def is_offline() -> bool:
        first = next(at)
        put(pages, ns, range(first, first + 20))
        return not kv.status().devices[0].is_online

    try:
        assert until(is_offline)
        assert "Permission denied" in kv.status().devices[0].reason
        assert pages.get(ns, range(20)) == [HIT] * 20
    finally:
        nv.chmod(0o700)
    assert until(lambda: kv.status().devices[0].is_online)
    first = next(at)
    assert put(pages, ns, range(first, first + 20)) == 20


def test_one_of_two_devices_fails(make_daemon, connect):
    first = make_daemon("nvme.bytes=8MiB")
    a, b = first.base / "a", first.base / "b"
    daemon = make_daemon(f"nvme.paths={a},{b}", "nvme.bytes=16MiB", "nvme.retry_s=0.1").start()
    pages = Pages(5_000)
    kv = connect(daemon)
    ns = kv.namespace(pages.layout)
    assert put(pages, ns, range(300)) == 300
    on_b = {record.header.key for record in records(b, 1)}
    assert 0 < len(on_b) < 300
    kv.close()
    daemon.kill()
    daemon.start()
    kv = connect(daemon)
    ns = kv.namespace(pages.layout)
    a.rename(first.base / "away")
    at = iter(range(1000, 100_000, 20))

    def only_b() -> bool:
        number = next(at)
        put(pages, ns, range(number, number + 20))
        return not kv.status().devices[0].is_online

    assert until(only_b)
    states = {device.path: device.is_online for device in kv.status().devices}
    assert states == {str(a): False, str(b): True}
    number = next(at)
    assert put(pages, ns, range(number, number + 20)) == 20, "the other one takes all"
    codes = pages.get(ns, range(300))
    assert codes == [HIT if pages.key(n) in on_b else MISS for n in range(300)]
    (first.base / "away").rename(a)
    assert until(lambda: kv.status().devices[0].is_online)
    kv.close()
    daemon.kill()
    daemon.start()
    ns = connect(daemon).namespace(pages.layout)
    assert pages.get(ns, range(number, number + 20)) == [HIT] * 20
