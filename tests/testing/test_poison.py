"""Poison is found wherever a byte was not loaded."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.testing.cells import make_page
from kvtier.testing.poison import POISON_BYTE, fill_poison, has_poison, poison_bytes, poison_runs


def test_filling():
    array = np.zeros((3, 5), dtype=np.float32)
    fill_poison(array)
    assert array.tobytes() == poison_bytes(60) == b"\xa5" * 60
    part = bytearray(10)
    fill_poison(memoryview(part)[2:4])
    assert bytes(part) == bytes(2) + b"\xa5\xa5" + bytes(6)
    with pytest.raises(ValueError, match="read-only"):
        fill_poison(b"read-only")


@pytest.mark.parametrize(
    ("start", "length"), [(0, 16), (0, 64), (5, 16), (48, 16), (47, 17), (10, 40)]
)
def test_a_run_anywhere(start, length):
    data = bytearray(64)
    data[start : start + length] = poison_bytes(length)
    assert has_poison(data)
    assert poison_runs(data) == [(start, length)]


def test_short_runs_are_chance():
    data = (poison_bytes(15) + b"\0") * 4
    assert not has_poison(data)
    assert poison_runs(data, 15) == [(0, 15), (16, 15), (32, 15), (48, 15)]
    assert not has_poison(b"")
    assert not has_poison(make_page(65536, namespace="n", key=b"k", version=POISON_BYTE))


def test_one_unloaded_cell_in_a_page():
    page = bytearray(make_page(2 << 20, namespace="n", key=b"k", version=1))
    page[1 << 20 : (1 << 20) + 64] = poison_bytes(64)
    assert poison_runs(page) == [(1 << 20, 64)]
