"""What tests of the local plane share: self-describing pages, and hands in the daemon's memory."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import kvtier
from kvtier.transfer.planes.values import OpenedNamespace

__all__ = [
    "NBYTES",
    "arena_fd",
    "attached",
    "flip",
    "key_of",
    "opaque",
    "opened_as",
    "pages_of",
    "separate_keys",
    "two_segments",
]

NBYTES = 64 << 10

_BLOCK_BYTES = 4096


def attached(kv: kvtier.Connection) -> None:
    """Waits until shared memory is read; the first time in a process loads compiled code."""
    deadline = time.monotonic() + 60
    while not kv.local.is_attached:
        assert time.monotonic() < deadline, kv.local.reason
        time.sleep(0.01)


def key_of(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


def opened_as(number: int, *, boot_id: int, generation: int, nbytes: int) -> OpenedNamespace:
    """A namespace that no daemon has opened."""
    return OpenedNamespace(
        session_id=1,
        handle=1,
        boot_id=boot_id,
        fingerprint=bytes(range(32)),
        generation=generation,
        raw_bytes=nbytes,
        fp8_bytes=0,
        namespace_number=number,
    )


def opaque(nbytes: int, *, shard: int = 0, shards: int = 1) -> kvtier.Layout:
    """Pages of `nbytes` for each shard."""
    layers = next(n for n in range(1, 16) if nbytes % n == 0 and nbytes // n <= 1 << 20)
    segment = kvtier.Segment(
        name="o",
        role=kvtier.Role.OPAQUE,
        dtype="uint8",
        layers=layers,
        heads=1,
        dim=nbytes // layers,
        scale_rule=kvtier.ScaleRule.NONE,
    )
    options = {}
    if shards > 1:
        options["shard_count"] = shards
        options["shard"] = kvtier.Shard(index=shard, layers=(0, layers), heads=(0, 1))
    return kvtier.Layout.from_segments(
        [segment], model_id="m", revision="r1", page_tokens=1, kv_compute="uint8", **options
    )


def two_segments(*, layers: int, heads: int, dim: int) -> kvtier.Layout:
    """Pages of 4 tokens of bfloat16, k and v, which can be packed."""
    return kvtier.Layout.from_segments(
        [
            kvtier.Segment(
                name=name,
                role=role,
                dtype="bfloat16",
                layers=layers,
                heads=heads,
                dim=dim,
                scale_rule=kvtier.ScaleRule.LAYER_HEAD,
            )
            for name, role in (("k", kvtier.Role.KEY), ("v", kvtier.Role.VALUE))
        ],
        model_id="m",
        revision="r1",
        page_tokens=4,
        kv_compute="bfloat16",
    )


def pages_of(keys: Sequence[bytes], nbytes: int) -> np.ndarray:
    """A page for each key, made of it."""
    out = np.empty((len(keys), nbytes), np.uint8)
    for row, key in zip(out, keys, strict=True):
        row[:] = np.resize(np.frombuffer(key, np.uint8), nbytes)
        row[: min(8, nbytes)] ^= 0x5A
    return out


def arena_fd(pid: int) -> int:
    """The daemon's arena, writable, as a process of the same user can have it."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:
            continue
        if target.startswith("/memfd:kvtier-arena"):
            return os.open(entry, os.O_RDWR | os.O_CLOEXEC)
    raise AssertionError(f"process {pid} has no arena")


def flip(pid: int, slot: int, at: int) -> None:
    """Inverts byte `at` of the payload in a host slot."""
    fd = arena_fd(pid)
    try:
        place = (slot + 1) * _BLOCK_BYTES + at
        (byte,) = os.pread(fd, 1, place)
        os.pwrite(fd, bytes([byte ^ 0xFF]), place)
    finally:
        os.close(fd)


def separate_keys(ns: kvtier.Namespace, first: int, count: int) -> list[bytes]:
    """Keys that are no chain."""
    return [ns.keys([token])[0] for token in range(first, first + count)]
