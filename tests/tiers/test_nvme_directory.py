"""Whose a device directory is, who may use it, and what is in it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
from file_faults import descriptors

from kvtier.errors import DirectoryError
from kvtier.tiers import nvme_directory
from kvtier.tiers.nvme_directory import DeviceIdentity, open_directory, read_identity
from kvtier.tiers.nvme_noted import Noted
from kvtier.tiers.sealed_file import write_sealed

GOLDEN = Path(__file__).parent.parent / "golden"
NOTED = Noted(journal=7, generation=2**40, names=300)
OURS = DeviceIdentity(directory_id=b"0123456789abcdef", number=3)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "below" / "device"


def opened_and_closed(path, identity=OURS, **options):
    open_directory(path, identity, **options).close()


@pytest.mark.parametrize("umask", [0, 0o022, 0o377])
def test_a_new_directory_is_private_and_has_an_identity(path, umask):
    path.parent.mkdir()
    before = os.umask(umask)
    try:
        opened_and_closed(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o700
    assert (path / "device").stat().st_mode & 0o777 == 0o600 & ~umask
    assert read_identity(path) == OURS
    opened_and_closed(path)
    opened_and_closed(path, create=False)


def write_golden() -> None:
    """How the golden file was made; kept so that the next version can be made alike."""
    with tempfile.TemporaryDirectory() as base:
        path = Path(base) / "nv"
        with contextlib.closing(open_directory(path, OURS)) as directory:
            directory.note(NOTED)
        blob = (path / "device").read_bytes()
    lines = [blob[at : at + 32].hex() for at in range(0, len(blob), 32)]
    (GOLDEN / "device_v2.hex").write_text("\n".join(lines) + "\n")


def test_golden_bytes(path):
    """These bytes lie on disks: a difference means a new DEVICE_VERSION, not a new file."""
    golden = bytes.fromhex((GOLDEN / "device_v2.hex").read_text())
    with contextlib.closing(open_directory(path, OURS)) as directory:
        directory.note(NOTED)
    assert (path / "device").read_bytes() == golden
    assert read_identity(path) == replace(OURS, noted=NOTED)


def test_a_device_of_version_1_is_taken_over(path):
    """It has noted nothing; what it notes next is of this version."""
    path.mkdir(parents=True, mode=0o700)
    golden = bytes.fromhex((GOLDEN / "device_v1.hex").read_text())
    (path / "device").write_bytes(golden)
    assert read_identity(path) == OURS
    with contextlib.closing(open_directory(path, OURS, create=False)) as directory:
        assert directory.noted == Noted()
        assert (path / "device").read_bytes() == golden
        directory.note(NOTED)
    with contextlib.closing(open_directory(path, OURS, create=False)) as directory:
        assert directory.noted == NOTED


def test_what_is_noted_stays_when_the_file_is_taken_away(path):
    with contextlib.closing(open_directory(path, OURS)) as directory:
        directory.note(NOTED)
        (path / "device").unlink()
        directory.keep_identity()
    assert read_identity(path) == replace(OURS, noted=NOTED)


def test_nothing_is_noted_over_the_name_of_another_device(path):
    with contextlib.closing(open_directory(path, OURS)) as directory:
        other = replace(OURS, number=4)
        opened_and_closed(path.with_name("other"), other)
        (path.with_name("other") / "device").replace(path / "device")
        with pytest.raises(OSError, match="is that of another device"):
            directory.note(NOTED)
    assert read_identity(path) == other


def test_nothing_is_noted_in_another_directory(path):
    """What is mounted there now is not the device."""
    with contextlib.closing(open_directory(path, OURS)) as directory:
        path.rename(path.with_name("gone"))
        path.mkdir(mode=0o700)
        with pytest.raises(OSError, match="replaced by another"):
            directory.note(NOTED)
    assert list(path.iterdir()) == []


def test_an_empty_directory_of_ours_is_taken(path):
    path.mkdir(parents=True, mode=0o700)
    assert read_identity(path) is None
    opened_and_closed(path)
    assert read_identity(path) == OURS


def test_without_create_a_missing_identity_is_an_error(path):
    path.mkdir(parents=True, mode=0o700)
    with pytest.raises(DirectoryError, match="has lost its file `device`") as caught:
        opened_and_closed(path, create=False)
    assert "mount its file system" in caught.value.remedy
    assert list(path.iterdir()) == []
    path.rmdir()
    with pytest.raises(FileNotFoundError):
        opened_and_closed(path, create=False)


@pytest.mark.parametrize(
    ("identity", "named"),
    [
        (DeviceIdentity(directory_id=bytes(16), number=3), "of another daemon directory"),
        (DeviceIdentity(directory_id=OURS.directory_id, number=4), "is device 3 of this daemon"),
    ],
)
def test_a_directory_of_others_is_refused_and_left_alone(path, identity, named):
    opened_and_closed(path)
    (path / "segment-00000000.tmp").write_bytes(b"x")
    before = descriptors()
    with pytest.raises(DirectoryError, match=named) as caught:
        open_directory(path, identity)
    assert str(path) in str(caught.value)
    assert "--discard-cache" in caught.value.remedy
    assert read_identity(path) == OURS
    assert descriptors() == before
    (path / "segment-00000000.tmp").unlink()  # still there


def test_a_second_user_is_refused(path):
    first = open_directory(path, OURS)
    with pytest.raises(DirectoryError, match="in use by another daemon"):
        open_directory(path, OURS)
    first.close()
    first.close()
    opened_and_closed(path)


def test_open_to_others_or_no_directory(path):
    path.mkdir(parents=True, mode=0o750)
    with pytest.raises(DirectoryError, match=r"open to other users \(mode 0750\)"):
        open_directory(path, OURS)
    assert list(path.iterdir()) == []
    path.rmdir()
    path.touch()
    with pytest.raises(DirectoryError, match="is not a directory"):
        open_directory(path, OURS)


def test_of_another_user(path, monkeypatch):
    path.mkdir(parents=True, mode=0o700)
    monkeypatch.setattr(nvme_directory.os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(DirectoryError, match="belongs to uid"):
        open_directory(path, OURS)


@pytest.mark.parametrize(
    ("document", "named"),
    [
        (
            {"version": 3, "directory_id": bytes(16), "number": 0},
            "has version 3, this daemon knows 1 and 2",
        ),
        ({"version": 1, "directory_id": bytes(15), "number": 0}, "does not hold"),
        ({"version": 1, "directory_id": bytes(16), "number": 16}, "does not hold"),
        ({"version": 1, "directory_id": bytes(16)}, "does not hold"),
        ({"version": 2, "directory_id": bytes(16), "number": 0}, "does not hold"),
        ({"version": 2, "directory_id": bytes(16), "number": 0, "noted": [1, 2]}, "does not hold"),
        ([1, 2], "does not hold"),
    ],
)
def test_another_identity_file_is_refused(path, document, named):
    opened_and_closed(path)
    write_sealed(path / "device", b"device", msgpack.packb(document))
    with pytest.raises(DirectoryError, match=named) as caught:
        open_directory(path, OURS)
    assert "--discard-cache" in caught.value.remedy


def test_a_damaged_identity_is_refused(path):
    opened_and_closed(path)
    whole = (path / "device").read_bytes()
    for damaged in (b"", whole[:-1], whole + b"x", whole[:60] + b"\xff" + whole[61:]):
        (path / "device").write_bytes(damaged)
        with pytest.raises(DirectoryError, match="is damaged") as caught:
            open_directory(path, OURS)
        assert "--discard-cache" in caught.value.remedy


def test_an_unreadable_identity_is_the_systems_error(path):
    """It may be readable later: nothing for the operator to decide."""
    opened_and_closed(path)
    (path / "device").unlink()
    (path / "device").mkdir()
    with pytest.raises(IsADirectoryError):
        open_directory(path, OURS)


def test_a_note_that_hangs_past_the_end_writes_nothing(path, monkeypatch):
    """The directory is that of the next daemon then."""
    started, gate, read = threading.Event(), threading.Event(), read_identity

    def hang(where):
        found = read(where)
        started.set()
        assert gate.wait(20)
        return found

    directory = open_directory(path, OURS)
    with ThreadPoolExecutor(1) as pool:
        with monkeypatch.context() as patched:
            patched.setattr(nvme_directory, "read_identity", hang)
            late = pool.submit(directory.note, NOTED)
            assert started.wait(20)
        directory.close()
        newer = replace(NOTED, journal=NOTED.journal + 1)
        with contextlib.closing(open_directory(path, OURS)) as following:
            following.note(newer)
            gate.set()
            with pytest.raises(OSError, match="the device is closed"):
                late.result(20)
    assert read_identity(path).noted == newer


def test_leftovers_go_and_strangers_stay(path):
    opened_and_closed(path)
    for name in ("device.tmp", "probe.tmp", "segment-00000005.tmp", "notes.tmp", "notes", "probe"):
        (path / name).write_bytes(b"x")
    (path / "lost+found").mkdir()
    opened_and_closed(path)
    left = sorted(item.name for item in path.iterdir())
    assert left == ["device", "lost+found", "notes", "notes.tmp", "probe"]
    (path / "notes.tmp").unlink()


def test_discarding_takes_a_directory_of_anybody_and_empties_it(path):
    opened_and_closed(path, DeviceIdentity(directory_id=bytes(16), number=9))
    (path / "segment-00000003").write_bytes(b"x")
    (path / "segment-00000004.tmp").write_bytes(b"x")
    (path / "thesis.pdf").write_bytes(b"mine")
    opened_and_closed(path, discard=True)
    assert sorted(item.name for item in path.iterdir()) == ["device", "thesis.pdf"]
    assert read_identity(path) == OURS


def test_discarding_a_damaged_directory(path):
    opened_and_closed(path)
    (path / "device").write_bytes(b"?")
    opened_and_closed(path, discard=True)
    assert read_identity(path) == OURS


def test_what_another_daemon_uses_is_not_discarded(path):
    with contextlib.closing(open_directory(path, OURS)):
        (path / "segment-00000003").write_bytes(b"x")
        with pytest.raises(DirectoryError, match="in use by another daemon"):
            open_directory(path, OURS, discard=True)
        assert (path / "segment-00000003").exists()


def test_disk_bytes_are_those_of_du(path):
    directory = open_directory(path, OURS)
    (path / "segment-00000001").write_bytes(bytes(100_000))
    os.truncate(path / "segment-00000001", 1 << 30)
    before = directory.disk_bytes()
    du = subprocess.run(
        ["du", "-B1", path / "device", path / "segment-00000001"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert before == sum(int(line.split()[0]) for line in du.stdout.splitlines()) < 1 << 20
    (path / "thesis.pdf").write_bytes(bytes(100_000))
    assert directory.disk_bytes() == before
    directory.close()


def test_a_removed_or_replaced_directory_is_noticed(path):
    directory = open_directory(path, OURS)
    directory.check_present()
    path.rename(path.with_name("aside"))
    with pytest.raises(FileNotFoundError):
        directory.check_present()
    path.mkdir(mode=0o700)
    with pytest.raises(FileNotFoundError, match="replaced by another"):
        directory.check_present()
    directory.close()
    with pytest.raises(OSError, match="closed"):
        directory.check_present()
