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
from kvtier.tiers.nvme_checkpoint import (
    CheckpointState,
    encode_checkpoint,
    oldest_number,
    read_checkpoint,
    write_checkpoint,
)
from kvtier.tiers.nvme_geometry import CHECKPOINT_BYTES_PER_PAGE
from kvtier.tiers.nvme_snapshot import PAGE_COLUMNS, Pages, Snapshot

ID = bytes(range(16))
GOLDEN = Path(__file__).parent.parent / "golden" / "checkpoint_v1.hex"


def small() -> Snapshot:
    """Three pages of two families, with every column in use."""
    return Snapshot(
        last_generation=2**41,
        classes={7: 135168, 1 << 20: 8192},
        families=((bytes(range(32)), 3), (bytes(range(32, 64)), 2**40)),
        pages=Pages(
            family=np.array([0, 1, 0], np.uint32),
            shard=np.array([0, 65535, 1], np.uint16),
            key=np.arange(96, dtype=np.uint8).reshape(3, 32),
            generation=np.array([1, 2**41, 77], np.uint64),
            slot=np.array([7 << 16, 2**40, 8], np.uint64),
            length=np.array([131072, 1, 0], np.uint64),
            codec=np.array([1, 2, 1], np.uint8),
            lossy=np.array([0, 1, 0], np.uint8),
            parent=np.array([-1, -1, 0], np.int32),
        ),
        in_flight=(5, 2**40),
    )


def many(count: int, seed: int = 1) -> Snapshot:
    rng = np.random.default_rng(seed)
    columns = {
        name: rng.integers(0, 1, count, np.dtype(kind)) if width == 1 else np.zeros(0)
        for name, kind, width in PAGE_COLUMNS
    }
    columns["key"] = rng.integers(0, 256, (count, 32), np.uint8)
    columns["slot"] = np.arange(count, dtype=np.uint64) * 17
    columns["generation"] = rng.permutation(count).astype(np.uint64)
    return Snapshot(
        last_generation=count,
        classes=dict.fromkeys(range(count // 1000), 69632),
        families=((bytes(32), 1),),
        pages=Pages(**columns),
        in_flight=(),
    )


def blob_of(snapshot: Snapshot, number: int = 9) -> bytes:
    return b"".join(encode_checkpoint(snapshot, number=number, directory_id=ID))


def write(directory: Path, snapshot: Snapshot, number: int = 9) -> int:
    return asyncio.run(write_checkpoint(directory, snapshot, number=number, directory_id=ID))


def check_equal(found: Snapshot | None, wanted: Snapshot) -> None:
    assert found is not None
    for field in ("last_generation", "classes", "families", "in_flight"):
        assert getattr(found, field) == getattr(wanted, field)
    for (name, column), (_, expected) in zip(
        found.pages.columns(), wanted.pages.columns(), strict=True
    ):
        assert column.dtype == expected.dtype, name
        assert np.array_equal(column, expected), name


def write_golden() -> None:
    """How the golden file was made; kept so that the next version can be made alike."""
    blob = blob_of(small())
    lines = [blob[at : at + 32].hex() for at in range(0, len(blob), 32)]
    GOLDEN.write_text("\n".join(lines) + "\n")


# -- bytes ----------------------------------------------------------------------------------------


def test_golden_bytes(tmp_path):
    """These bytes lie on disks: a difference means a new CHECKPOINT_VERSION, not a new file."""
    golden = bytes.fromhex(GOLDEN.read_text())
    assert blob_of(small()) == golden
    path = tmp_path / "checkpoint"
    path.write_bytes(golden)
    found = read_checkpoint(path, ID)
    assert (found.state, found.number, found.directory_id) == (CheckpointState.GOOD, 9, ID)
    check_equal(found.snapshot, small())


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
    head = b"\x89KVTCKP\n" + struct.pack("<II16s5Q", 1, 128, ID, *numbers)
    head += xxhash.xxh3_128_digest(body) + bytes(32)
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


def resealed(blob: bytearray) -> bytes:
    """With right sums, as a faulty writer would leave it."""
    blob[72:88] = xxhash.xxh3_128_digest(bytes(blob[128:]))
    blob[120:128] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(blob[:120])))
    return bytes(blob)


def test_a_count_that_the_file_cannot_hold_is_bad(tmp_path):
    blob = bytearray(blob_of(small()))
    blob[48:56] = struct.pack("<Q", 2**60)
    path = tmp_path / "checkpoint"
    path.write_bytes(resealed(blob))
    assert read_checkpoint(path, ID).state is CheckpointState.BAD


def test_another_version_is_refused_by_name(tmp_path):
    blob = bytearray(blob_of(small()))
    blob[8] = 2
    path = tmp_path / "checkpoint"
    path.write_bytes(resealed(blob))
    with pytest.raises(DirectoryError, match="has version 2; this build reads version 1") as caught:
        read_checkpoint(path, ID)
    assert "--discard-cache" in caught.value.remedy
    assert path.read_bytes() == blob


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
    monkeypatch.setattr(Path, "read_bytes", failing)
    with pytest.raises(DirectoryError, match="checkpoint cannot be read: Input/output error"):
        read_checkpoint(tmp_path / "checkpoint", ID)


# -- replacing ------------------------------------------------------------------------------------


def numbers(directory: Path) -> list[int]:
    """Of the newest and of the one before it; 0: none, or damaged."""
    return [read_checkpoint(directory / name).number for name in ("checkpoint", "checkpoint.old")]


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
