"""One device: its segment files made, found again, refused, removed; what a failing disk does."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading

import pytest
from file_faults import CountedCalls, descriptors
from nvme_parts import DIRECTORY_ID, SEGMENT_BYTES, device, names, opened, record

from kvtier.errors import InvalidConfigValue, TierIOError
from kvtier.tiers.base import errno_of
from kvtier.tiers.direct_file import DirectMode
from kvtier.tiers.nvme_geometry import segment_file_bytes
from kvtier.tiers.nvme_segment import SegmentHeader, decode_segment_header

FILE_BYTES = 4096 + SEGMENT_BYTES


@pytest.fixture
def path(tmp_path):
    return tmp_path / "device"


@pytest.fixture
def calls():
    return CountedCalls()


# -- made and found again --------------------------------------------------------------------------


def test_a_segment_is_whole_before_it_has_its_name(path, calls):
    with opened(path, calls=calls) as disk:
        calls.log.clear()
        disk.create_segment(7)
        assert [name for name in calls.log if name not in ("direct", "open")] == [
            "allocate", "pwritev", "fdatasync",
        ]  # fmt: skip
        assert disk.segments == {7}
        found = path / "segment-00000007"
        assert found.stat().st_size == FILE_BYTES
        assert found.stat().st_mode & 0o777 == 0o600
        assert FILE_BYTES <= found.stat().st_blocks * 512 <= segment_file_bytes(SEGMENT_BYTES)
        assert decode_segment_header(found.read_bytes()) == SegmentHeader(
            directory_id=DIRECTORY_ID, device=0, local=7, segment_bytes=SEGMENT_BYTES
        )
        assert found.read_bytes()[4096:] == bytes(SEGMENT_BYTES)
        assert names(path) == ["device", "segment-00000007"]


def test_segments_and_their_bytes_are_there_after_a_restart(path):
    page = record()
    with opened(path) as disk:
        for local in (0, 9, (1 << 20) - 1):
            disk.create_segment(local)
            disk.write_at(local, 8192, [page])
    with opened(path) as disk:
        assert disk.segments == {0, 9, (1 << 20) - 1}
        assert (disk.rejected, disk.foreign) == ([], ())
        found = bytearray(page.nbytes)
        disk.read_at(9, 8192, found)
        assert found == page.tobytes()


def test_disk_bytes_count_every_file(path):
    with opened(path) as disk:
        before = disk.disk_bytes()
        assert 0 < before <= 8192
        disk.create_segment(0)
        disk.create_segment(1)
        assert 2 * FILE_BYTES <= disk.disk_bytes() - before <= 2 * segment_file_bytes(SEGMENT_BYTES)
        disk.remove_segment(0)
        disk.remove_segment(1)
        assert disk.disk_bytes() == before


def test_a_segment_is_not_made_twice_or_out_of_range(path):
    with opened(path) as disk:
        disk.create_segment(1)
        for local in (1, -1, 1 << 20):
            with pytest.raises(TierIOError) as caught:
                disk.create_segment(local)
            assert errno_of(caught.value) == errno.EEXIST
        assert disk.segments == {1}
        assert names(path) == ["device", "segment-00000001"]


def test_a_removed_segment_is_gone_and_comes_back_empty(path):
    page = record()
    with opened(path) as disk:
        disk.create_segment(1)
        disk.write_at(1, 0, [page])
        disk.remove_segment(1)
        assert (disk.segments, names(path)) == (frozenset(), ["device"])
        for call in (disk.read_at, lambda *where: disk.write_at(*where[:2], [where[2]])):
            with pytest.raises(OSError, match="segment-00000001 does not exist") as caught:
                call(1, 0, bytearray(1))
            assert caught.value.errno == errno.ERANGE
        disk.sync()
        disk.create_segment(1)
        found = bytearray(b"x" * page.nbytes)
        disk.read_at(1, 0, found)
        assert found == bytes(page.nbytes)


@pytest.mark.parametrize("is_made_again", [True, False])
def test_removing_under_a_write_touches_no_other_segment(path, is_made_again):
    """The write goes on in the file that has no name any more."""
    started, go_on = threading.Event(), threading.Event()

    class Slow(CountedCalls):
        def pwritev(self, fd, parts, offset):
            if threading.current_thread().name == "slow":
                started.set()
                assert go_on.wait(10)
            return super().pwritev(fd, parts, offset)

    page = record()
    with opened(path, calls=Slow()) as disk:
        disk.create_segment(0)
        thread = threading.Thread(name="slow", target=disk.write_at, args=(0, 0, [page]))
        thread.start()
        assert started.wait(10)
        disk.remove_segment(0)
        if is_made_again:
            disk.create_segment(0)
        go_on.set()
        thread.join(10)
        disk.sync()
        if is_made_again:
            found = bytearray(page.nbytes)
            disk.read_at(0, 0, found)
            assert found == bytes(page.nbytes)


def test_a_file_that_was_opened_before_a_removal_is_not_kept_after_it(path):
    """It is slow to open; meanwhile its name has come to mean another file."""
    opening, go_on = threading.Event(), threading.Event()

    class Slow(CountedCalls):
        def open(self, path, flags):
            fd = super().open(path, flags)
            if threading.current_thread().name == "slow":
                opening.set()
                assert go_on.wait(10)
            return fd

    page = record()
    with opened(path) as disk:
        disk.create_segment(0)
    with opened(path, calls=Slow()) as disk:
        thread = threading.Thread(name="slow", target=disk.read_at, args=(0, 0, bytearray(1)))
        thread.start()
        assert opening.wait(10)
        disk.remove_segment(0)
        disk.create_segment(0)
        go_on.set()
        thread.join(10)
        disk.write_at(0, 0, [page])
        found = bytearray(page.nbytes)
        disk.read_at(0, 0, found)
        assert found == page.tobytes()
        disk.sync()


# -- refused by name -------------------------------------------------------------------------------


def spoil(path, kind):
    """Three whole segments 0, 1, 2, of which 1 (and 2, when swapped) are spoilt."""
    with opened(path) as disk:
        for local in range(3):
            disk.create_segment(local)
    second = path / "segment-00000001"
    if kind == "truncated":
        os.truncate(second, FILE_BYTES - 4096)
    elif kind == "empty":
        os.truncate(second, 0)
    elif kind == "extended":
        os.truncate(second, FILE_BYTES + 1)
    elif kind == "damaged":
        with second.open("r+b") as file:
            file.seek(40)
            file.write(b"\xff")
    elif kind == "zeros":
        second.write_bytes(bytes(FILE_BYTES))
    elif kind == "swapped":
        third = path / "segment-00000002"
        second.rename(path / "x")
        third.rename(second)
        (path / "x").rename(third)
    elif kind == "link":
        second.rename(path / "x")
        second.symlink_to(path / "x")
    elif kind == "fifo":
        second.unlink()
        os.mkfifo(second)
    else:
        other = path.with_name("other")
        options = {"other directory": {"directory_id": bytes(16)}, "other device": {"number": 1}}
        with opened(other, **options[kind]) as disk:
            disk.create_segment(1)
        shutil.copy(other / "segment-00000001", second)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("truncated", f"it has {FILE_BYTES - 4096} bytes, not {FILE_BYTES}"),
        ("empty", f"it has 0 bytes, not {FILE_BYTES}"),
        ("extended", f"it has {FILE_BYTES + 1} bytes, not {FILE_BYTES}"),
        ("damaged", "the checksum of its header does not match"),
        ("zeros", "it does not start as a segment does"),
        ("swapped", "it is segment 2 of device 0"),
        ("link", "it is not a regular file"),
        ("fifo", "it is not a regular file"),
        ("other directory", "it belongs to another daemon directory"),
        ("other device", "it is segment 1 of device 1"),
    ],
)
def test_a_file_that_is_not_its_segment_is_rejected_by_name(path, caplog, kind, reason):
    spoil(path, kind)
    before = descriptors()
    with caplog.at_level(logging.WARNING), opened(path) as disk:
        assert disk.rejected[0] == f"segment-00000001: {reason}"
        assert disk.segments == ({0} if kind == "swapped" else {0, 2})
        assert disk.rejected_segments == {0, 1, 2} - disk.segments
        assert "nvme.segment.rejected" in [entry.message for entry in caplog.records]
        assert (path / "segment-00000001").is_symlink() or (path / "segment-00000001").exists()
        # Its number can be had again, its disk space too.
        disk.create_segment(1)
        assert disk.rejected_segments == ({2} if kind == "swapped" else set())
        for local in disk.rejected_segments:
            disk.remove_segment(local)
        assert disk.rejected == []
    assert descriptors() == before
    with opened(path) as disk:
        assert disk.rejected == []
        assert disk.segments == ({0, 1} if kind == "swapped" else {0, 1, 2})


def test_foreign_files_are_named_and_left_alone(path):
    with opened(path):
        pass
    (path / "segment-1").write_bytes(b"mine")
    (path / "lost+found").mkdir()
    (path / "segment-99999999").write_bytes(b"")
    with opened(path) as disk:
        assert disk.foreign == ("lost+found", "segment-1")
        assert disk.rejected == ["segment-99999999: there is no segment of such a number"]
    assert (path / "segment-1").read_bytes() == b"mine"


def test_another_segment_size_is_rejected(path):
    with opened(path) as disk:
        disk.create_segment(0)
    with opened(path, segment_bytes=2 * SEGMENT_BYTES) as disk:
        assert disk.rejected == [f"segment-00000000: it has {FILE_BYTES} bytes, not 2101248"]


def test_an_unreadable_header_costs_that_segment_alone(path):
    class BadBlock(CountedCalls):
        number = errno.EIO

        def preadv(self, fd, parts, offset):
            if os.readlink(f"/proc/self/fd/{fd}").endswith("segment-00000000"):
                raise OSError(self.number, os.strerror(self.number))
            return super().preadv(fd, parts, offset)

    with opened(path) as disk:
        disk.create_segment(0)
        disk.create_segment(1)
    with opened(path, calls=BadBlock()) as disk:
        assert disk.rejected == ["segment-00000000: it cannot be read: Input/output error"]
        assert disk.segments == {1}
    BadBlock.number = errno.ENOMEM
    before = descriptors()
    with pytest.raises(TierIOError, match="Cannot allocate memory in"):
        device(path, calls=BadBlock())
    assert descriptors() == before


# -- direct or not ---------------------------------------------------------------------------------


@pytest.mark.parametrize("has_segment", [False, True])
def test_kind_34_odirect_refused_at_open_is_visible(path, calls, caplog, has_segment):
    if has_segment:
        with opened(path) as disk:
            disk.create_segment(0)
    calls.faults["direct"] = errno.EINVAL
    with caplog.at_level(logging.WARNING), opened(path, calls=calls) as disk:
        assert not disk.is_direct
        assert disk.io_reason == "O_DIRECT was refused (open: EINVAL)"
        assert [entry.message for entry in caplog.records] == ["nvme.direct_io.refused"]
        asked = calls.count("direct")
        disk.create_segment(1)
        disk.write_at(1, 0, [record()])
        assert calls.count("direct") == asked, "a device that refused is not asked again"


def test_kind_34_odirect_refused_by_the_first_write_is_visible(path, calls):
    class Refusing(CountedCalls):
        def pwritev(self, fd, parts, offset):
            if self.count("buffered") == 0 and "segment" in os.readlink(f"/proc/self/fd/{fd}"):
                raise OSError(errno.EINVAL, "no")
            return super().pwritev(fd, parts, offset)

    page = record()
    with opened(path, calls=Refusing()) as disk:
        if not disk.is_direct:
            pytest.skip(f"no O_DIRECT in the test directory: {disk.io_reason}")
        disk.create_segment(0)
        disk.write_at(0, 4096, [page])
        found = bytearray(page.nbytes)
        disk.read_at(0, 4096, found)
        assert found == page.tobytes()
        assert (disk.is_direct, disk.io_reason) == (False, "O_DIRECT was refused (write: EINVAL)")


@pytest.mark.parametrize("call", ["direct", "pwritev"])
def test_kind_34_odirect_required_and_refused_is_a_config_error(path, calls, call):
    calls.faults[call] = errno.EINVAL
    before = descriptors()
    with pytest.raises(InvalidConfigValue, match=r'nvme\.direct_io = "required"') as caught:
        device(path, mode=DirectMode.REQUIRED, calls=calls)
    assert str(path) in str(caught.value)
    assert descriptors() == before
    assert names(path) == ["device"]


def test_kind_34_odirect_required_and_refused_later_is_an_io_error(path, calls):
    with opened(path, mode=DirectMode.AUTO) as disk:
        if not disk.is_direct:
            pytest.skip(f"no O_DIRECT in the test directory: {disk.io_reason}")
    with opened(path, mode=DirectMode.REQUIRED, calls=calls) as disk:
        calls.faults["pwritev"] = errno.EINVAL
        with pytest.raises(TierIOError, match="O_DIRECT is required and was refused") as caught:
            disk.create_segment(0)
        assert errno_of(caught.value) == errno.EINVAL
        assert disk.is_direct


def test_off_is_not_a_fallback(path, calls):
    with opened(path, mode=DirectMode.OFF, calls=calls) as disk:
        disk.create_segment(0)
        assert (disk.is_direct, disk.io_reason, calls.count("direct")) == (False, "", 0)
