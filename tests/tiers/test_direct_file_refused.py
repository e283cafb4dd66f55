"""File systems that refuse O_DIRECT, at once or later, and offsets beyond 32 bits."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
from file_faults import (
    FILE_BYTES,
    CountedCalls,
    SparseCalls,
    aligned,
    descriptors,
    needs_direct,
    new_file,
    random_bytes,
)

from kvtier.testing.poison import poison_bytes
from kvtier.tiers.direct_file import (
    DirectFile,
    DirectMode,
    DirectRefused,
)

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def calls():
    return CountedCalls()


@pytest.fixture(params=[DirectMode.AUTO, DirectMode.OFF], ids=["direct", "buffered"])
def mode(request):
    return request.param


# -- kind 34 ---------------------------------------------------------------------------------------

LENGTHS = [4096, 4095, 528 * 64, 576 * 64 + 8]
SHIFTS = [0, 64, 512]


def check_round_trip(path, length, shift):
    """Exact; the file keeps its size and its other bytes; both ways of reading agree."""
    page = aligned(random_bytes(length), shift)
    with new_file(path) as file:
        file.write_at(0, [poison_bytes(FILE_BYTES)])
        file.write_at(8192, [page])
        into = aligned(poison_bytes(length), shift)
        file.read_at(8192, into)
        assert into == page
        assert file.is_direct == (file.reason == "")
        with DirectFile.open(path, write=False, mode=DirectMode.OFF) as buffered:
            found = bytearray(FILE_BYTES)
            buffered.read_at(0, found)
    expected = bytearray(poison_bytes(FILE_BYTES))
    expected[8192 : 8192 + length] = page
    assert found == expected
    assert path.stat().st_size == FILE_BYTES


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("length", LENGTHS)
def test_kind_34_odirect_any_size_and_address(tmp_path, length, shift):
    check_round_trip(tmp_path / "f", length, shift)


def in_namespace(directory, file_system, script):
    """The lines that `script` prints with that file system mounted on `directory`."""
    run = f"exec {sys.executable} -c '{script}' {directory}"
    command = f"mount -t {file_system} {file_system} {directory} && {run}"
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", command],
        capture_output=True, text=True, cwd=REPO / "tests/tiers", check=False,
        env={**os.environ, "PYTHONPATH": str(REPO)},
    )  # fmt: skip
    if done.returncode and "Traceback" not in done.stderr:
        pytest.skip(f"{file_system} cannot be mounted in a namespace: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


ROUND_TRIPS = """
import sys
from pathlib import Path
from test_direct_file_refused import LENGTHS, SHIFTS, check_round_trip

for length in LENGTHS:
    for shift in SHIFTS:
        check_round_trip(Path(sys.argv[1]) / f"{length}-{shift}", length, shift)
        print(length, shift)
"""


@pytest.mark.parametrize("file_system", ["tmpfs", "ramfs"])
def test_kind_34_odirect_on_other_file_systems(tmp_path, file_system):
    """tmpfs takes O_DIRECT or not, as the kernel likes; ramfs never does."""
    lines = in_namespace(tmp_path, file_system, ROUND_TRIPS)
    assert lines == [f"{length} {shift}" for length in LENGTHS for shift in SHIFTS]


@pytest.mark.parametrize("refusal", [errno.EINVAL, errno.EOPNOTSUPP])
def test_kind_34_odirect_refused_at_open(tmp_path, calls, refusal):
    calls.faults["direct"] = refusal
    with new_file(tmp_path / "f", calls=calls) as file:
        assert not file.is_direct
        assert file.reason == f"O_DIRECT was refused (open: {errno.errorcode[refusal]})"
        file.write_at(1, [b"abc"])
        found = bytearray(3)
        file.read_at(1, found)
    assert found == b"abc"


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_kind_34_odirect_refused_at_the_first_call(tmp_path, call):
    """Some file systems take the flag and then no I/O with it. Nothing is lost."""

    class Refusing(CountedCalls):
        is_direct = False

        def set_direct(self, fd, is_direct):
            super().set_direct(fd, is_direct)
            self.is_direct = is_direct

        def _called(self, name):
            super()._called(name)
            if name == call and self.is_direct:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    calls, data = Refusing(), random_bytes(3 * 4096)
    with new_file(tmp_path / "f", calls=calls) as file:
        file.write_at(4096, [data])
        found = bytearray(len(data))
        file.read_at(4096, found)
        assert found == data
        assert not file.is_direct
        during = {"pwritev": "write", "preadv": "read"}[call]
        assert file.reason == f"O_DIRECT was refused ({during}: EINVAL)"
        assert calls.count("buffered") == 1


@pytest.mark.parametrize("call", ["direct", "pwritev"])
def test_kind_34_odirect_required_is_not_replaced(tmp_path, calls, call):
    calls.faults[call] = errno.EINVAL
    before = descriptors()
    with (
        pytest.raises(DirectRefused, match="O_DIRECT is required and was refused") as caught,
        new_file(tmp_path / "f", mode=DirectMode.REQUIRED, calls=calls) as file,
    ):
        file.write_at(0, [bytes(4096)])
    assert caught.value.errno == errno.EINVAL
    assert calls.count("buffered") == 0
    assert descriptors() == before


REFUSED_FOR_REAL = """
import sys
from pathlib import Path
from kvtier.tiers.direct_file import DirectFile, DirectMode, DirectRefused

path = Path(sys.argv[1]) / "f"
try:
    DirectFile.open(path, write=True, create=True, mode=DirectMode.REQUIRED).close()
except DirectRefused as error:
    print(error.strerror)
path.unlink()
with DirectFile.open(path, write=True, create=True) as file:
    file.allocate(8192)
    file.write_at(4000, [b"x" * 200])
    found = bytearray(200)
    file.read_at(4000, found)
    print(file.is_direct, file.reason, found == b"x" * 200)
"""


def test_kind_34_odirect_refused_by_a_real_file_system(tmp_path):
    assert in_namespace(tmp_path, "ramfs", REFUSED_FOR_REAL) == [
        "O_DIRECT is required and was refused (open of f)",
        "False O_DIRECT was refused (open: EINVAL) True",
    ]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_other_errors_are_not_taken_for_a_refusal(tmp_path, calls, number):
    with new_file(tmp_path / "f", calls=calls) as file:
        needs_direct(file)
        calls.faults["pwritev"] = number
        with pytest.raises(OSError, match=os.strerror(number)) as caught:
            file.write_at(0, [bytes(4096)])
        assert caught.value.errno == number
        assert file.is_direct


# -- kind 22 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [(1 << 31) - 4096, (1 << 32) - 4096, (1 << 32) + 512, 3 << 32])
def test_kind_22_int32_offsets(tmp_path, mode, offset):
    """Neither 2 nor 4 GiB is the same place as the file's start."""
    data = random_bytes(3 * 4096)
    with new_file(tmp_path / "f", mode=mode, calls=SparseCalls(), size=16 << 30) as file:
        file.write_at(offset, [data[:5000], data[5000:]])
        found = bytearray(len(data))
        file.read_at(offset, found)
        assert found == data
        for wrapped in (offset % (1 << 32), offset % (1 << 31)):
            if wrapped != offset:
                file.read_at(wrapped, found)
                assert found == bytes(len(data))


def test_kind_22_int32_lengths(tmp_path, mode):
    """Linux moves 2^31 - 4096 bytes in one call at most; what is left follows, to the last byte."""

    class Counting(CountedCalls):
        def pwritev(self, fd, parts, offset):
            count = min(sum(part.nbytes for part in parts), 0x7FFF_F000)
            moved.append((offset, count))
            return count

        preadv = pwritev

    length = (5 << 30) + 8192
    with (tmp_path / "source").open("w+b") as source:
        os.ftruncate(source.fileno(), length)
        with mmap.mmap(source.fileno(), length) as pages, memoryview(pages) as view:
            for name in ("write", "read"):
                moved = []
                with new_file(tmp_path / name, mode=mode, calls=Counting(), size=8192) as file:
                    if name == "write":
                        file.write_at(4096, [view[:8192], view[8192:]])
                    else:
                        file.read_at(4096, view)
                assert sum(count for _, count in moved) == length
                assert [at for at, _ in moved] == [4096 + n * 0x7FFF_F000 for n in range(3)]
