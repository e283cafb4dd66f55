"""Devices and tiers of small segments for the tests of the NVMe tier."""

from __future__ import annotations

import contextlib

import numpy as np

from kvtier.tiers.direct_file import SYSTEM_CALLS, DirectMode
from kvtier.tiers.nvme import NvmeTier, open_device
from kvtier.tiers.nvme_geometry import slab_number

DIRECTORY_ID = b"0123456789abcdef"
SEGMENT_BYTES = 1 << 20
UNITS = SEGMENT_BYTES // 4096


def device(path, number=0, *, segment_bytes=SEGMENT_BYTES, calls=SYSTEM_CALLS, **options):
    return open_device(
        path,
        directory_id=options.pop("directory_id", DIRECTORY_ID),
        number=number,
        segment_bytes=segment_bytes,
        calls=calls,
        mode=options.pop("mode", DirectMode.AUTO),
        **options,
    )


@contextlib.contextmanager
def opened(path, **options):
    found = device(path, **options)
    try:
        yield found
    finally:
        found.close()


def tier_of(*devices, segment_bytes=SEGMENT_BYTES, slabs=()):
    tier = NvmeTier(devices, segment_bytes=segment_bytes)
    for slab in slabs:
        tier.create_segment(slab)
    return tier


def slot_of(device_number, local, unit=0, *, units=UNITS):
    return slab_number(device_number, local) * units + unit


def record(length=100_000, seed=1):
    """Header and payload, padded, as they lie in an arena: an aligned array."""
    size = 4096 + length + -length % 4096
    found = np.zeros(size + 4096, dtype=np.uint8)
    found = found[-found.ctypes.data % 4096 :][:size]
    found[: 4096 + length] = np.random.default_rng(seed).integers(0, 256, 4096 + length, np.uint8)
    return found


def names(path):
    return sorted(item.name for item in path.iterdir())
