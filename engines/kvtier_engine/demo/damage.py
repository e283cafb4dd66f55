"""Flips one byte of a stored page behind the daemon's back, as a stray write, bad memory or a bad
disk would.

The arena is a memfd of the daemon; a process of the same user can open it through /proc. Segment
files of the NVMe tier are ordinary files. For the demo and its tests alone: kvtier itself never
opens them this way.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvtier_engine.errors import DemoFailed

__all__ = ["flip_payload_byte", "flip_stored_byte"]

_ARENA = "/memfd:kvtier-arena"
#: A record is a header block and the payload; slots count these blocks.
_BLOCK_BYTES = 4096
_RECORD_MAGIC = b"\x89KVTREC\n"
_KEY_AT = 48  # in the header block


def flip_payload_byte(daemon_pid: int, slot: int, *, at: int) -> None:
    """Inverts the payload's byte `at` of the record in host slot `slot`."""
    arena = os.open(_arena_path(daemon_pid), os.O_RDWR)
    try:
        place = (slot + 1) * _BLOCK_BYTES + at
        (byte,) = os.pread(arena, 1, place)
        os.pwrite(arena, bytes([byte ^ 0xFF]), place)
    finally:
        os.close(arena)


def flip_stored_byte(nvme_directory: Path, key: bytes, *, at: int) -> None:
    """Inverts the payload's byte `at` of every record of the page `key` in the segment files."""
    found = 0
    for segment in sorted(nvme_directory.glob("segment-*")):
        data = segment.read_bytes()
        places = [
            start
            for start in range(0, len(data) - _BLOCK_BYTES, _BLOCK_BYTES)
            if data.startswith(_RECORD_MAGIC, start) and data.startswith(key, start + _KEY_AT)
        ]
        with segment.open("r+b") as file:
            for start in places:
                file.seek(start + _BLOCK_BYTES + at)
                file.write(bytes([data[start + _BLOCK_BYTES + at] ^ 0xFF]))
        found += len(places)
    if not found:
        raise DemoFailed(
            f"no segment file in {nvme_directory} holds the page {key.hex()}",
            remedy="it was not durable when the daemon ended; its log says why",
        )


def _arena_path(pid: int) -> Path:
    for entry in sorted(Path(f"/proc/{pid}/fd").iterdir()):
        try:
            target = str(entry.readlink())
        except FileNotFoundError:
            continue  # closed since it was listed
        if target.startswith(_ARENA):
            return entry
    raise DemoFailed(
        f"process {pid} has no open file {_ARENA}",
        remedy="run the demo as the user that started the daemon",
    )
