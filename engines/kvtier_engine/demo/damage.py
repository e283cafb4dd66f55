"""Flips one byte of a stored page behind the daemon's back, as a stray write or bad memory would.

The arena is a memfd of the daemon; a process of the same user can open it through /proc. For the
demo and its tests alone: kvtier itself never opens it this way.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvtier_engine.errors import DemoFailed

__all__ = ["flip_payload_byte"]

_ARENA = "/memfd:kvtier-arena"
#: A record is a header block and the payload; slots count these blocks.
_BLOCK_BYTES = 4096


def flip_payload_byte(daemon_pid: int, slot: int, *, at: int) -> None:
    """Inverts the payload's byte `at` of the record in host slot `slot`."""
    arena = os.open(_arena_path(daemon_pid), os.O_RDWR)
    try:
        place = (slot + 1) * _BLOCK_BYTES + at
        (byte,) = os.pread(arena, 1, place)
        os.pwrite(arena, bytes([byte ^ 0xFF]), place)
    finally:
        os.close(arena)


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
