"""The journal: what was appended is read back, and a write that failed is the last one."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import xxhash

from kvtier.errors import DirectoryError
from kvtier.tiers.crash_points import CRASH_POINTS
from kvtier.tiers.nvme_frames import JOURNAL_HEAD_BYTES, encode_frame, encode_head, frame_seed
from kvtier.tiers.nvme_journal import (
    Delete,
    Drop,
    Journal,
    Mark,
    journal_paths,
    read_journal,
)
from kvtier.tiers.nvme_old_files import remove_old

ID = bytes(range(16))
ENTRIES = (
    Mark(5 << 20 | 7, 135168),
    Drop((1, 2**64 - 1)),
    Delete(bytes(range(32)), 3, 65535, bytes(range(64)), 2**40),
)


def written(directory: Path, *batches, number: int = 7) -> Path:
    """A journal with a frame a batch, by the pure functions."""
    path = directory / f"journal-{number:010d}"
    seed = frame_seed(ID, number)
    frames = [encode_frame(batch, frame=at, seed=seed) for at, batch in enumerate(batches)]
    path.write_bytes(b"".join([encode_head(ID, number), *frames]))
    return path


# -- writing --------------------------------------------------------------------------------------


def test_what_is_appended_is_read_back(tmp_path):
    async def run() -> int:
        journal = await Journal.create(tmp_path, number=3, directory_id=ID)
        assert (journal.number, journal.size_bytes) == (3, JOURNAL_HEAD_BYTES)
        await journal.append(ENTRIES[:1], sync=False)
        await journal.append(ENTRIES[1:], sync=True)
        await journal.append([], sync=True)
        size = journal.size_bytes
        await journal.close()
        await journal.close()
        with pytest.raises(DirectoryError, match="is closed"):
            await journal.append(ENTRIES, sync=True)
        return size

    size = asyncio.run(run())
    path = tmp_path / "journal-0000000003"
    assert path.stat().st_size == size
    assert path.stat().st_mode & 0o777 == 0o600
    contents = read_journal(path, ID)
    assert contents.entries == ENTRIES
    assert (contents.frames, contents.bad_frames, contents.torn_bytes) == (2, 0, 0)


def test_appends_that_wait_together_share_a_sync(tmp_path, monkeypatch):
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)

    async def run() -> None:
        journal = await Journal.create(tmp_path, number=1, directory_id=ID)
        await asyncio.gather(*(journal.append([Drop((n,))], sync=n % 2 == 1) for n in range(50)))
        assert len(synced) == 1
        await journal.append([Drop((50,))], sync=False)
        assert len(synced) == 1
        await journal.close()

    asyncio.run(run())
    entries = read_journal(tmp_path / "journal-0000000001", ID).entries
    assert entries == tuple(Drop((n,)) for n in range(51)), "in the order of the calls"


def test_a_sync_covers_everything_before_it(tmp_path, monkeypatch):
    """What is on the disk when the sync begins is all that was appended until then."""
    sizes: list[int] = []
    monkeypatch.setattr(os, "fdatasync", lambda fd: sizes.append(os.fstat(fd).st_size))

    async def run() -> None:
        journal = await Journal.create(tmp_path, number=1, directory_id=ID)
        for _ in range(3):
            await journal.append(ENTRIES, sync=False)
        await journal.append([], sync=True)
        assert sizes == [journal.size_bytes]
        await journal.close()

    asyncio.run(run())


def test_who_needs_no_sync_does_not_wait_for_one(tmp_path, monkeypatch):
    may_sync = threading.Event()
    monkeypatch.setattr(os, "fdatasync", lambda _fd: may_sync.wait(10))

    async def run() -> None:
        journal = await Journal.create(tmp_path, number=1, directory_id=ID)
        synced = asyncio.create_task(journal.append(ENTRIES, sync=True))
        try:
            async with asyncio.timeout(5):
                await journal.append([Mark(1, 8192)], sync=False)
        finally:
            may_sync.set()
        await synced
        await journal.close()

    asyncio.run(run())


def test_a_caller_that_goes_away_does_not_stop_the_write(tmp_path):
    async def run() -> None:
        journal = await Journal.create(tmp_path, number=1, directory_id=ID)
        call = asyncio.create_task(journal.append(ENTRIES, sync=True))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await journal.append([Mark(1, 8192)], sync=True)
        await journal.close()

    asyncio.run(run())
    entries = read_journal(tmp_path / "journal-0000000001", ID).entries
    assert entries == (*ENTRIES, Mark(1, 8192))


def test_a_journal_is_never_made_twice(tmp_path):
    async def run() -> None:
        journal = await Journal.create(tmp_path, number=1, directory_id=ID)
        with pytest.raises(DirectoryError, match="journal-0000000001 cannot be written: File exis"):
            await Journal.create(tmp_path, number=1, directory_id=ID)
        await journal.append(ENTRIES, sync=True)
        await journal.close()
        with pytest.raises(DirectoryError, match="No such file"):
            await Journal.create(tmp_path / "none", number=1, directory_id=ID)

    asyncio.run(run())
    assert read_journal(tmp_path / "journal-0000000001", ID).entries == ENTRIES


def test_a_caller_that_goes_away_leaves_no_journal(tmp_path):
    async def run() -> None:
        for pause_s in (0, 0.0005, 0.002):
            call = asyncio.create_task(Journal.create(tmp_path, number=1, directory_id=ID))
            await asyncio.sleep(pause_s)
            if call.done():
                await (await call).close()
                (tmp_path / "journal-0000000001").unlink()
                continue
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert not list(tmp_path.iterdir())

    asyncio.run(run())


def refuse(_fd: int) -> None:
    raise OSError(errno.EIO, "Input/output error")


def test_a_journal_that_cannot_be_made_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(DirectoryError, match="Input/output error"):
        asyncio.run(Journal.create(tmp_path, number=1, directory_id=ID))
    assert not list(tmp_path.iterdir())


def test_kind_17_torn_after_a_failed_sync_nothing_is_taken(tmp_path, monkeypatch):
    async def run() -> None:
        journal = await Journal.create(tmp_path, number=1, directory_id=ID)
        await journal.append(ENTRIES, sync=True)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", refuse)
            calls = [journal.append([Drop((n,))], sync=True) for n in range(3)]
            for error in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(error, DirectoryError)
                assert "Input/output error" in str(error)
                assert error.remedy
        assert journal.failed
        with pytest.raises(DirectoryError, match="Input/output error"):
            await journal.append(ENTRIES, sync=False)
        await journal.close()

    asyncio.run(run())
    assert read_journal(tmp_path / "journal-0000000001", ID).entries[:3] == ENTRIES


@contextlib.contextmanager
def file_size_limit(nbytes: int):
    """The write that reaches it is short, the next is refused."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_kind_17_torn_by_a_short_write(tmp_path):
    """The file system takes a part of a frame and then refuses: told so, and dropped when read."""

    async def run() -> None:
        journal = await Journal.create(tmp_path, number=1, directory_id=ID)
        await journal.append(ENTRIES, sync=True)
        refused = pytest.raises(DirectoryError, match="File too large")
        with file_size_limit(journal.size_bytes + 100), refused:
            await journal.append(ENTRIES, sync=True)
        assert journal.failed
        await journal.close()

    asyncio.run(run())
    contents = read_journal(tmp_path / "journal-0000000001", ID)
    assert contents.entries == ENTRIES
    assert (contents.bad_frames, contents.torn_bytes) == (0, 100)


@pytest.mark.parametrize("name", ["journal.half", "journal.written"])
def test_kind_17_torn_at_the_crash_points(tmp_path, name):
    assert name in CRASH_POINTS
    code = f"""
import asyncio, pathlib
from kvtier.tiers.crash_points import arm_crash_point
from kvtier.tiers.nvme_journal import Drop, Journal

async def run():
    path = pathlib.Path({str(tmp_path)!r})
    journal = await Journal.create(path, number=1, directory_id=bytes(range(16)))
    await journal.append([Drop((1,))], sync=True)
    arm_crash_point({name!r})
    await journal.append([Drop((2,))], sync=True)

asyncio.run(run())
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    contents = read_journal(tmp_path / "journal-0000000001", ID)
    is_half = name == "journal.half"
    assert contents.entries == (Drop((1,)), Drop((2,)))[: 1 if is_half else 2]
    assert contents.torn_bytes == (32 if is_half else 0)


# -- files ----------------------------------------------------------------------------------------


def test_another_version_is_refused_by_name(tmp_path):
    path = written(tmp_path, ENTRIES)
    blob = bytearray(path.read_bytes())
    blob[8] = 3
    blob[56:64] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(blob[:56])))
    path.write_bytes(blob)
    said = "has version 3; this build reads version 1 and 2"
    with pytest.raises(DirectoryError, match=said) as caught:
        read_journal(path, ID)
    assert "--discard-cache" in caught.value.remedy


def test_a_journal_of_another_directory_or_number_is_refused(tmp_path):
    path = written(tmp_path, ENTRIES)
    with pytest.raises(DirectoryError, match="belongs to another daemon directory") as caught:
        read_journal(path, bytes(16))
    assert "--discard-cache" in caught.value.remedy
    renamed = path.rename(tmp_path / "journal-0000000008")
    with pytest.raises(DirectoryError, match="is journal 7 under another name"):
        read_journal(renamed, ID)
    copied = renamed.rename(tmp_path / "a-copy")
    assert read_journal(copied).entries == ENTRIES


def test_a_missing_journal_is_an_error(tmp_path):
    with pytest.raises(DirectoryError, match="cannot be read: No such file"):
        read_journal(tmp_path / "journal-0000000001", ID)


def test_old_journals_and_leftovers_are_removed(tmp_path):
    for number in (2, 10, 11, 1):
        written(tmp_path, number=number)
    for name in ("checkpoint", "checkpoint.tmp", "namespaces.tmp", "journal-1", "geometry.tmp"):
        (tmp_path / name).touch()
    assert list(journal_paths(tmp_path)) == [1, 2, 10, 11]
    remove_old(tmp_path, 10)
    left = {"checkpoint", "namespaces.tmp", "journal-1", "journal-0000000010", "journal-0000000011"}
    assert {path.name for path in tmp_path.iterdir()} == left
    (tmp_path / "namespaces.tmp").unlink()
