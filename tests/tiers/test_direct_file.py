"""I/O past the page cache with any buffer, and what happens where it is refused or goes wrong."""

from __future__ import annotations

import errno
import os
import random
import resource
import threading
from pathlib import Path

import numpy as np
import pytest
from file_faults import (
    FILE_BYTES,
    CountedCalls,
    address,
    aligned,
    descriptors,
    needs_direct,
    new_file,
    random_bytes,
)

from kvtier.testing.poison import poison_bytes
from kvtier.tiers.direct_file import (
    ALIGN_BYTES,
    DirectFile,
    DirectMode,
    aligned_buffer,
)
from tests.seeds import seeds

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def calls():
    return CountedCalls()


@pytest.fixture(params=[DirectMode.AUTO, DirectMode.OFF], ids=["direct", "buffered"])
def mode(request):
    return request.param


# -- one system call, no copies --------------------------------------------------------------------


def test_header_and_payload_are_one_write_and_are_not_copied(tmp_path, calls):
    header, payload = aligned(random_bytes(4096)), aligned(random_bytes(96 << 10, 2))
    with new_file(tmp_path / "f", calls=calls) as file:
        needs_direct(file)
        file.write_at(4096, [header, payload])
        assert calls.count("pwritev") == 1
        assert calls.moved == [(address(header), 4096), (address(payload), 96 << 10)]
    assert (tmp_path / "f").read_bytes()[4096 : 104 << 10] == bytes(header) + bytes(payload)


def test_only_the_blocks_that_need_it_are_copied(tmp_path, calls):
    """A header as bytes, a payload with an end inside a block, and its padding."""
    payload = aligned(random_bytes(40_000))
    padding = bytes(-40_000 % 4096)
    with new_file(tmp_path / "f", calls=calls) as file:
        needs_direct(file)
        file.write_at(0, [random_bytes(4096, 2), payload, padding])
        assert calls.log.count("pwritev") == 1
        assert calls.count("preadv") == 0, "whole blocks need not be read first"
        copied, direct, tail = calls.moved
        assert direct == (address(payload), 36_864)
        assert (copied[1], tail[1]) == (4096, 4096)
        assert {where % ALIGN_BYTES for where, _ in calls.moved} == {0}
    found = (tmp_path / "f").read_bytes()[: 4096 + 40_960]
    assert found == random_bytes(4096, 2) + bytes(payload) + padding


@pytest.mark.parametrize(("length", "parts"), [(65_536, 1), (40_000, 2)])
def test_a_read_fills_aligned_memory_in_place(tmp_path, calls, length, parts):
    data = random_bytes(FILE_BYTES)
    into = aligned(poison_bytes(length))
    with new_file(tmp_path / "f", calls=calls) as file:
        needs_direct(file)
        file.write_at(0, [data])
        calls.log.clear()
        file.read_at(8192, into)
        assert calls.log == ["preadv"]
        assert calls.moved[0] == (address(into), length - length % 4096)
        assert len(calls.moved) == parts
    assert into == data[8192 : 8192 + length]


@pytest.mark.parametrize("seed", seeds(3, of=6))
def test_any_range_and_buffer_against_a_bytearray(tmp_path, mode, seed):
    source = random.Random(seed)
    model = bytearray(FILE_BYTES)
    with new_file(tmp_path / "f", mode=mode) as file:
        for step in range(120):
            start = source.randrange(FILE_BYTES)
            length = source.randrange(min(FILE_BYTES - start, 6 * ALIGN_BYTES) + 1)
            if source.random() < 0.5:
                start, length = start & -ALIGN_BYTES, length & -ALIGN_BYTES
            shift = source.choice([0, 0, 0, 64, 512, 1])
            if source.random() < 0.5:
                data = aligned(source.randbytes(length), shift)
                cuts = sorted(source.randrange(length + 1) for _ in range(source.randrange(4)))
                ends = zip([0, *cuts], [*cuts, length], strict=True)
                file.write_at(start, [data[low:high] for low, high in ends])
                model[start : start + length] = data
            else:
                into = aligned(poison_bytes(length), shift)
                file.read_at(start, into)
                assert into == model[start : start + length], f"seed {seed}, step {step}"
        assert file.status().st_size == FILE_BYTES
    assert (tmp_path / "f").read_bytes() == model, f"seed {seed}"


def test_more_parts_than_one_call_takes(tmp_path, mode):
    data = random_bytes(2100 * 16)
    with new_file(tmp_path / "f", mode=mode) as file:
        file.write_at(4096, [data[at : at + 16] for at in range(0, len(data), 16)])
        found = bytearray(len(data))
        file.read_at(4096, found)
    assert found == data


def test_more_aligned_runs_than_one_call_takes(tmp_path):
    """Every second block has to be copied, so that no two of them are one run."""
    blocks = 2500
    whole = aligned(random_bytes(blocks * 4096))
    parts = []
    for number in range(blocks):
        block = whole[number * 4096 : (number + 1) * 4096]
        parts.append(block if number % 2 else bytes(block))
    with new_file(tmp_path / "f", size=blocks * 4096) as file:
        file.write_at(0, parts)
    assert (tmp_path / "f").read_bytes() == whole


# -- short calls, no progress ----------------------------------------------------------------------


@pytest.mark.parametrize("piece", [8192, 4096 + 512, 5000])
def test_short_writes_and_reads_go_on(tmp_path, mode, calls, piece):
    data = random_bytes(FILE_BYTES)
    calls.shorten = lambda count: min(count, piece)
    with new_file(tmp_path / "f", mode=mode, calls=calls) as file:
        file.write_at(0, [data[:10_000], data[10_000:]])
        found = bytearray(FILE_BYTES - 5)
        file.read_at(5, found)
    assert calls.count("pwritev") > 10 < calls.count("preadv")
    assert found == data[5:]


@pytest.mark.parametrize("progress", [0, 100], ids=["none", "less than a block"])
@pytest.mark.parametrize("method", ["write", "read"])
def test_without_progress_it_is_an_error(tmp_path, calls, method, progress):
    with new_file(tmp_path / "f", calls=calls) as file:
        needs_direct(file)
        calls.claim = progress
        calls.log.clear()
        with pytest.raises(OSError, match=f"f moved {progress} of 8192 bytes at 4096") as caught:
            if method == "write":
                file.write_at(4096, [bytes(8192)])
            else:
                file.read_at(4096, bytearray(8192))
    assert caught.value.errno == errno.EIO
    assert len(calls.log) <= 10


def test_no_progress_when_buffered_is_an_error(tmp_path, calls):
    with new_file(tmp_path / "f", mode=DirectMode.OFF, calls=calls) as file:
        calls.shorten = lambda count: 0
        with pytest.raises(OSError, match="moved 0 of 4 bytes at 8"):
            file.write_at(8, [b"abcd"])


def test_the_end_of_the_file_is_an_error(tmp_path, mode):
    (tmp_path / "f").write_bytes(random_bytes(10_000))
    with DirectFile.open(tmp_path / "f", write=False, mode=mode) as file:
        found = bytearray(1808)
        file.read_at(8192, found)  # its last byte, in the middle of a block
        assert found == random_bytes(10_000)[8192:]
        for offset, length in ((8192, 1809), (9_999, 2), (1 << 20, 1)):
            with pytest.raises(OSError, match="moved") as caught:
                file.read_at(offset, bytearray(length))
            assert caught.value.errno == errno.EIO


@pytest.mark.parametrize("limit", [3 * 4096, 3 * 4096 + 512])
def test_a_real_short_write(tmp_path, mode, limit):
    """RLIMIT_FSIZE: the write that crosses it is short, the next one is EFBIG."""
    path = tmp_path / "f"
    path.touch()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with DirectFile.open(path, write=True, mode=mode) as file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            with pytest.raises(OSError, match=r"too large|moved") as caught:
                file.write_at(0, [aligned(random_bytes(8 * 4096))])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno in (errno.EFBIG, errno.EIO)
    assert path.read_bytes() == random_bytes(8 * 4096)[: path.stat().st_size]
    assert path.stat().st_size <= limit


# -- descriptors -----------------------------------------------------------------------------------


def test_kind_40_fd_failing_opens_leave_no_descriptor(tmp_path, calls):
    (tmp_path / "there").touch()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    before = descriptors()
    for turn in range(1000):
        calls.faults = {"direct": errno.EIO} if turn % 3 == 0 else {}
        name = ("there", "absent", "link")[turn % 3]
        with pytest.raises(OSError, match=r"Input/output|No such file|symbolic links"):
            DirectFile.open(tmp_path / name, write=True, calls=calls)
    assert descriptors() == before


def test_a_file_that_exists_is_not_created_again(tmp_path):
    (tmp_path / "f").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        DirectFile.open(tmp_path / "f", write=True, create=True)
    assert (tmp_path / "f").read_bytes() == b"mine"


def test_a_new_file_is_private(tmp_path):
    before = os.umask(0)
    try:
        new_file(tmp_path / "f").close()
    finally:
        os.umask(before)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o600


def test_use_after_close(tmp_path, mode):
    file = new_file(tmp_path / "f", mode=mode)
    file.close()
    file.close()
    for call in (
        lambda: file.write_at(0, [b"x"]),
        lambda: file.read_at(0, bytearray(1)),
        file.sync,
        file.status,
        lambda: file.allocate(1),
    ):
        with pytest.raises(OSError, match="closed") as caught:
            call()
        assert caught.value.errno == errno.EBADF


def test_a_file_outlives_its_first_holder_and_not_its_last(tmp_path):
    file = new_file(tmp_path / "f")
    file.retain()
    file.release()
    file.write_at(0, [b"abc"])
    file.release()
    with pytest.raises(OSError, match="closed"):
        file.write_at(0, [b"x"])


def test_close_waits_for_the_call_that_is_under_way(tmp_path):
    """Else the number of its descriptor could mean another file when the call goes on."""
    started, go_on = threading.Event(), threading.Event()

    class Slow(CountedCalls):
        def pwritev(self, fd, parts, offset):
            started.set()
            assert go_on.wait(10)
            self.shorten = lambda count: min(count, 4096)
            return super().pwritev(fd, parts, offset)

    file = new_file(tmp_path / "f", calls=Slow())
    thread = threading.Thread(target=file.write_at, args=(0, [aligned(random_bytes(8192))]))
    thread.start()
    assert started.wait(10)
    file.close()
    with (tmp_path / "other").open("w+b") as other:  # would get the number if it were free
        go_on.set()
        thread.join(10)
        assert other.read() == b""
    assert (tmp_path / "f").read_bytes()[:8192] == random_bytes(8192)


def test_empty_parts_do_nothing(tmp_path, mode, calls):
    with new_file(tmp_path / "f", mode=mode, calls=calls) as file:
        file.write_at(0, [b"", np.empty((0, 3), np.float32)])
        file.read_at(1 << 40, bytearray())
    assert calls.count("pwritev") == calls.count("preadv") == 0


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 10_000])
def test_aligned_buffers(nbytes):
    buffer = aligned_buffer(nbytes)
    assert (buffer.nbytes, buffer.readonly, bytes(buffer)) == (nbytes, False, bytes(nbytes))
    assert nbytes == 0 or address(buffer) % ALIGN_BYTES == 0
