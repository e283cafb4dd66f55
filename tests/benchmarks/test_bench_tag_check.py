"""The measurement of the tag check, and that it notices a check that fails."""

from __future__ import annotations

import pytest
import torch

from benchmarks import tag_check
from benchmarks.plan import Plan
from benchmarks.rows import Missing
from kvtier.client.device import DevicePool, PageTable, TagTracker


def test_a_row_for_each_batch():
    rows = list(tag_check.rows(Plan(quick=True, only=("device/verify",))))
    if not torch.cuda.is_available():
        assert rows.pop() == Missing(name="device/cuda", reason="no CUDA device")
    here = [row for row in rows if "-cpu-" in row.name]
    assert [row.name for row in here] == [
        "device/verify-cpu-1x64", "device/verify-cpu-8x64", "device/verify-cpu-32x64",
    ]  # fmt: skip
    assert all(row.value > 0 and row.reference == "the no-op tracker" for row in here)


def test_tables_that_are_not_sound_are_no_measurement():
    pool = DevicePool(tag_check.layout(1), 3)
    table = PageTable(pool)
    table.append(pool.allocate(2))
    assert tag_check.verify_us(TagTracker(pool), [table], 2) > 0
    table.pages[0] = 2
    with pytest.raises(AssertionError):
        tag_check.verify_us(TagTracker(pool), [table], 2)
