"""Copies of many pieces: every byte of each piece and no other, at any alignment and length."""

from __future__ import annotations

import numpy as np
import pytest

from kvtier.transfer.local.protocol import STREAM_BYTES_MIN
from tests.transfer.local.directory_parts import KERNELS, kernels_named

LENGTHS = [0, 1, 63, 64, 65, 4096, STREAM_BYTES_MIN - 1, STREAM_BYTES_MIN, STREAM_BYTES_MIN + 77]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("seed", range(3))
def test_pieces_are_copied_whole_and_nothing_else(kernels, seed):
    draw = np.random.default_rng(seed)
    lengths = draw.permutation(np.array(LENGTHS * 2, np.int64))
    gaps = draw.integers(1, 130, len(lengths))
    offsets = np.cumsum(lengths + gaps) - lengths
    # The targets in another order, at other distances.
    order = draw.permutation(len(lengths))
    places = np.empty(len(lengths), np.int64)
    places[order] = np.cumsum((lengths + 71)[order]) - lengths[order]
    source = draw.integers(0, 256, int(offsets[-1] + lengths[-1]) + 100, np.uint8)
    target = np.full(int(places.max() + lengths.max()) + 100, 0xA5, np.uint8)
    expected = target.copy()
    for offset, place, length in zip(offsets, places, lengths, strict=True):
        expected[place : place + length] = source[offset : offset + length]
    kernels_named(kernels).copy_many(
        source.ctypes.data, offsets, target.ctypes.data + places, lengths
    )
    assert np.array_equal(target, expected)


@pytest.mark.parametrize("kernels", KERNELS)
def test_no_pieces(kernels):
    none = np.empty(0, np.int64)
    kernels_named(kernels).copy_many(0, none, none, none)
