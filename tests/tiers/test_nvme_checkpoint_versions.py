"""The bytes of a checkpoint as they lie on disks, the version before, and pages that wait for one
that is not there.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kvtier.errors import DirectoryError
from kvtier.tiers.nvme_checkpoint import (
    CheckpointState,
    oldest_number,
    read_checkpoint,
)
from kvtier.tiers.nvme_geometry import CHECKPOINT_BYTES_PER_PAGE
from kvtier.tiers.nvme_snapshot import Pages
from tests.tiers.checkpoint_parts import (
    ID,
    blob_of,
    check_equal,
    golden_bytes,
    many,
    numbers,
    resealed,
    small,
    small_v1,
    write,
)


def test_golden_bytes(tmp_path):
    """These bytes lie on disks: a difference means a new CHECKPOINT_VERSION, not a new file."""
    golden = golden_bytes(2)
    assert blob_of(small()) == golden
    path = tmp_path / "checkpoint"
    path.write_bytes(golden)
    found = read_checkpoint(path, ID)
    assert (found.state, found.number, found.directory_id) == (CheckpointState.GOOD, 9, ID)
    check_equal(found.snapshot, small())


def test_the_version_before_is_read(tmp_path):
    """It is replaced as any other, and kept beside the new one."""
    path = tmp_path / "checkpoint"
    path.write_bytes(golden_bytes(1))
    found = read_checkpoint(path, ID)
    assert (found.state, found.number, found.directory_id) == (CheckpointState.GOOD, 9, ID)
    check_equal(found.snapshot, small_v1())
    assert oldest_number(tmp_path) == 9
    write(tmp_path, small(), 10)
    assert numbers(tmp_path) == [10, 9]
    check_equal(read_checkpoint(tmp_path / "checkpoint.old", ID).snapshot, small_v1())


def test_version_1_has_no_absent_pages(tmp_path):
    """What lies where version 2 counts them is not looked at."""
    blob = bytearray(golden_bytes(1))
    blob[88] = 1
    path = tmp_path / "checkpoint"
    path.write_bytes(resealed(blob))
    check_equal(read_checkpoint(path, ID).snapshot, small_v1())


def test_another_version_is_refused_by_name(tmp_path):
    blob = bytearray(blob_of(small()))
    blob[8] = 3
    path = tmp_path / "checkpoint"
    path.write_bytes(resealed(blob))
    with pytest.raises(
        DirectoryError, match="version 3; this build reads version 1 and 2"
    ) as caught:
        read_checkpoint(path, ID)
    assert "--discard-cache" in caught.value.remedy
    assert path.read_bytes() == blob


@pytest.mark.parametrize(("count", "kept"), [(1, 1), (1024, 1024), (2000, 1149), (40_000, 3524)])
def test_of_many_absent_pages_those_of_the_hottest_pages_are_kept(tmp_path, count, kept):
    """The file stays within what the plan of the tier has for it."""
    plain = many(count)
    wanted = np.random.default_rng(2).integers(0, 256, (count, 32), np.uint8)
    columns = {"key": np.concatenate([plain.pages.key, wanted])}
    columns["parent"] = (count + np.arange(count)[::-1]).astype(np.int32)
    full = dataclasses.replace(plain, pages=dataclasses.replace(plain.pages, **columns))
    size = write(tmp_path, full)
    assert size <= count * CHECKPOINT_BYTES_PER_PAGE + 4096 + 32 * 1024
    pages = read_checkpoint(tmp_path / "checkpoint", ID).snapshot.pages
    assert (len(pages), pages.absent) == (count, kept)
    assert pages.parent[:-kept].tolist() == [-1] * (count - kept)
    assert np.array_equal(pages.key[pages.parent[-kept:]], wanted[::-1][-kept:])
    assert np.array_equal(pages.slot, plain.pages.slot)


def test_what_pages_that_are_taken_come_after_stays_known():
    keys = np.arange(7 * 32, dtype=np.uint8).reshape(7, 32)
    columns = dict(many(5).pages.columns())
    columns |= {"key": keys, "parent": np.array([5, 0, 6, 2, -1], np.int32)}
    pages = Pages(**columns)
    taken = pages.take(np.array([4, 3, 1, 0]))
    # The page before 3 is not among them any more, nobody comes after page 6.
    assert (taken.key == keys[[4, 3, 1, 0, 2, 5]]).all()
    assert taken.parent.tolist() == [-1, 4, 3, 5]
    assert (taken.slot == pages.slot[[4, 3, 1, 0]]).all()
