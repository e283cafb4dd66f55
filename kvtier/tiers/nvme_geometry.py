"""How the NVMe tier is cut: slots, slabs and devices, and what fits under its byte cap.

A slab is one segment file. Its number is `device << 20 | local`; slots are numbered through all
slabs there could be, in units of 4 KiB: `slot = slab * (segment_bytes // 4096) + unit`. So a slot
keeps its number whatever the cap or the order of the paths becomes later: `segment_bytes` and the
devices' numbers are chosen at the first start and kept in the daemon directory's file `geometry`:

    msgpack map in a sealed file of kind "geom":
    version 1 | directory_id 16 bytes | segment_bytes | devices: list of [number, path]

Functions without state; one writer a directory.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from kvtier.errors import DirectoryError, InvalidConfigValue
from kvtier.tiers.base import SLOT_BYTES
from kvtier.tiers.nvme_segment import SEGMENT_HEADER_BYTES
from kvtier.tiers.nvme_state import DIRECTORY_ID_BYTES
from kvtier.tiers.sealed_file import read_sealed, write_sealed

__all__ = [
    "CHECKPOINT_BYTES_PER_PAGE",
    "DEVICES_MAX",
    "DEVICE_SLABS_MAX",
    "DIRECTORY_ID_BYTES",
    "GEOMETRY_FILE",
    "GEOMETRY_VERSION",
    "SEGMENT_BYTES_MIN",
    "Geometry",
    "Plan",
    "first_segment_bytes",
    "journal_bytes_max",
    "load_geometry",
    "plan",
    "save_geometry",
    "segment_file_bytes",
    "slab_number",
    "split_slab",
    "whole_mib",
]

GEOMETRY_VERSION = 1
DEVICES_MAX = 16
_DEVICE_SHIFT = 20
#: Local numbers of a device's segments are below this.
DEVICE_SLABS_MAX = 1 << _DEVICE_SHIFT

SEGMENT_BYTES_MIN = 64 << 10
_SEGMENT_BYTES_MAX = 256 << 20
_SEGMENTS_OF_SHARE = 16

CHECKPOINT_BYTES_PER_PAGE = 80
#: The one in use, the one before it, and the one that is being written.
_CHECKPOINTS_MAX = 3
#: One for each checkpoint that may have to be recovered from, and the one that is written to.
_JOURNALS_MAX = 3
_SMALL_FILES_BYTES = 256 << 10
#: A header block and one of payload: no page takes less.
_RECORD_BYTES_MIN = 8192

_GEOMETRY = "geometry"
_KIND = b"geom"
#: Name and kind of the sealed file.
GEOMETRY_FILE = (_GEOMETRY, _KIND)


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """What must not change while there are pages. `devices` are (number, absolute path)."""

    directory_id: bytes
    segment_bytes: int
    devices: tuple[tuple[int, Path], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What may exist at once: segments on each device, and bytes of everything else."""

    segments_per_device: int
    metadata_bytes: int


def slab_number(device: int, local: int) -> int:
    assert 0 <= device < DEVICES_MAX, device
    assert 0 <= local < DEVICE_SLABS_MAX, local
    return device << _DEVICE_SHIFT | local


def split_slab(slab: int) -> tuple[int, int]:
    """(device number, local number)"""
    return slab >> _DEVICE_SHIFT, slab & DEVICE_SLABS_MAX - 1


def first_segment_bytes(cap_bytes: int, *, devices: int = 1) -> int:
    """The `segment_bytes` of a new tier: 256 MiB, or a 16th of a device's share if that is less."""
    share = min(_SEGMENT_BYTES_MAX, cap_bytes // (_SEGMENTS_OF_SHARE * devices))
    return max(SEGMENT_BYTES_MIN, share - share % SLOT_BYTES)


def journal_bytes_max(cap_bytes: int) -> int:
    """How long a journal may become before a checkpoint must replace it."""
    return min(max(cap_bytes // 256, 64 << 10), 16 << 20)


def segment_file_bytes(segment_bytes: int) -> int:
    """The most disk space that a segment takes.

    Beside the file itself that is what the file system needs to remember where its pieces lie,
    which counts as the file's (st_blocks): 1/4096 is enough for pieces of 48 KiB on average.
    """
    pieces = segment_bytes >> 12
    return segment_bytes + SEGMENT_HEADER_BYTES + pieces + -pieces % SLOT_BYTES


def plan(cap_bytes: int, *, devices: int, segment_bytes: int, pages_max: int) -> Plan:
    """The most segments a device for which everything on disk stays within `cap_bytes`.

    Raises InvalidConfigValue if that is not even one.
    """
    assert devices > 0, devices
    journals_bytes = _JOURNALS_MAX * journal_bytes_max(cap_bytes)
    row_bytes = segment_file_bytes(segment_bytes) * devices

    def other_bytes(segments: int) -> int:
        pages = min(pages_max, segments * segment_bytes * devices // _RECORD_BYTES_MIN)
        return _CHECKPOINTS_MAX * pages * CHECKPOINT_BYTES_PER_PAGE + _SMALL_FILES_BYTES

    def total_bytes(segments: int) -> int:
        return segments * row_bytes + other_bytes(segments) + journals_bytes

    upper = min(DEVICE_SLABS_MAX, cap_bytes // row_bytes)
    segments = bisect.bisect_right(range(upper + 1), cap_bytes, key=total_bytes) - 1
    if segments < 1:
        least_bytes = _with_journals(row_bytes + other_bytes(1))
        raise InvalidConfigValue(
            f"nvme.bytes = {cap_bytes} bytes has no room for a segment of {segment_bytes} bytes on "
            f"each of {devices} devices and for the tier's own files",
            remedy=f"set nvme.bytes to {whole_mib(least_bytes)} or more, or name fewer nvme.paths",
        )
    return Plan(segments_per_device=segments, metadata_bytes=other_bytes(segments) + journals_bytes)


def _with_journals(others_bytes: int) -> int:
    """The least cap that has room for `others_bytes` and for its own journals."""
    # A journal is at most 1/256 of the cap, or the least there is.
    enough = max(
        others_bytes * 256 // (256 - _JOURNALS_MAX) + 1,
        others_bytes + _JOURNALS_MAX * journal_bytes_max(0),
    )
    return others_bytes + _JOURNALS_MAX * journal_bytes_max(enough)


def whole_mib(nbytes: int) -> str:
    """A size that a setting may have, and that is no less."""
    return f"{-(-nbytes // (1 << 20))}MiB"


def save_geometry(directory: Path, geometry: Geometry) -> None:
    """Makes it durable. Raises DirectoryError when the file system refuses."""
    document = {
        "version": GEOMETRY_VERSION,
        "directory_id": geometry.directory_id,
        "segment_bytes": geometry.segment_bytes,
        "devices": [[number, str(path)] for number, path in geometry.devices],
    }
    write_sealed(directory / _GEOMETRY, _KIND, msgpack.packb(document, use_bin_type=True))


def load_geometry(directory: Path) -> Geometry | None:
    """None if the directory has none yet.

    Raises DirectoryError: damaged, unreadable, or of another version.
    """
    path = directory / _GEOMETRY
    payload = read_sealed(path, _KIND)
    if payload is None:
        return None
    try:
        document = msgpack.unpackb(payload, raw=False)
    except ValueError as error:
        raise _unusable(path, f"cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise _unusable(path, "does not hold a geometry")
    version = document.get("version")
    if version != GEOMETRY_VERSION:
        raise _unusable(path, f"has version {version}, this daemon knows {GEOMETRY_VERSION}")
    return _geometry(path, document)


def _geometry(path: Path, document: dict[str, Any]) -> Geometry:
    match document:
        case {
            "directory_id": bytes(directory_id),
            "segment_bytes": int(segment_bytes),
            "devices": list(items),
        } if len(directory_id) == DIRECTORY_ID_BYTES:
            devices = tuple(
                (item[0], Path(item[1]))
                for item in items
                if isinstance(item, list) and [type(value) for value in item] == [int, str]
            )
        case _:
            raise _unusable(path, "does not hold a geometry")
    numbers = {number for number, _ in devices}
    if segment_bytes < SEGMENT_BYTES_MIN or segment_bytes % SLOT_BYTES:
        raise _unusable(path, f"has segments of {segment_bytes} bytes")
    if not len(items) == len(devices) == len(numbers) <= DEVICES_MAX or not numbers <= set(
        range(DEVICES_MAX)
    ):
        raise _unusable(path, f"has devices {items}")
    return Geometry(directory_id=directory_id, segment_bytes=segment_bytes, devices=devices)


def _unusable(path: Path, what: str) -> DirectoryError:
    return DirectoryError(
        f"{path} {what}",
        remedy="start the version of kvtier that wrote it, or start once with `--discard-cache` "
        "(every page on NVMe is then a miss)",
    )
