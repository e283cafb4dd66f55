"""Checkpoints to write and to compare: small ones with every column in use, and long ones."""

from __future__ import annotations

import asyncio
import dataclasses
import struct
from pathlib import Path

import numpy as np
import xxhash

from kvtier.tiers.nvme_checkpoint import (
    encode_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from kvtier.tiers.nvme_snapshot import PAGE_COLUMNS, Pages, Snapshot

ID = bytes(range(16))
GOLDEN = Path(__file__).parent.parent / "golden"


def small() -> Snapshot:
    """Three pages of two families, with every column in use; one page comes after an absent one."""
    pages = small_v1().pages
    wanted = np.arange(96, 128, dtype=np.uint8).reshape(1, 32)
    columns = {"key": np.concatenate([pages.key, wanted]), "parent": np.array([-1, 3, 0], np.int32)}
    return dataclasses.replace(small_v1(), pages=dataclasses.replace(pages, **columns))


def small_v1() -> Snapshot:
    """As version 1 knew them."""
    return Snapshot(
        last_generation=2**41,
        classes={7: 135168, 1 << 20: 8192},
        families=((bytes(range(32)), 3), (bytes(range(32, 64)), 2**40)),
        pages=Pages(
            family=np.array([0, 1, 0], np.uint32),
            shard=np.array([0, 65535, 1], np.uint16),
            key=np.arange(96, dtype=np.uint8).reshape(3, 32),
            generation=np.array([1, 2**41, 77], np.uint64),
            slot=np.array([7 << 16, 2**40, 8], np.uint64),
            length=np.array([131072, 1, 0], np.uint64),
            codec=np.array([1, 2, 1], np.uint8),
            lossy=np.array([0, 1, 0], np.uint8),
            parent=np.array([-1, -1, 0], np.int32),
        ),
        in_flight=(5, 2**40),
    )


def many(count: int, seed: int = 1) -> Snapshot:
    rng = np.random.default_rng(seed)
    columns = {
        name: rng.integers(0, 1, count, np.dtype(kind)) if width == 1 else np.zeros(0)
        for name, kind, width in PAGE_COLUMNS
    }
    columns["key"] = rng.integers(0, 256, (count, 32), np.uint8)
    columns["slot"] = np.arange(count, dtype=np.uint64) * 17
    columns["generation"] = rng.permutation(count).astype(np.uint64)
    return Snapshot(
        last_generation=count,
        classes=dict.fromkeys(range(count // 1000), 69632),
        families=((bytes(32), 1),),
        pages=Pages(**columns),
        in_flight=(),
    )


def blob_of(snapshot: Snapshot, number: int = 9) -> bytes:
    return b"".join(encode_checkpoint(snapshot, number=number, directory_id=ID))


def write(directory: Path, snapshot: Snapshot, number: int = 9) -> int:
    return asyncio.run(write_checkpoint(directory, snapshot, number=number, directory_id=ID))


def check_equal(found: Snapshot | None, wanted: Snapshot) -> None:
    assert found is not None
    for field in ("last_generation", "classes", "families", "in_flight"):
        assert getattr(found, field) == getattr(wanted, field)
    for (name, column), (_, expected) in zip(
        found.pages.columns(), wanted.pages.columns(), strict=True
    ):
        assert column.dtype == expected.dtype, name
        assert np.array_equal(column, expected), name


def write_golden() -> None:
    """How the golden file was made; kept so that the next version can be made alike."""
    blob = blob_of(small())
    lines = [blob[at : at + 32].hex() for at in range(0, len(blob), 32)]
    (GOLDEN / "checkpoint_v2.hex").write_text("\n".join(lines) + "\n")


def golden_bytes(version: int) -> bytes:
    return bytes.fromhex((GOLDEN / f"checkpoint_v{version}.hex").read_text())


def resealed(blob: bytearray) -> bytes:
    """With right sums, as a faulty writer would leave it."""
    blob[72:88] = xxhash.xxh3_128_digest(bytes(blob[128:]))
    blob[120:128] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(blob[:120])))
    return bytes(blob)


def numbers(directory: Path) -> list[int]:
    """Of the newest and of the one before it; 0: none, or damaged."""
    return [read_checkpoint(directory / name).number for name in ("checkpoint", "checkpoint.old")]
