"""What a look at a device's files finds: others in their place, and what cannot be read now."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
from file_faults import CountedCalls
from nvme_parts import opened, record

from kvtier.errors import TierIOError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "device"


@pytest.mark.parametrize("how", ["by a copy", "by another"])
def test_a_segment_whose_file_was_replaced_is_noticed(path, how):
    """What is written now goes to a file that no start finds."""
    first, second, aside = path / "segment-00000000", path / "segment-00000001", path / "aside"
    with opened(path) as disk:
        disk.create_segment(0)
        disk.create_segment(1)
        disk.write_at(0, 0, [record()])
        disk.check_files()
        if how == "by a copy":
            shutil.copy(first, aside)
            aside.replace(first)
        else:
            first.rename(aside)
            second.rename(first)
            aside.rename(second)
        with pytest.raises(TierIOError, match="segment-00000000 was replaced by another file"):
            disk.check_files()
        disk.look_again()
        disk.check_files()
        assert disk.segments == ({0, 1} if how == "by a copy" else set())


def test_a_segment_that_cannot_be_read_now_may_be_another_time(path):
    class Failing(CountedCalls):
        def open(self, path: Path, flags: int) -> int:
            if path.name == "segment-00000001":
                raise OSError(errno.EIO, "Input/output error")
            return super().open(path, flags)

    with opened(path) as disk:
        for local in range(3):
            disk.create_segment(local)
    with (path / "segment-00000002").open("r+b") as file:
        file.write(b"something else")
    with opened(path, calls=Failing()) as disk:
        assert disk.rejected_segments == {1, 2}
        assert disk.unreadable_segments == {1}
        disk.create_segment(1)
        assert disk.unreadable_segments == set()
