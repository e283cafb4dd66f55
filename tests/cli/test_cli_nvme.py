"""The commands around the NVMe tier: durable files, verify, quarantine, devices.

Most run in this process, against a daemon that says what it is told to.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import kvtier.cli
from kvtier.cli.verify import _Display
from kvtier.client import VerifyProgress
from kvtier.core.page import PageRef, Tier
from kvtier.errors import Busy
from kvtier.v1 import admin_pb2
from tests.forks import ForkedDaemon

RECORD = bytes(range(256)) * 48


# -- put and get ----------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in"
    path.write_bytes(b"1" * 3000)
    return path


PLACE = ("--key-of", "x", "--page-bytes", "1KiB")


def test_a_durable_file(main, fake, source):
    counts = "stored             3 pages\ndurable            3 pages\n"
    assert main("put", *PLACE, "--durable", "nvme", source) == (0, "", counts)
    counts = "exists             3 pages\ndurable            3 pages\n"
    assert main("put", *PLACE, "--durable", "nvme", source) == (0, "", counts)
    assert main("put", *PLACE, source) == (0, "", "exists             3 pages\n")


def test_a_file_that_does_not_become_durable_is_stored_and_an_error(main, fake, source):
    fake.tiers.has_nvme = False
    code, out, err = main("put", *PLACE, "--durable", "nvme", source)
    assert (code, out) == (1, "")
    lines = err.splitlines()
    assert lines[:3] == [
        "stored             3 pages",
        "durable            0 pages",
        "error: 3 of 3 pages are not on NVMe",
    ]
    assert lines[3].startswith("remedy: ")
    assert main("get", *PLACE)[:2] == (0, "1" * 3000)


def test_a_file_that_is_not_stored_is_not_durable_either(main, fake, source):
    fake.raise_in["put"] = Busy("no", remedy="none")
    busy = "busy               2 pages\n"
    assert main("put", *PLACE, "--durable", "nvme", source) == (1, "", busy)


def test_get_tells_the_tier_of_each_page(main, fake, source, tmp_path):
    main("put", *PLACE, source)
    out = tmp_path / "out"
    assert main("get", *PLACE, "-o", out) == (0, "", "host               pages 0-2\n")
    places = sorted(fake.pages, key=lambda place: fake.pages[place].generation)
    # The first page of a file is put last.
    fake.tiers.tiers = dict.fromkeys(places[:1], Tier.NVME)
    err = "host               page 0\nnvme               page 1\nhost               page 2\n"
    assert main("get", *PLACE, "-o", out) == (0, "", err)
    assert out.read_bytes() == source.read_bytes()
    fake.tiers.tiers = dict.fromkeys(places, Tier.NVME)
    assert main("get", *PLACE) == (0, "1" * 3000, "nvme               pages 0-2\n")


# -- status ---------------------------------------------------------------------------------------


def test_status_shows_the_devices(main, fake):
    assert "device" not in main("status")[1]
    fake.tiers.devices = [
        admin_pb2.DeviceStatus(
            path="/a", online=True, direct_io=True, capacity_bytes=1 << 30, disk_bytes=1 << 29
        ),
        admin_pb2.DeviceStatus(path="/long/b", reason="Input/output error", capacity_bytes=1 << 20),
    ]
    code, out, _ = main("status")
    assert code == 0
    assert (
        "device   online  direct I/O  capacity  on disk  reason\n"
        "/a       yes     yes         1GiB      50 %     -\n"
        "/long/b  no      no          1MiB      0 %      Input/output error\n"
    ) in out
    shown = json.loads(main("status", "--json")[1])["devices"]
    assert [device["reason"] for device in shown] == ["", "Input/output error"]


def test_status_shows_the_nvme_tier(main, fake):
    tiers = [
        admin_pb2.TierStatus(tier=2, capacity_bytes=1 << 20, ready_bytes=1 << 20),
        admin_pb2.TierStatus(
            tier=3, capacity_bytes=1 << 30, ready_bytes=1 << 28, used_bytes=1 << 28, pages_sealed=7
        ),
    ]
    fake.tiers.status = tiers
    assert re.search(r"\nnvme +1GiB +25 % +25 % +7 ", main("status")[1])


def test_status_rounds_sizes(main, fake):
    """512 MiB of slabs are never exactly that."""
    fake.tiers.status = [admin_pb2.TierStatus(tier=2, capacity_bytes=524_272 << 10)]
    assert "\nhost  512MiB " in main("status")[1]
    assert json.loads(main("status", "--json")[1])["tiers"][0]["capacity_bytes"] == 524_272 << 10


# -- verify ---------------------------------------------------------------------------------------


def progress(done, total=4, corrupt=0):
    return {
        "pages_done": done,
        "pages_total": total,
        "bytes_done": done << 20,
        "pages_corrupt": corrupt,
    }


@pytest.fixture
def reports(fake):
    def give(*fields):
        fake.tiers.reports = [admin_pb2.VerifyProgress(**each) for each in fields]

    return give


def test_verify(main, fake, reports):
    reports(progress(2), progress(4))
    said = "4 pages, 4.0 MiB, 0 corrupt, 0 unreadable\n"
    out = f"host  {said}nvme  {said}"
    assert main("verify") == (0, out, "")
    assert main("verify", "--tier", "all", "--rate", "100MB") == (0, out, "")
    assert main("verify", "--tier", "nvme") == (0, out.splitlines(keepends=True)[1], "")
    assert fake.tiers.verifies == [(2, 0), (3, 0), (2, 10**8), (3, 10**8), (3, 0)]


def test_verify_of_a_daemon_without_nvme(main, fake, reports):
    fake.tiers.has_nvme = False
    assert main("verify") == (0, "host  0 pages, 0.0 MiB, 0 corrupt, 0 unreadable\n", "")
    code, out, err = main("verify", "--tier", "nvme")
    assert (code, out) == (2, "")
    assert err.startswith("error: this daemon has no tier NVME\nremedy: ")


def test_verify_that_finds_damage_fails(main, fake, reports):
    reports(progress(2, corrupt=1), progress(4, corrupt=2))
    out = "host  4 pages, 4.0 MiB, 2 corrupt, 0 unreadable\n"
    assert main("verify", "--tier", "host") == (1, out, "")


def test_errors_of_verify(main, fake):
    fake.raise_in["verify"] = Busy("a verify is under way", remedy="wait")
    err = "error: a verify is under way\nremedy: wait\n"
    assert main("verify", "--tier", "host") == (1, "", err)
    fake.stall.add("verify")
    code, _, err = main("verify", "--tier", "host", "--timeout", "0.2")
    assert code == 1
    assert err.startswith(f"error: the daemon at {fake.url} did not answer within 0.2 s (")
    for words in (("--rate", "fast"), ("--rate", "0"), ("--tier", "disk")):
        with pytest.raises(SystemExit) as caught:
            main("verify", *words)
        assert caught.value.code == 2


def test_verify_without_a_terminal_says_a_line_now_and_then(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("kvtier.cli.verify.time.monotonic", lambda: now[0])
    display = _Display("host", sys.stderr)
    for second in range(12):
        now[0] = 100.0 + second
        display.show(VerifyProgress(**progress(second, total=12)))
    display.close()
    assert capsys.readouterr().err.splitlines() == [
        "host   42%  5/12 pages  5.0 MiB  1.0 MiB/s  0 corrupt",
        "host   83%  10/12 pages  10.0 MiB  1.0 MiB/s  0 corrupt",
    ]


def test_verify_on_a_terminal_shows_a_bar_and_takes_it_away(fake, reports):
    reports(progress(3), progress(4))
    ours, theirs = os.openpty()
    process = subprocess.run(
        [sys.executable, "-m", "kvtier", "verify", "--tier", "host", "--url", fake.url],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=theirs, text=True,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "COLUMNS": "100"},
    )  # fmt: skip
    os.close(theirs)
    shown = os.read(ours, 4096).decode()
    os.close(ours)
    assert (process.returncode, process.stdout) == (
        0,
        "host  4 pages, 4.0 MiB, 0 corrupt, 0 unreadable\n",
    )
    clear = "\r\x1b[K"
    assert shown.startswith(f"{clear}host  [##################------]  75%  3/4 pages  3.0 MiB  ")
    assert shown.endswith(f"0 corrupt{clear}")
    assert "\n" not in shown


# -- quarantine -----------------------------------------------------------------------------------


@pytest.fixture
def refs(fake):
    made = [PageRef(2**63, Tier.HOST, 7, 100), PageRef(2**63, Tier.NVME, 2**40, 2**62)]
    fake.tiers.quarantine = dict.fromkeys(made, RECORD)
    return ["host:7:100", f"nvme:{2**40}:{2**62}"]


def test_quarantine_list(main, fake, refs):
    code, out, err = main("quarantine list")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    page = ["0" * 16, "1", "6b" * 32, "8192", "raw"]
    assert [line.split() for line in lines] == [
        ["ref", "found", "device", "namespace", "shard", "key", "bytes", "codec", "reason"],
        [refs[0], "-", "-", *page, "-"],
        [refs[1], "2s", "ago", "/mnt/a", *page, "it", "is", "torn"],
    ]
    shown = json.loads(main("quarantine list", "--json")[1])
    assert [page["ref"] for page in shown] == refs
    assert shown[0] == {
        "ref": refs[0], "boot_id": 2**63, "namespace": "00" * 32, "shard": 1, "key": "6b" * 32,
        "bytes": 8192, "codec": "raw", "device": "", "age_seconds": None, "reason": "",
    }  # fmt: skip
    found = {name: shown[1][name] for name in ("device", "age_seconds", "reason")}
    assert found == {"device": "/mnt/a", "age_seconds": 1.5, "reason": "it is torn"}


def test_quarantine_export_never_overwrites_unasked(main, fake, refs, tmp_path):
    target = tmp_path / "record"
    assert main("quarantine export", refs[1], target) == (0, "", "")
    assert target.read_bytes() == RECORD
    target.write_bytes(b"mine")
    calls = fake.calls["read_quarantine"]
    code, _, err = main("quarantine export", refs[0], target)
    assert (code, target.read_bytes()) == (2, b"mine")
    assert err.startswith(f"error: {target} is there already\nremedy: ")
    assert fake.calls["read_quarantine"] == calls
    assert main("quarantine export", "--force", refs[0], target) == (0, "", "")
    assert target.read_bytes() == RECORD
    code, _, err = main("quarantine export", "--force", refs[0], tmp_path)
    assert (code, "is not a regular file" in err) == (2, True)
    code, _, err = main("quarantine export", refs[0], tmp_path / "none" / "record")
    assert (code, "No such file" in err) == (2, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.sock", "record"]


def test_quarantine_export_leaves_no_half_a_file(main, fake, refs, tmp_path):
    target = tmp_path / "record"
    fake.stall.add("read_quarantine")
    code, _, err = main("quarantine export", "--timeout", "0.2", refs[0], target)
    assert (code, err.startswith("error: ")) == (1, True)
    assert not target.exists()


def test_quarantine_clear(main, fake, refs):
    assert main("quarantine clear", refs[0]) == (0, "1 freed\n", "")
    code, out, err = main("quarantine clear", refs[1], refs[0])
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {refs[0]} is not in the quarantine of this daemon\nremedy: ")
    assert main("quarantine clear") == (0, "1 freed\n", "")
    assert main("quarantine clear") == (0, "0 freed\n", "")
    assert len(main("quarantine list")[1].splitlines()) == 1


@pytest.mark.parametrize("ref", ["", "host", "host:7", "HOST:7:1", "host:7:-1", "host:7:1:2"])
def test_a_ref_that_is_none(main, ref):
    with pytest.raises(SystemExit) as caught:
        main("quarantine clear", ref)
    assert caught.value.code == 2


# -- serve ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [(), ("--discard-cache",)])
def test_serve_passes_discard_cache_on(monkeypatch, words):
    seen = []

    def run(effective, *, ready_fd=None, discard_cache=False):
        seen.append((ready_fd, discard_cache))
        return 0

    monkeypatch.setattr("kvtier.daemon.run.run", run)
    assert kvtier.cli.main(["serve", *words]) == 0
    assert seen == [(None, bool(words))]


# -- a real daemon --------------------------------------------------------------------------------


@pytest.fixture
def process(forker):
    base = Path(tempfile.mkdtemp(prefix="kvt-"))
    settings = (f"nvme.paths={base / 'disk'}", "nvme.bytes=64MiB", "nvme.clean_percent=0")
    with ForkedDaemon(forker, base, *settings) as running:
        yield running
    shutil.rmtree(base, ignore_errors=True)


def test_a_file_on_disk_from_put_to_quarantine(process, source, tmp_path, capfd):
    def main(command: str, *words: object):
        code = kvtier.cli.main([*command.split(), "--url", process.url, *map(str, words)])
        return code, *capfd.readouterr()

    content = os.urandom(5000)
    source.write_bytes(content)
    code, _, err = main("put", *PLACE, "--durable", "nvme", source)
    assert (code, err) == (0, "stored             5 pages\ndurable            5 pages\n")
    process.signal(signal.SIGKILL)
    process.wait()
    process.start()
    assert re.search(r"\nnvme +60MiB .* 5 ", main("status")[1])
    out = tmp_path / "out"
    assert main("verify") == (0, verified(host=0, nvme=5), "")
    for segment in (process.base / "disk").glob("segment-*"):
        data = segment.read_bytes()
        at = data.find(content[2000:2900])
        if at >= 0:
            with segment.open("r+b") as file:
                file.seek(at)
                file.write(bytes([data[at] ^ 1]))
    assert main("verify", "--tier", "nvme") == (1, verified(nvme=5, corrupt=1), "")
    code, _, err = main("get", *PLACE, "-o", out)
    assert (code, err.startswith("miss: pages are gone of the file under ")) == (1, True)
    ref = main("quarantine list")[1].splitlines()[1].split()[0]
    assert main("quarantine export", ref, out) == (0, "", "")
    assert content[2001:2900] in out.read_bytes()
    assert main("quarantine clear", ref) == (0, "1 freed\n", "")
    assert main("put", *PLACE, "--durable", "nvme", source)[0] == 0
    code, _, err = main("get", *PLACE, "-o", tmp_path / "whole")
    assert (code, (tmp_path / "whole").read_bytes()) == (0, content)
    assert {line.split()[0] for line in err.splitlines()} <= {"host", "nvme"}


def verified(corrupt: int = 0, **pages: int) -> str:
    return "".join(
        f"{name:5} {count} pages, {count * 8 / 1024:.1f} MiB, {corrupt} corrupt, 0 unreadable\n"
        for name, count in pages.items()
    )
