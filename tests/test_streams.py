"""Files that may never answer or never end: bounded waits, bounded memory."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from kvtier.cli.file_source import opened_source
from kvtier.errors import Busy
from kvtier.streams import TooLong, opened_writer, read_bytes, write_all

MANY = 1 << 20


@pytest.fixture
def fifo(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


@pytest.mark.parametrize("has_writer", [False, True])
def test_a_named_pipe_through_which_nothing_comes(fifo, has_writer):
    writer = os.open(fifo, os.O_RDWR) if has_writer else -1
    try:
        with pytest.raises(TimeoutError, match="nobody writes"):
            read_bytes(fifo, bytes_max=MANY, silence_s=0.05)
    finally:
        if has_writer:
            os.close(writer)


def test_a_named_pipe_is_read_to_its_end(fifo):
    content = os.urandom(300_000)
    writer = threading.Thread(target=fifo.write_bytes, args=(content,))
    writer.start()
    assert read_bytes(fifo, bytes_max=MANY, silence_s=60) == content
    writer.join()


def test_a_pipe_that_was_given_is_waited_for():
    reader, writer = os.pipe()

    def write() -> None:
        time.sleep(0.2)
        os.write(writer, b"late")
        os.close(writer)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        path = Path(f"/proc/self/fd/{reader}")
        assert read_bytes(path, bytes_max=MANY, silence_s=0.01) == b"late"
    finally:
        thread.join()
        os.close(reader)


def test_what_has_no_end_is_read_to_the_limit():
    with pytest.raises(TooLong, match="more than 1048576 bytes"):
        read_bytes(Path("/dev/zero"), bytes_max=MANY, silence_s=1)
    assert read_bytes(Path("/dev/null"), bytes_max=0, silence_s=1) == b""


def test_a_directory_and_nothing(tmp_path):
    for path, kind in ((tmp_path, IsADirectoryError), (tmp_path / "none", FileNotFoundError)):
        with pytest.raises(kind) as caught:
            read_bytes(path, bytes_max=MANY, silence_s=1)
        assert caught.value.filename in (str(path), path)


def test_a_named_pipe_without_a_reader(fifo):
    with pytest.raises(TimeoutError, match="nobody reads"), opened_writer(fifo, silence_s=0.05):
        pass


def test_a_reader_that_takes_nothing(fifo):
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with (
            opened_writer(fifo, silence_s=1) as fd,
            pytest.raises(TimeoutError, match="takes nothing"),
        ):
            write_all(fd, bytes(10 * MANY), name=str(fifo), silence_s=0.05)
    finally:
        os.close(reader)


def test_every_byte_is_written(fifo):
    content = os.urandom(300_000)
    came: list[bytes] = []
    reader = threading.Thread(target=lambda: came.append(fifo.read_bytes()))
    reader.start()
    with opened_writer(fifo, silence_s=60) as fd:
        write_all(fd, content, name=str(fifo), silence_s=60)
    reader.join()
    assert came == [content]


@pytest.mark.parametrize("change", ["other bytes", "shorter"])
def test_a_file_that_changes_while_it_is_read(tmp_path, change):
    path = tmp_path / "in"
    path.write_bytes(b"1" * 3000)
    pieces = [range(1000), range(1000, 3000)]
    with opened_source(path, silence_s=1) as source:
        source.digest(pieces)
        assert source.piece(pieces[0]) == b"1" * 1000
        with path.open("r+b") as file:
            if change == "shorter":
                file.truncate(2999)
            else:
                file.seek(2500)
                file.write(b"2")
        with pytest.raises(Busy, match="was changed"):
            source.piece(pieces[1])
