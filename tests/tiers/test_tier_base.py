"""Errors that name the place, and buffers as flat bytes."""

from __future__ import annotations

import errno
import os

import ml_dtypes
import numpy as np
import pytest

from kvtier.core.page import Tier
from kvtier.errors import TierIOError
from kvtier.testing.memory_tier import MemoryTier
from kvtier.tiers.base import (
    TierOperation,
    checked_start,
    errno_of,
    flat_bytes,
    tier_io_error,
)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_an_error_names_tier_slot_operation_and_cause(number):
    cause = OSError(number, os.strerror(number))
    error = tier_io_error(Tier.NVME, TierOperation.WRITE, cause, slot=17)
    words = f"nvme tier: write failed at slot 17: {os.strerror(number)}"
    assert str(error) == f"{words} ({errno.errorcode[number]})"
    assert error.remedy
    assert errno_of(error) == number
    assert error.__cause__ is cause


def test_an_error_without_slot_or_errno():
    error = tier_io_error(Tier.HOST, TierOperation.OPEN, OSError())
    assert str(error) == "host tier: open failed: Success (0)"
    assert errno_of(error) == 0
    assert errno_of(TierIOError("x", remedy="y")) == 0


@pytest.mark.parametrize(
    "buffer",
    [
        b"\x01\x02\x03\x04",
        bytearray(b"\x01\x02\x03\x04"),
        memoryview(b"\x00\x01\x02\x03\x04")[1:],
        np.array([[0x0201], [0x0403]], dtype="<u2"),
        np.array([0x0201, 0x0403], dtype="<u2").view(ml_dtypes.bfloat16),
    ],
)
def test_flat_bytes(buffer):
    view = flat_bytes(buffer)
    assert (view.format, view.ndim, view.tobytes()) == ("B", 1, b"\x01\x02\x03\x04")


@pytest.mark.parametrize("empty", [b"", np.empty((0, 7), np.float32), memoryview(b"")])
def test_flat_bytes_of_nothing(empty):
    assert flat_bytes(empty).nbytes == 0


def test_flat_bytes_writes_through():
    array = np.zeros((2, 3), dtype=np.float16)
    flat_bytes(array)[:] = b"\xff" * 12
    assert array.tobytes() == b"\xff" * 12


@pytest.mark.parametrize(
    "strided", [np.zeros((4, 4))[:, :2], memoryview(b"abcd")[::2]], ids=["array", "view"]
)
def test_flat_bytes_refuses_gaps(strided):
    with pytest.raises(TypeError):
        flat_bytes(strided)


def test_checked_start_beyond_32_bits():
    tier = MemoryTier(1 << 40)
    where = {"offset": (1 << 32) + 5, "length": 1 << 33}
    found = checked_start(tier, TierOperation.READ, np.uint32((1 << 32) - 1 >> 8), **where)
    assert found == ((1 << 24) - 1) * 4096 + (1 << 32) + 5
