"""Poison: bytes that say "nobody loaded this", and the search for them in what a caller got back.

Thread rule: functions without state.
"""

from __future__ import annotations

import numpy as np

from kvtier.tiers.base import Buffer, flat_bytes
from kvtier.tiers.host import POISON_BYTE

__all__ = ["POISON_BYTE", "fill_poison", "has_poison", "poison_bytes", "poison_runs"]

#: A run this long does not happen by chance: 2^-128 for random bytes.
_RUN_BYTES_MIN = 16


def poison_bytes(length: int) -> bytes:
    return bytes([POISON_BYTE]) * length


def fill_poison(buffer: Buffer) -> None:
    """Overwrite all of a writable buffer."""
    np.frombuffer(flat_bytes(buffer), dtype=np.uint8).fill(POISON_BYTE)


def has_poison(buffer: Buffer, run_bytes: int = _RUN_BYTES_MIN) -> bool:
    """Whether `buffer` holds `run_bytes` or more poison bytes in a row."""
    return bool(poison_runs(buffer, run_bytes))


def poison_runs(buffer: Buffer, run_bytes: int = _RUN_BYTES_MIN) -> list[tuple[int, int]]:
    """(start, length) of every run of at least `run_bytes` poison bytes, in order."""
    data = np.frombuffer(flat_bytes(buffer), dtype=np.uint8)
    edges = np.diff((data == POISON_BYTE).astype(np.int8), prepend=0, append=0)
    starts = np.flatnonzero(edges == 1)
    lengths = np.flatnonzero(edges == -1) - starts
    wanted = lengths >= run_bytes
    return list(zip(starts[wanted].tolist(), lengths[wanted].tolist(), strict=True))
