"""The checkpoint: what was written is read back, any damage is found, and at every moment of a
write one of the two files is whole.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import random
import signal
import struct
import subprocess
import sys
from pathlib import Path

import msgpack
import numpy as np
import pytest
import xxhash

from kvtier.errors import DirectoryError
from kvtier.tiers import nvme_state
from kvtier.tiers.nvme_checkpoint import (
    CHECKPOINT,
    CHECKPOINT_OLD,
    CheckpointState,
    oldest_number,
    read_checkpoint,
    write_checkpoint,
)
from kvtier.tiers.nvme_geometry import CHECKPOINT_BYTES_PER_PAGE
from kvtier.tiers.nvme_snapshot import Pages
from tests.tiers.checkpoint_parts import (
    ID,
    blob_of,
    check_equal,
    many,
    numbers,
    resealed,
    small,
    write,
)

# -- bytes ----------------------------------------------------------------------------------------


def test_the_diagram_is_right():
    snapshot, blob = small(), blob_of(small())
    table = msgpack.packb(
        {
            "families": [[bytes(range(32)), 3], [bytes(range(32, 64)), 2**40]],
            "classes": [[7, 135168], [1 << 20, 8192]],
            "in_flight": [5, 2**40],
        }
    )
    body = table + bytes(-len(table) % 64)
    for _, column in snapshot.pages.columns():
        body += column.tobytes() + bytes(-column.nbytes % 64)
    numbers = (9, 2**41, 3, len(table), 128 + len(body))
    head = b"\x89KVTCKP\n" + struct.pack("<II16s5Q", 2, 128, ID, *numbers)
    head += xxhash.xxh3_128_digest(body) + struct.pack("<Q24x", 1)
    assert blob == head + struct.pack("<Q", xxhash.xxh3_64_intdigest(head)) + body


@pytest.mark.parametrize("count", [0, 1, 1000, 20_000])
def test_what_is_written_is_read_back(tmp_path, count):
    snapshot = many(count)
    size = write(tmp_path, snapshot)
    path = tmp_path / "checkpoint"
    assert path.stat().st_size == size
    assert path.stat().st_mode & 0o777 == 0o600
    assert size <= count * CHECKPOINT_BYTES_PER_PAGE + 4096
    check_equal(read_checkpoint(path, ID).snapshot, snapshot)
    assert {item.name for item in tmp_path.iterdir()} == {"checkpoint"}


def test_columns_of_another_kind_are_written_as_they_should_be(tmp_path):
    """As the store has them: wider, and every second element of a larger array."""
    pages = small().pages
    wide = np.zeros((3, 2), np.int64)
    wide[:, 0] = pages.length
    loose = Pages(
        **(dict(pages.columns()) | {"length": wide[:, 0], "codec": pages.codec.astype(int)})
    )
    assert blob_of(dataclasses.replace(small(), pages=loose)) == blob_of(small())


# -- damage ---------------------------------------------------------------------------------------


def test_any_flipped_byte_is_found(tmp_path):
    path, whole = tmp_path / "checkpoint", blob_of(small())
    rng = random.Random(3)
    for at in [*range(128), *rng.sample(range(128, len(whole)), 300)]:
        blob = bytearray(whole)
        blob[at] ^= 1 << rng.randrange(8)
        path.write_bytes(blob)
        found = read_checkpoint(path, ID)
        assert (found.state, found.snapshot) == (CheckpointState.BAD, None), at
        assert found.reason


def test_kind_17_torn_at_any_length(tmp_path):
    path, whole = tmp_path / "checkpoint", blob_of(small())
    for size in [*range(130), *range(131, len(whole), 3), len(whole) - 1]:
        path.write_bytes(whole[:size])
        assert read_checkpoint(path, ID).state is CheckpointState.BAD, size
    path.write_bytes(whole + b"\0")
    assert f"{len(whole) + 1} bytes where {len(whole)} belong" in read_checkpoint(path).reason


def test_no_file_is_no_damage(tmp_path):
    assert read_checkpoint(tmp_path / "checkpoint", ID).state is CheckpointState.MISSING


@pytest.mark.parametrize(
    "changes",
    [
        {"families": ((bytes(31), 1), (bytes(32), 1))},
        {"families": ()},
        {"in_flight": (-1,)},
        {"last_generation": 5},
        {"pages": dataclasses.replace(small().pages, parent=np.array([-1, 4, 0], np.int32))},
        {"pages": dataclasses.replace(small().pages, parent=np.array([-2, -1, 0], np.int32))},
    ],
)
def test_a_sound_file_that_contradicts_itself_is_bad(tmp_path, changes):
    path = tmp_path / "checkpoint"
    path.write_bytes(blob_of(dataclasses.replace(small(), **changes)))
    found = read_checkpoint(path, ID)
    assert (found.state, found.reason) == (CheckpointState.BAD, "its content contradicts itself")


@pytest.mark.parametrize("table", [b"\xc1", b"\x80", b"\x90", msgpack.packb({"classes": 1})])
def test_a_sound_file_of_nonsense_is_bad(tmp_path, table):
    blob = bytearray(blob_of(small()))
    blob[56:64] = struct.pack("<Q", len(table))
    blob[128 : 128 + len(table)] = table
    path = tmp_path / "checkpoint"
    path.write_bytes(resealed(blob))
    assert "makes no sense" in read_checkpoint(path, ID).reason


@pytest.mark.parametrize("at", [48, 88])
def test_a_count_that_the_file_cannot_hold_is_bad(tmp_path, at):
    blob = bytearray(blob_of(small()))
    blob[at : at + 8] = struct.pack("<Q", 2**60)
    path = tmp_path / "checkpoint"
    path.write_bytes(resealed(blob))
    assert read_checkpoint(path, ID).state is CheckpointState.BAD


def test_a_checkpoint_of_another_directory_is_refused(tmp_path):
    path = tmp_path / "checkpoint"
    path.write_bytes(blob_of(small()))
    with pytest.raises(DirectoryError, match="belongs to another daemon directory") as caught:
        read_checkpoint(path, bytes(16))
    assert "--discard-cache" in caught.value.remedy
    check_equal(read_checkpoint(path).snapshot, small())


def test_eio_is_an_error(tmp_path, monkeypatch):
    def failing(_path: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    write(tmp_path, small())
    monkeypatch.setattr(nvme_state, "read_plain", failing)
    with pytest.raises(DirectoryError, match="checkpoint cannot be read: Input/output error"):
        read_checkpoint(tmp_path / "checkpoint", ID)


# -- replacing ------------------------------------------------------------------------------------


def test_the_one_before_is_kept(tmp_path):
    for number in (1, 2, 5):
        write(tmp_path, small(), number)
    assert numbers(tmp_path) == [5, 2]
    assert oldest_number(tmp_path) == 2


def test_a_damaged_checkpoint_never_takes_the_place_of_a_whole_one(tmp_path):
    for number in (1, 2):
        write(tmp_path, small(), number)
    blob = bytearray((tmp_path / "checkpoint").read_bytes())
    for at in (3, 20, 200, len(blob) - 1):
        damaged = bytearray(blob)
        damaged[at] ^= 1
        (tmp_path / "checkpoint").write_bytes(damaged)
        write(tmp_path, small(), 3)
        assert numbers(tmp_path) == [3, 1]
        assert read_checkpoint(tmp_path / "checkpoint.old", ID).state is CheckpointState.GOOD
    assert oldest_number(tmp_path) == 1
    assert oldest_number(tmp_path / "none") == 0


def test_kind_17_torn_writes_leave_the_old_ones(tmp_path, monkeypatch):
    for number in (1, 2):
        write(tmp_path, small(), number)

    def refuse(_fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refuse)
        with pytest.raises(DirectoryError, match="cannot be written: No space left") as caught:
            write(tmp_path, small(), 3)
    assert caught.value.remedy
    assert numbers(tmp_path) == [2, 1]
    assert {item.name for item in tmp_path.iterdir()} == {"checkpoint", "checkpoint.old"}
    write(tmp_path, small(), 4)
    assert numbers(tmp_path) == [4, 2]


def test_a_caller_that_goes_away_does_not_stop_the_write(tmp_path):
    async def run() -> None:
        for pause_s in (0, 0.0005, 0.001, 0.002):
            await write_checkpoint(tmp_path, small(), number=1, directory_id=ID)
            call = asyncio.create_task(
                write_checkpoint(tmp_path, many(5000), number=2, directory_id=ID)
            )
            await asyncio.sleep(pause_s)
            if call.cancel():
                with pytest.raises(asyncio.CancelledError):
                    await call
            assert numbers(tmp_path) == [2, 1]

    asyncio.run(run())
    assert {item.name for item in tmp_path.iterdir()} == {"checkpoint", "checkpoint.old"}


@pytest.mark.parametrize(
    ("renames", "left"), [(0, [2, 1]), (1, [0, 2]), (2, [3, 2])], ids=["none", "one", "both"]
)
def test_kind_17_torn_between_the_renames(tmp_path, monkeypatch, renames, left):
    """Killed after so many of the two renames: one whole checkpoint is always there."""
    for number in (1, 2):
        write(tmp_path, small(), number)
    replace, done = Path.replace, []

    def killed(path: Path, target: Path) -> Path:
        if len(done) == renames:
            raise KeyboardInterrupt
        done.append(target)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", killed)
    monkeypatch.setattr("kvtier.tiers.nvme_checkpoint.sync_directory", lambda _: killed("", ""))
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, small(), 3)
    monkeypatch.undo()
    assert numbers(tmp_path) == left
    assert oldest_number(tmp_path) == min(number for number in left if number)
    (tmp_path / "checkpoint.tmp").unlink(missing_ok=True)


def test_kind_17_torn_at_the_crash_point(tmp_path):
    code = f"""
import asyncio, pathlib
from kvtier.tiers.crash_points import arm_crash_point
from kvtier.tiers.nvme_checkpoint import write_checkpoint
from kvtier.tiers.nvme_snapshot import Snapshot

path, directory_id = pathlib.Path({str(tmp_path)!r}), bytes(range(16))
write = lambda number: asyncio.run(
    write_checkpoint(path, Snapshot.empty(), number=number, directory_id=directory_id)
)
write(1)
arm_crash_point("checkpoint.written")
write(2)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert numbers(tmp_path) == [1, 0]
    assert read_checkpoint(tmp_path / "checkpoint.tmp", ID).state is CheckpointState.GOOD
    write(tmp_path, small(), 3)
    assert numbers(tmp_path) == [3, 1]
    assert not (tmp_path / "checkpoint.tmp").exists()


def test_one_that_lacks_a_device_never_takes_the_place_of_one_that_has_it(tmp_path):
    whole, lacking = small(), dataclasses.replace(small(), waits={3: 70})
    numbers = []
    for number, snapshot in enumerate([whole, whole, lacking, lacking, whole, whole], 1):
        write(tmp_path, snapshot, number)
        newest, old = (read_checkpoint(tmp_path / name) for name in (CHECKPOINT, CHECKPOINT_OLD))
        assert newest.number == number
        assert newest.snapshot.waits == snapshot.waits
        numbers.append(old.number)
        assert oldest_number(tmp_path) == (old.number or number)
    assert numbers == [0, 1, 2, 2, 2, 5]
