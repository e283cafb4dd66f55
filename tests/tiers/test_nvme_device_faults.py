"""One device on a disk that is full, read-only, broken or gone; syncs, probes and descriptors."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from file_faults import CountedCalls, descriptors
from nvme_parts import device, names, opened, record

from kvtier.errors import TierIOError
from kvtier.tiers.base import errno_of
from kvtier.tiers.nvme_directory import DeviceDirectory
from kvtier.tiers.nvme_files import OPEN_FILES_MAX

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "device"


@pytest.fixture
def calls():
    return CountedCalls()


# -- a disk that fails -----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("call", ["open", "allocate", "pwritev", "fdatasync"])
def test_a_segment_that_cannot_be_made_leaves_nothing(path, calls, call, number):
    with opened(path, calls=calls) as disk:
        disk.create_segment(0)
        before = descriptors(), names(path), disk.disk_bytes()
        calls.faults[call] = number
        with pytest.raises(TierIOError) as caught:
            disk.create_segment(1)
        assert errno_of(caught.value) == number
        assert str(path) in str(caught.value)
        assert (descriptors(), names(path), disk.disk_bytes()) == before
        assert disk.segments == {0}
        calls.faults.clear()
        disk.create_segment(1)
        assert disk.segments == {0, 1}


def test_a_segment_whose_name_is_not_durable_is_not_made(path, monkeypatch):
    with opened(path) as disk:

        def fail(directory):
            raise OSError(errno.EIO, "the directory cannot be synced")

        with monkeypatch.context() as patch:
            patch.setattr(DeviceDirectory, "sync", fail)
            with pytest.raises(TierIOError, match="cannot be synced"):
                disk.create_segment(1)
        assert (names(path), disk.segments) == (["device"], frozenset())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_opens_all_the_same(path, calls, number):
    calls.faults["allocate"] = number
    with opened(path, calls=calls) as disk, pytest.raises(TierIOError):
        disk.create_segment(0)
    with opened(path) as disk:
        disk.create_segment(0)
    with opened(path, calls=calls) as disk:
        disk.write_at(0, 0, [record()])


def test_a_device_that_is_read_only_is_opened_and_takes_no_segment(path, calls):
    with opened(path, calls=calls):
        pass
    calls.faults["open"] = errno.EROFS
    with opened(path, calls=calls) as disk:
        with pytest.raises(TierIOError) as caught:
            disk.create_segment(0)
        assert errno_of(caught.value) == errno.EROFS
        assert (names(path), disk.segments) == (["device"], frozenset())


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.EMFILE])
def test_a_device_that_cannot_be_opened_may_be_later(path, calls, number):
    calls.faults["open"] = number
    before = descriptors()
    with pytest.raises(TierIOError) as caught:
        device(path, calls=calls)
    assert errno_of(caught.value) == number
    assert descriptors() == before
    calls.faults.clear()
    device(path, calls=calls).close()


def test_a_path_that_cannot_be_made_is_an_io_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(TierIOError) as caught:
        device(tmp_path / "file" / "device")
    assert errno_of(caught.value) in (errno.ENOTDIR, errno.EEXIST)


def test_a_removed_directory_is_an_io_error_everywhere(path):
    page = record()
    with opened(path) as disk:
        disk.create_segment(0)
        disk.create_segment(1)
        disk.write_at(0, 0, [page])
        shutil.rmtree(path)
        for call in (
            disk.sync, disk.probe, disk.disk_bytes,
            lambda: disk.create_segment(2), lambda: disk.remove_segment(0),
        ):  # fmt: skip
            with pytest.raises(TierIOError) as caught:
                call()
            assert errno_of(caught.value) == errno.ENOENT
        for local in (0, 1):  # one that was open, one that was not
            with pytest.raises(FileNotFoundError):
                disk.write_at(local, 0, [page])
        with pytest.raises(FileNotFoundError):
            disk.read_at(1, 0, bytearray(1))


def test_a_sync_of_a_deleted_file_is_an_error(path):
    """Nothing that was written there survives."""
    with opened(path) as disk:
        disk.create_segment(0)
        disk.write_at(0, 0, [record()])
        (path / "segment-00000000").unlink()
        with pytest.raises(TierIOError, match="segment-00000000 was deleted"):
            disk.sync()


REAL_DISK = """
import errno, os, subprocess, sys
from pathlib import Path
sys.path.insert(0, "tests/tiers")
from nvme_parts import device, record, opened, SEGMENT_BYTES
from kvtier.errors import TierIOError
from kvtier.tiers.base import errno_of

root = Path(sys.argv[1])
path = root / "device"
page, found = record(), bytearray(record().nbytes)
with opened(path) as disk:
    made, free = 0, os.statvfs(root).f_bavail
    while True:
        try:
            disk.create_segment(made)
        except TierIOError as error:
            assert errno_of(error) == errno.ENOSPC, error
            break
        disk.write_at(made, 0, [page])
        made += 1
    print("made", made, sorted(item.name for item in path.iterdir())[-1], len(list(path.iterdir())))
    disk.sync()
    disk.read_at(made - 1, 0, found)
    print("reads go on", bytes(found) == page.tobytes())
    disk.remove_segment(0)
    disk.create_segment(made)
    print("after space is freed", len(disk.segments) == made)
    (root / "ballast").write_bytes(bytes(os.statvfs(root).f_bavail * os.statvfs(root).f_bsize))
    for call in (disk.probe, lambda: disk.create_segment(0)):
        try:
            call()
        except TierIOError as error:
            print(errno.errorcode[errno_of(error)])
with opened(path) as disk:
    print("a full disk opens", len(disk.segments) == made)
subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
with opened(path) as disk:
    print("read-only", len(disk.segments) == made)
    for call in (disk.probe, lambda: disk.create_segment(0), lambda: disk.remove_segment(1)):
        try:
            call()
        except TierIOError as error:
            print(errno.errorcode[errno_of(error)])
"""


def test_real_enospc_and_a_real_read_only_disk(tmp_path):
    mount = f"mount -t tmpfs -o size=5m tmpfs {tmp_path} && exec {sys.executable} -c '{REAL_DISK}' "
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", mount + str(tmp_path)],
        capture_output=True, text=True, cwd=REPO, check=False,
    )  # fmt: skip
    if done.returncode and "Traceback" not in done.stderr:
        pytest.skip(f"tmpfs cannot be mounted in a namespace: {done.stderr.strip()}")
    assert done.stdout.splitlines() == [
        "made 4 segment-00000003 5",
        "reads go on True",
        "after space is freed True",
        "ENOSPC",
        "ENOSPC",
        "a full disk opens True",
        "read-only True",
        "EROFS",
        "EROFS",
        "EROFS",
    ], done.stderr


# -- sync, probe, descriptors ----------------------------------------------------------------------


def test_a_sync_covers_what_was_written_since_the_last(path, calls):
    with opened(path, calls=calls) as disk:
        for local in range(3):
            disk.create_segment(local)
        disk.write_at(0, 0, [b"x"])
        disk.write_at(2, 0, [b"x"])
        calls.log.clear()
        disk.sync()
        assert calls.count("fdatasync") == 2
        disk.sync()
        assert calls.count("fdatasync") == 2
        disk.write_at(1, 0, [b"x"])
        calls.faults["fdatasync"] = errno.EIO
        with pytest.raises(TierIOError, match="sync failed: Input/output error"):
            disk.sync()
        calls.faults.clear()
        disk.sync()
        assert calls.count("fdatasync") == 4, "what failed is tried again"


def test_a_sync_waits_for_one_that_is_under_way(path):
    """It has taken up the write; until it is done nothing is safe."""
    started, go_on, ended = threading.Event(), threading.Event(), []

    class Slow(CountedCalls):
        def fdatasync(self, fd):
            if threading.current_thread() is not threading.main_thread():
                started.set()
                assert go_on.wait(10)
            super().fdatasync(fd)

    with opened(path, calls=Slow()) as disk:
        disk.create_segment(0)
        disk.write_at(0, 0, [b"x"])

        def sync(name):
            disk.sync()
            ended.append(name)

        threads = [threading.Thread(target=sync, args=(name,)) for name in ("first", "second")]
        threads[0].start()
        assert started.wait(10)
        threads[1].start()
        threads[1].join(0.05)
        assert ended == []
        go_on.set()
        for thread in threads:
            thread.join(10)
        assert ended == ["first", "second"]


def test_a_probe_leaves_nothing_and_sees_wrong_bytes(path, calls):
    class Wrong(CountedCalls):
        spoils = False

        def preadv(self, fd, parts, offset):
            count = super().preadv(fd, parts, offset)
            if self.spoils:
                parts[-1][-1] ^= 1
            return count

    wrong = Wrong()
    with opened(path, calls=wrong) as disk:
        disk.probe()
        wrong.spoils = True
        with pytest.raises(TierIOError, match="did not read back as it was written") as caught:
            disk.probe()
        assert errno_of(caught.value) == errno.EIO
        assert names(path) == ["device"]


def test_so_many_files_stay_open(path):
    page = record(4096)
    with opened(path, segment_bytes=65536) as disk:
        before = descriptors()
        for local in range(OPEN_FILES_MAX + 20):
            disk.create_segment(local)
            disk.write_at(local, 0, [page])
        assert descriptors() == before + OPEN_FILES_MAX
        for local in range(OPEN_FILES_MAX + 20):
            found = bytearray(page.nbytes)
            disk.read_at(local, 0, found)
            assert found == page.tobytes()
        disk.sync()
        assert descriptors() == before + OPEN_FILES_MAX


def test_kind_40_fd_failing_calls_leave_no_descriptor(path, calls):
    with opened(path, calls=calls) as disk:
        disk.create_segment(0)
        (path / "segment-00000000").unlink()
        before = descriptors()
        failing = [
            (fault, call)
            for fault in ("open", "direct", "pwritev")
            for call in (disk.probe, lambda: disk.create_segment(1))
        ]
        for turn in range(1000):
            fault, call = failing[turn % len(failing)]
            calls.faults = {fault: (errno.EIO, errno.EMFILE)[turn % 2]}
            with pytest.raises(TierIOError):
                call()
            with pytest.raises(OSError, match=r"Input/output|Too many open files|No such file"):
                disk.write_at(0, 1, [b"x"])
        assert descriptors() == before
    before = descriptors()
    for turn in range(1000):
        calls.faults = {("open", "direct", "preadv")[turn % 3]: errno.ENOMEM}
        with pytest.raises(TierIOError):
            device(path, calls=calls)
    assert descriptors() == before


def test_a_device_that_was_away_is_looked_at_again(path):
    page, found = record(), bytearray(record().nbytes)
    with opened(path) as disk:
        for local in range(4):
            disk.create_segment(local)
            disk.write_at(local, 0, [page])
        (path / "segment-00000000").unlink()
        (path / "segment-00000001").rename(path / "segment-00000007")
        (path / "segment-00000002").rename(path / "aside")
        shutil.copy(path / "aside", path / "segment-00000002")
        with (path / "segment-00000002").open("r+b") as file:
            file.seek(4096)
            file.write(b"other bytes")
        disk.look_again()
        assert disk.segments == {2, 3}
        assert disk.rejected == ["segment-00000007: it is segment 1 of device 0"]
        disk.read_at(2, 0, found)
        assert bytes(found[:11]) == b"other bytes", "the file of that name, not the one before"
        disk.read_at(3, 0, found)
        assert found == page.tobytes()
        disk.sync()
        disk.create_segment(0)
        disk.read_at(0, 0, found)
        assert found == bytes(page.nbytes)
        shutil.rmtree(path)
        with pytest.raises(TierIOError) as caught:
            disk.look_again()
        assert errno_of(caught.value) == errno.ENOENT
        assert disk.segments == {0, 2, 3}


def test_use_after_close(path):
    disk = device(path)
    disk.create_segment(0)
    disk.close()
    disk.close()
    for call in (
        disk.sync, disk.probe, disk.look_again,
        lambda: disk.create_segment(1), lambda: disk.remove_segment(0),
    ):  # fmt: skip
        with pytest.raises(TierIOError, match="the device is closed"):
            call()
    with pytest.raises(OSError, match="the device is closed"):
        disk.read_at(0, 0, bytearray(1))
