"""Which path is which device: by the file in its directory, so that a path may change.

What a start goes by, and everybody who looks. Blocks as long as the devices do; any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvtier.errors import DirectoryError
from kvtier.tiers.nvme_directory import read_identity
from kvtier.tiers.nvme_geometry import DEVICES_MAX, Geometry

__all__ = ["with_paths"]


def with_paths(known: Geometry, paths: Sequence[Path]) -> Geometry:
    """`known` with a device number for every path: that of its own file, that which it had, or the
    next free one. Of two copies of one device the first counts; the other is refused when opened.
    """
    numbers: dict[Path, int] = {}
    for path in paths:
        own = _number_on(path, known.directory_id)
        if own is not None and own not in numbers.values():
            numbers[path] = own
    for number, path in known.devices:
        if path not in numbers and number not in numbers.values():
            numbers[path] = number
    if len(numbers.keys() | set(paths)) > DEVICES_MAX:
        # The numbers of paths that are not used any more are given again.
        numbers = {path: number for path, number in numbers.items() if path in paths}
    for path in paths:
        if path not in numbers:
            numbers[path] = next(n for n in range(DEVICES_MAX) if n not in numbers.values())
    devices = sorted((number, path) for path, number in numbers.items())
    return replace(known, devices=tuple(devices))


def _number_on(path: Path, directory_id: bytes) -> int | None:
    """The number of the device in a directory, if it is one of ours."""
    try:
        identity = read_identity(path)
    except (DirectoryError, OSError):
        return None  # opening it says why
    if identity is None or identity.directory_id != directory_id:
        return None
    return identity.number
