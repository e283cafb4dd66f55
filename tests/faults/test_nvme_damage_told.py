"""What an operator hears of damage on NVMe, of a device that went, and of paths and sizes that
cannot work: place, amount, remedy."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from unittest import mock

import pytest
from fault_rig import GetCode, Pages, flip_bit, metrics, records, refused, segments, warnings_of

from kvtier.cli import main
from kvtier.config.load import load
from kvtier.tiers.direct_file import FileCalls
from tests.faults.kinds_rig import keys_of, on_loop, pages_of, running

HIT, MISS = GetCode.HIT, GetCode.MISS
PAGES = Pages(16 << 10)
NUMBERS = range(40)


def puts(connect, daemon) -> None:
    kv = connect(daemon)
    PAGES.put(kv.namespace(PAGES.layout), NUMBERS)
    kv.close()


def test_a_bad_segment_header_names_device_and_pages(make_daemon, connect):
    daemon = make_daemon("nvme.bytes=32MiB").start()
    puts(connect, daemon)
    daemon.stop()
    nv = daemon.base / "nv"
    first = segments(nv)[0]
    lost = sum(record.path == first for record in records(nv))
    assert lost
    flip_bit(first, 20, 1)
    said = warnings_of(connect(daemon.start()))
    assert f"nvme: {first}: " in said
    assert f"its pages ({lost} were listed there) are misses" in said


def test_corrupt_pages_are_told_with_their_place(make_daemon, connect):
    daemon = make_daemon("nvme.bytes=32MiB").start()
    puts(connect, daemon)
    daemon.stop()
    nv = daemon.base / "nv"
    bad = list(records(nv))[:3]
    for record in bad:
        flip_bit(record.path, record.payload_offset + 100, 3)
    kv = connect(daemon.start())
    assert "quarantine" not in warnings_of(kv)
    found = PAGES.get(kv.namespace(PAGES.layout), NUMBERS)
    assert found.count(HIT) == len(NUMBERS) - 3
    said = warnings_of(kv)
    assert f"3 of {nv}" in said
    assert "`kvtier quarantine list`" in said
    for record in bad:
        assert (
            f"{record.path} slot {record.header.slot} key {record.header.key.hex()}" in daemon.log
        )
    assert main(["quarantine", "clear", "--url", daemon.url]) == 0
    assert "quarantine" not in warnings_of(kv)


@on_loop
async def test_nothing_is_promised_of_an_unreadable_segment_that_nvme_bytes_has_no_room_for(base):
    """Its file goes, with what was there."""
    keys, size = keys_of(range(60)), 240 << 10
    async with running(base, "nvme.bytes=32MiB") as daemon:
        ns = await daemon.namespace(size)
        for at in range(0, len(keys), 6):
            some = keys[at : at + 6]
            (await ns.put(some, pages_of(some, size), durable="nvme")).raise_for_refused()
        await daemon.node.durability.checkpoint()
    last, opened = segments(base / "disk")[-1], FileCalls.open

    def refuse(calls: FileCalls, path: Path, flags: int) -> int:
        if path == last:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return opened(calls, path, flags)

    with mock.patch.object(FileCalls, "open", refuse):
        async with running(base, "nvme.bytes=8MiB") as daemon:
            assert not last.exists()
            assert daemon.node.durability.waits == {}
            said = "\n".join((await daemon.kv.status()).warnings)
            assert "cannot be read now" not in said


def test_a_device_that_was_lost_is_remembered(make_daemon, connect):
    daemon = make_daemon("nvme.bytes=32MiB", "nvme.retry_s=0.2").start()
    puts(connect, daemon)
    daemon.stop()
    kv = connect(daemon.start())
    nv = daemon.base / "nv"
    nv.rename(daemon.base / "away")
    daemon.wait_logged("nvme.device_offline")
    (daemon.base / "away").rename(nv)
    daemon.wait_logged("nvme.device_online")
    name = f'kvtier_nvme_lost_pages_total{{path="{nv}"}}'
    assert metrics(daemon)[name] == len(NUMBERS)
    said = f"about {len(NUMBERS)} pages on {nv} (device 0) cannot be read now and come back there"
    assert said in warnings_of(kv)


def test_devices_that_changed_names_are_clean(make_daemon, connect, base, capsys):
    a, b = base / "a", base / "b"
    daemon = make_daemon(f"nvme.paths={a},{b}", "nvme.bytes=32MiB").start()
    puts(connect, daemon)
    daemon.stop()
    a.rename(base / "c")
    b.rename(a)
    (base / "c").rename(b)
    assert main(["fsck", "--payloads", str(daemon.directory)]) == 0
    said = capsys.readouterr().out
    assert re.search(rf"^total +\d+ +{len(NUMBERS)} ", said, re.MULTILINE), said
    kv = connect(daemon.start())
    assert PAGES.get(kv.namespace(PAGES.layout), NUMBERS) == [HIT] * len(NUMBERS)


@pytest.mark.parametrize("how", ["own", "twice", "inside", "of another"])
def test_paths_that_cannot_be_devices(make_daemon, base, how):
    nv = base / "nv"
    if how == "own":
        paths, said = base / "state", "the daemon's own directory"
    elif how == "twice":
        (base / "link").symlink_to(nv)
        paths, said = f"{nv},{base / 'link'}", "names one directory twice"
    elif how == "inside":
        paths, said = f"{nv},{nv / 'n1'}", f"{nv / 'n1'}, which lies in {nv}"
    else:
        other = make_daemon("nvme.paths=", name="other").start()
        paths, said = other.directory, "the directory of a daemon"
    daemon = make_daemon(f"nvme.paths={paths}")
    assert said in refused(daemon)


def test_doctor_says_that_no_segment_fits(tmp_path, monkeypatch):
    from kvtier.cli import checks_nvme

    room = 64 << 20
    monkeypatch.setattr(
        checks_nvme.shutil, "disk_usage", lambda path: type("Usage", (), {"free": room})
    )

    def found(nbytes: str):
        values = [f"nvme.paths={tmp_path / 'n0'}", f"nvme.bytes={nbytes}"]
        (finding,) = checks_nvme.check_nvme(load(environ={}, overrides=values).config.nvme)
        return finding

    finding = found("1GiB")
    assert "no room for one segment" in finding.found
    assert "segments of 64.00 MiB" in finding.found
    assert "nvme.bytes" in finding.remedy
    assert "no room for one segment" not in found("128MiB").found


def test_all_devices_gone_is_first_a_matter_of_mounting(make_daemon, connect):
    daemon = make_daemon("nvme.bytes=32MiB").start()
    puts(connect, daemon)
    daemon.stop()
    (daemon.base / "nv").rename(daemon.base / "away")
    said = refused(daemon)
    assert "remedy: If there were pages on them, check and mount the devices" in said
