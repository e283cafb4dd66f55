"""What the tests of the directory share: rows whose every field follows from key and generation,
both implementations, and memory that a test may write under a reader."""

from __future__ import annotations

import importlib.util
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from kvtier.core.page import Codec, Tier
from kvtier.tiers.memfd import create_read_only
from kvtier.transfer.local.directory import Directory
from kvtier.transfer.local.entry import name_word
from kvtier.transfer.local.loading import load_compiled
from kvtier.transfer.local.vectors import NumpyKernels

BOOT_ID = (5 << 64) | 0x1234567890ABCDEF
SEED = 0x0FEDCBA987654321
NAMESPACE, SHARD = 7, 3

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_LENGTH = np.uint64((1 << 48) - 1)

KERNELS = [
    pytest.param(
        "numba",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("numba") is None, reason="numba is not installed"
        ),
    ),
    "numpy",
]


def kernels_named(name: str):
    return load_compiled() if name == "numba" else NumpyKernels()


def keys_of(seed: int, count: int) -> np.ndarray:
    """(count, 32) uint8."""
    return np.random.default_rng(seed).integers(0, 256, (count, 32), np.uint8)


def rows_of(keys, generations, *, namespace=NAMESPACE, shard=SHARD) -> np.ndarray:
    """Entries without their mix. Words 6-11 belong to this key in this generation alone."""
    words = np.ascontiguousarray(keys).view(np.uint64)
    generations = np.broadcast_to(np.asarray(generations, np.uint64), len(words))
    rows = np.zeros((len(words), 16), np.uint64)
    rows[:, :4] = words
    rows[:, 4] = np.uint64(name_word(namespace, shard) | Tier.HOST << 48 | 0x11 << 56)
    rows[:, 5] = generations
    base = words[:, 0] ^ (words[:, 1] >> np.uint64(3))
    for word in range(6, 12):
        base = (base + generations + np.uint64(word)) * _FACTOR
        base ^= base >> np.uint64(31)
        rows[:, word] = base
    rows[:, 7] = (rows[:, 7] & _LENGTH) | np.uint64(Codec.RAW << 48)
    return rows


def directory(pages_max=64, *, kernels="numpy", namespaces_max=8, boot_id=BOOT_ID) -> Directory:
    return Directory(
        pages_max=pages_max,
        namespaces_max=namespaces_max,
        boot_id=boot_id,
        hash_seed=SEED,
        kernels=kernels_named(kernels),
    )


def content(made: Directory) -> bytes:
    """The whole file, as a reader could see it."""
    return os.pread(made.fd, made.header.file_bytes, 0)


@contextmanager
def forged(data: bytes) -> Iterator[tuple[int, mmap.mmap]]:
    """A sealed file that holds `data`: (descriptor, its writable map)."""
    fd, pages = create_read_only("kvtier-forged", len(data), tier=Tier.HOST)
    try:
        pages[:] = data
        yield fd, pages
    finally:
        os.close(fd)
        pages.close()
