"""Kind 11, RESTART: what a start finds is what was there, its account is that of the files, and
what it cannot trust it says.
"""

from __future__ import annotations

import time

import grpc
import pytest
from fault_rig import (
    DiskWatch,
    GetCode,
    Pages,
    disk_usage,
    newest,
    records,
    recovered,
    refused,
    tier_of,
    warnings_of,
)

from kvtier.core.page import Tier
from kvtier.errors import KvtierError
from kvtier.tiers.nvme_geometry import load_geometry, save_geometry, segment_file_bytes
from tests.daemon.raw_calls import RawClient, error_of, key_of, opaque_layout, payload_of

MIB = 1 << 20
HIT, MISS = GetCode.HIT, GetCode.MISS


def opened(connect, daemon, pages: Pages):
    kv = connect(daemon)
    return kv, kv.namespace(pages.layout)


# -- T1: the account -------------------------------------------------------------------------------


def test_usage_after_a_kill_is_that_of_the_files_and_never_over_the_cap(make_daemon, connect):
    cap, pages = 16 * MIB, Pages(20_000)
    daemon = make_daemon(f"nvme.bytes={cap}", "nvme.checkpoint_s=0.3").start()
    places = (daemon.directory, daemon.base / "nv")
    with DiskWatch(*places) as disk:
        kv, ns = opened(connect, daemon, pages)
        nvme = tier_of(kv)
        count = nvme.capacity_bytes * 9 // 10 // pages.record_bytes
        for at in range(0, count, 50):
            pages.put(ns, range(at, min(at + 50, count)))
        assert kv.status().counters["evicted"] == 0
        daemon.kill()

        daemon.start()
        kv, ns = opened(connect, daemon, pages)
        found = newest(records(daemon.base / "nv"))
        nvme = tier_of(kv)
        assert nvme.used_bytes == sum(record.record_bytes for record in found.values())
        assert nvme.pages_sealed == len(found) == count
        (device,) = kv.status().devices
        assert device.disk_bytes == disk_usage(daemon.base / "nv")
        assert pages.get(ns, range(count)) == [HIT] * count
        assert {item.tier for item in ns.lookup(pages.keys(range(count)))} <= {Tier.HOST, Tier.NVME}

        for at in range(count, count * 3 // 2, 50):
            pages.put(ns, range(at, min(at + 50, count * 3 // 2)))
        assert kv.status().counters["evicted"] > 0
        daemon.kill()

        daemon.start()
        kv, ns = opened(connect, daemon, pages)
        nvme = tier_of(kv)
        assert nvme.used_bytes == nvme.pages_sealed * pages.record_bytes <= nvme.ready_bytes
        codes = pages.get(ns, range(count * 3 // 2))
        assert codes[-count // 2 :] == [HIT] * (count // 2), "the latest stay"
        assert codes.count(HIT) == nvme.pages_sealed >= count
        assert codes.count(HIT) + codes.count(MISS) == len(codes)
    assert 0 < disk.highest <= cap
    assert disk.looks > 20


# -- T2: who may use a directory -------------------------------------------------------------------


def test_a_second_daemon_touches_nothing(make_daemon, connect):
    """Not the directory, and not a device of another directory, whatever it is told to give up."""
    pages = Pages(5_000)
    first = make_daemon("nvme.bytes=8MiB").start()
    _, ns = opened(connect, first, pages)
    pages.put(ns, range(40))
    same_directory = make_daemon(
        "nvme.bytes=8MiB", f"daemon.directory={first.directory}", name="second"
    )
    same_device = make_daemon("nvme.bytes=8MiB", f"nvme.paths={first.base / 'nv'}", name="third")
    before = sorted((first.base / "nv").iterdir())
    for options in ((), ("--discard-cache",)):
        said = refused(same_directory, *options)
        assert f"{first.directory} is in use by the daemon with pid {first.pid}" in said
        assert f"{first.base / 'nv'} is in use by another daemon" in refused(same_device, *options)
    assert sorted((first.base / "nv").iterdir()) == before
    pages.put(ns, range(40, 80))
    first.kill()
    first.start()
    _, ns = opened(connect, first, pages)
    assert pages.get(ns, range(80)) == [HIT] * 80


def test_a_device_of_another_directory_is_refused(make_daemon, connect):
    pages = Pages(5_000)
    first = make_daemon("nvme.bytes=8MiB").start()
    _, ns = opened(connect, first, pages)
    pages.put(ns, range(10))
    first.kill()
    other = make_daemon("nvme.bytes=8MiB", f"nvme.paths={first.base / 'nv'}", name="other")
    said = refused(other)
    assert "holds the pages of another daemon directory" in said
    assert "--discard-cache" in said
    first.start()
    kv, ns = opened(connect, first, pages)
    assert pages.get(ns, range(10)) == [HIT] * 10
    kv.close()
    first.kill()
    other.start("--discard-cache")
    _, ns = opened(connect, other, pages)
    assert pages.get(ns, range(10)) == [MISS] * 10
    pages.put(ns, range(10))


def test_foreign_files_are_left_alone(make_daemon, connect):
    pages = Pages(5_000)
    daemon = make_daemon("nvme.bytes=8MiB").start()
    _, ns = opened(connect, daemon, pages)
    pages.put(ns, range(60))
    daemon.kill()
    names = ("notes.txt", "segment-1", "journal", "checkpoint.bak", "core.tmp.gz")
    in_state = [daemon.directory / name for name in names]
    on_device = [daemon.base / "nv" / name for name in names]
    for path in in_state + on_device:
        path.write_bytes(b"mine")
    (daemon.base / "nv" / "segment-00000060").mkdir()
    (daemon.base / "nv" / "segment-00000061").symlink_to(daemon.base / "nowhere")
    for _ in range(2):
        daemon.start()
        kv, ns = opened(connect, daemon, pages)
        assert pages.get(ns, range(60)) == [HIT] * 60
        assert "segment-00000060: it is not a regular file" in warnings_of(kv)
        assert all(path.read_bytes() == b"mine" for path in in_state + on_device)
        daemon.kill()
    for path in in_state:
        path.unlink()
    daemon.start("--discard-cache")
    _, ns = opened(connect, daemon, pages)
    assert pages.get(ns, range(60)) == [MISS] * 60
    pages.put(ns, range(60, 70))
    assert all(path.read_bytes() == b"mine" for path in on_device)
    assert (daemon.base / "nv" / "segment-00000060").is_dir()


# -- T3: what belongs to an older boot -------------------------------------------------------------


def test_handles_and_refs_of_an_older_boot_are_unknown(make_daemon, connect):
    daemon = make_daemon("nvme.bytes=8MiB").start()
    page = (key_of(1), payload_of(1))
    with RawClient(daemon.url) as raw:
        old = raw.open()
        put = raw.put(old, [page])
        raw.pin(old, [page[0]])
    ns = connect(daemon).namespace(opaque_layout())
    ns.put([page[0]], [page[1]], durable="nvme")
    (ref,) = (item.ref for item in ns.get([page[0]]))
    daemon.kill()
    daemon.start()
    with RawClient(daemon.url) as raw:
        for call in (
            lambda: raw.lookup(old, [page[0]]),
            lambda: raw.get(old, [page[0]]),
            lambda: raw.put(old, [page]),
            lambda: raw.pin(old, [page[0]]),
            lambda: raw.delete(old, [page[0]]),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert error_of(caught.value)[:2] == (grpc.StatusCode.NOT_FOUND, "UnknownHandle")
        new = raw.open()
        assert new.boot_id != old.boot_id
        assert new.generation == old.generation
        kv = connect(daemon)
        ns = kv.namespace(opaque_layout())
        (again,) = (item.ref for item in ns.get([page[0]]))
        assert (again.boot_id, ref.boot_id) == (new.boot_id, old.boot_id)
        assert again.generation > put.generations[0]
        with pytest.raises(KvtierError, match="no quarantined copy"):
            kv.quarantine.read(ref)
        assert kv.status().tiers[0].pages_pinned == 0


# -- another configuration -------------------------------------------------------------------------


def test_less_room_and_more_again(make_daemon, connect):
    pages = Pages(20_000)
    wide = make_daemon("nvme.bytes=16MiB")
    # Seven segments, as large as those of `wide`, would just fit if they were all there is.
    cap = 7 * segment_file_bytes(MIB) + 4096
    narrow = make_daemon(f"nvme.bytes={cap}", "nvme.checkpoint_s=0.1")
    wide.start()
    kv, ns = opened(connect, wide, pages)
    count = tier_of(kv).capacity_bytes * 9 // 10 // pages.record_bytes
    pages.put(ns, range(count))
    wide.kill()
    # A damaged file that is past the new end takes up room as well.
    last = max((wide.base / "nv").glob("segment-*"))
    with last.open("r+b") as file:
        file.write(bytes(4096))
    with DiskWatch(wide.base) as disk:
        narrow.start()
        kv, ns = opened(connect, narrow, pages)
        assert disk_usage(narrow.directory, narrow.base / "nv") <= cap
        disk.forget()
        kept = tier_of(kv).pages_sealed
        assert kept == len(newest(records(narrow.base / "nv"))) > count // 3
        codes = pages.get(ns, range(count))
        assert (codes.count(HIT), codes.count(MISS)) == (kept, count - kept)
        pages.put(ns, range(count, count + 100))
        narrow.kill()
    assert 0 < disk.highest <= cap
    wide.start()
    kv, ns = opened(connect, wide, pages)
    codes = pages.get(ns, range(count + 100))
    assert codes[count:] == [HIT] * 100
    assert codes.count(HIT) == tier_of(kv).pages_sealed
    pages.put(ns, range(count + 100, 2 * count))
    assert tier_of(kv).ready_bytes > 8 * MIB


def swap(first, second) -> None:
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def test_paths_in_another_order_fewer_and_more(make_daemon, connect):
    pages = Pages(5_000)
    first = make_daemon("nvme.bytes=16MiB")  # for its directory's name
    a, b, c = (first.base / name for name in "abc")

    def daemon(*paths):
        return make_daemon(f"nvme.paths={','.join(map(str, paths))}", "nvme.bytes=16MiB")

    running = daemon(a, b).start()
    _, ns = opened(connect, running, pages)
    pages.put(ns, range(300))
    on = {
        path: {record.header.key for record in records(path, number)}
        for number, path in enumerate((a, b))
    }
    assert on[a]
    assert on[b]
    running.kill()

    running = daemon(b, a).start()
    _, ns = opened(connect, running, pages)
    assert pages.get(ns, range(300)) == [HIT] * 300
    running.kill()

    # A device is known by its own file, wherever it lies, also where the other one was.
    moved = first.base / "moved"
    a.rename(moved)
    running = daemon(moved, b).start()
    _, ns = opened(connect, running, pages)
    assert pages.get(ns, range(300)) == [HIT] * 300
    running.kill()
    swap(moved, b)
    running = daemon(moved, b).start()
    _, ns = opened(connect, running, pages)
    assert pages.get(ns, range(300)) == [HIT] * 300
    running.kill()
    swap(moved, b)
    moved.rename(a)

    running = daemon(b).start()
    _, ns = opened(connect, running, pages)
    codes = pages.get(ns, range(300))
    assert codes == [HIT if pages.key(n) in on[b] else MISS for n in range(300)]
    ns.delete(pages.keys(range(0, 300, 3)))
    pages.put(ns, range(0, 300, 6), version=2)
    running.kill()

    # The device that was away comes back with what it had, but for what was deleted meanwhile.
    running = daemon(a, c, b).start()
    kv, ns = opened(connect, running, pages)
    assert [device.path for device in kv.status().devices] == [str(a), str(b), str(c)]
    assert pages.get(ns, range(0, 300, 6), version=2) == [HIT] * 50
    assert pages.get(ns, range(3, 300, 6)) == [MISS] * 50
    rest = [n for n in range(300) if n % 3]
    codes = pages.get(ns, rest)
    assert all(code is HIT for n, code in zip(rest, codes, strict=True) if pages.key(n) in on[b])
    assert set(codes) <= {HIT, MISS}
    pages.put(ns, range(300, 700))
    assert list(records(c, 2)), "the new device takes pages"


def test_more_paths_over_the_years_than_there_are_numbers(make_daemon, connect):
    pages = Pages(5_000)
    daemon = make_daemon("nvme.bytes=8MiB").start()
    _, ns = opened(connect, daemon, pages)
    pages.put(ns, range(20))
    assert daemon.stop() == 0
    known = load_geometry(daemon.directory)
    gone = tuple((number, daemon.base / f"gone{number}") for number in range(1, 16))
    save_geometry(
        daemon.directory,
        type(known)(
            directory_id=known.directory_id,
            segment_bytes=known.segment_bytes,
            devices=known.devices + gone,
        ),
    )
    paths = f"{daemon.base / 'nv'},{daemon.base / 'new'}"
    daemon = make_daemon(f"nvme.paths={paths}", "nvme.bytes=8MiB")
    for at in (100, 500):
        daemon.start()
        kv, ns = opened(connect, daemon, pages)
        assert pages.get(ns, range(20)) == [HIT] * 20
        assert [device.is_online for device in kv.status().devices] == [True, True]
        pages.put(ns, range(at, at + 100))
        daemon.kill()
    assert list(records(daemon.base / "new", 1))


def test_nothing_is_scanned_after_a_clean_stop(make_daemon, connect):
    pages = Pages(5_000)
    daemon = make_daemon("nvme.bytes=8MiB").start()
    _, ns = opened(connect, daemon, pages)
    pages.put(ns, range(50))
    pages.put(ns, range(50, 80), durable=False)
    assert daemon.stop() == 0
    began = time.monotonic()
    daemon.start()
    assert time.monotonic() - began < 2
    _, ns = opened(connect, daemon, pages)
    assert recovered(daemon)["segments_scanned"] == recovered(daemon)["slots"] == 0
    assert recovered(daemon)["listed"] == 80
    assert pages.get(ns, range(80)) == [HIT] * 80, "the stop made all of them durable"
