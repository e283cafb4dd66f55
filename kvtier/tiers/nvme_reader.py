"""The NVMe tier for looking at it: what is in the devices' directories, and reads of its slots.

Promise: nothing is made, removed, repaired or locked; the caller keeps daemons away by the daemon
directory's lock. A device or segment that cannot be used is named, and the others are read.
One thread at a time.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import index
from pathlib import Path

from kvtier.core.page import Tier
from kvtier.errors import CorruptRecord, DirectoryError
from kvtier.tiers.base import SLOT_BYTES, Buffer, TierOperation, flat_bytes, tier_io_error
from kvtier.tiers.direct_file import DirectFile, aligned_buffer
from kvtier.tiers.nvme_directory import DeviceIdentity, is_ours, read_identity
from kvtier.tiers.nvme_geometry import DEVICE_SLABS_MAX, Geometry, slab_number, split_slab
from kvtier.tiers.nvme_noted import NOTHING_NOTED, Noted
from kvtier.tiers.nvme_segment import (
    SEGMENT_HEADER_BYTES,
    SegmentHeader,
    decode_segment_header,
    segment_name,
    segment_number,
)
from kvtier.tiers.plain_file import known_remedy
from kvtier.tiers.sealed_file import DISCARD, TEMPORARY_SUFFIX

__all__ = ["DeviceLook", "SegmentReader", "look_at_device"]


@dataclass(slots=True, kw_only=True)
class DeviceLook:
    """What lies in the directory of a device. `problem`: why nothing of it can be used, or "";
    `is_refused`: no daemon starts with it, unless `remedy` is followed. Without that a `remedy` is
    of the problem.

    `rejected` are files with a segment's name that are not that segment, and why; `leftovers` what
    a write that never ended left; `foreign` the names of everything that is none of kvtier's.
    """

    number: int
    path: Path
    problem: str = ""
    #: As its own file says, if it is of this daemon directory: a start goes by that.
    own_number: int | None = None
    #: And what it says of the daemon directory.
    noted: Noted = NOTHING_NOTED
    is_refused: bool = False
    remedy: str = ""
    segments: list[int] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    rejected_segments: list[int] = field(default_factory=list)


def look_at_device(geometry: Geometry, number: int, path: Path) -> DeviceLook:
    """Looks at every file of the device. Never raises for what the file system does."""
    look = DeviceLook(number=number, path=path)
    wanted = DeviceIdentity(directory_id=geometry.directory_id, number=number)
    try:
        names = sorted(item.name for item in path.iterdir())
        found = read_identity(path)
    except DirectoryError as error:
        look.problem, look.is_refused, look.remedy = str(error), True, error.remedy
        return look
    except OSError as error:
        named = Path(error.filename) if isinstance(error.filename, str) else path
        look.problem = f"{named} cannot be read: {error.strerror}"
        look.remedy = known_remedy(named, error)
        return look
    if found is None:
        look.problem = f"{path} has no identity: it is not mounted, or somebody emptied it"
    elif found.directory_id != wanted.directory_id:
        look.problem = f"{path} holds the pages of another daemon directory"
        look.is_refused, look.remedy = True, f"name another directory, or {DISCARD}"
    else:
        look.own_number, look.noted = found.number, found.noted
    if found is not None and look.own_number not in (None, number):
        look.problem = f"{path} is device {found.number} of this daemon directory, not {number}"
    for name in names:
        local = segment_number(name)
        if not is_ours(name):
            look.foreign.append(name)
        elif name.endswith(TEMPORARY_SUFFIX):
            look.leftovers.append(name)
        elif local is not None and not look.problem:
            why = _difference(path / name, geometry, number, local)
            if why:
                look.rejected.append(f"{name}: {why}")
                look.rejected_segments.append(local)
            else:
                look.segments.append(local)
    return look


def _difference(path: Path, geometry: Geometry, number: int, local: int) -> str:
    """Why the file is not the segment that its name says; "" if it is."""
    wanted = SegmentHeader(
        directory_id=geometry.directory_id,
        device=number,
        local=local,
        segment_bytes=geometry.segment_bytes,
    )
    if local >= DEVICE_SLABS_MAX:
        return "there is no segment of such a number"
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode):
            return "it is not a regular file"
        file_bytes = SEGMENT_HEADER_BYTES + geometry.segment_bytes
        if found.st_size != file_bytes:
            return f"it has {found.st_size} bytes, not {file_bytes}"
        block = aligned_buffer(SEGMENT_HEADER_BYTES)
        with DirectFile.open(path, write=False) as file:
            file.read_at(0, block)
        return wanted.difference(decode_segment_header(block))
    except CorruptRecord as error:
        return str(error)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"


class SegmentReader:
    """A TierDevice that only reads, over the segments of `looks`. Close it."""

    def __init__(self, geometry: Geometry, looks: Sequence[DeviceLook]) -> None:
        self._segment_bytes = geometry.segment_bytes
        self._units = geometry.segment_bytes // SLOT_BYTES
        self._paths = {
            slab_number(look.number, local): look.path / segment_name(local)
            for look in looks
            for local in look.segments
        }
        # The segment read last: a look at a tier goes through one after another.
        self._slab = -1
        self._file: DirectFile | None = None

    @property
    def tier(self) -> Tier:
        return Tier.NVME

    @property
    def capacity_bytes(self) -> int:
        return len(self._paths) * self._segment_bytes

    def slabs(self) -> list[int]:
        """The numbers of all segments, rising."""
        return sorted(self._paths)

    def read(self, slot: int, offset: int, into: Buffer) -> None:
        """See TierDevice."""
        slot, target = index(slot), flat_bytes(into)
        slab, unit = divmod(slot, self._units)
        start = unit * SLOT_BYTES + offset
        try:
            if slab not in self._paths or start + target.nbytes > self._segment_bytes:
                raise OSError(errno.ERANGE, f"segment {split_slab(slab)} has no such bytes")
            self._opened(slab).read_at(SEGMENT_HEADER_BYTES + start, target)
        except OSError as error:
            raise tier_io_error(Tier.NVME, TierOperation.READ, error, slot=slot) from error

    def write(self, slot: int, parts: Sequence[Buffer], offset: int = 0) -> None:
        """Always refused."""
        cause = OSError(errno.EROFS, os.strerror(errno.EROFS))
        raise tier_io_error(Tier.NVME, TierOperation.WRITE, cause, slot=slot)

    def sync(self) -> None:
        """Nothing was written."""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._slab, self._file = -1, None

    def _opened(self, slab: int) -> DirectFile:
        if self._file is None or self._slab != slab:
            self.close()
            self._file = DirectFile.open(self._paths[slab], write=False)
            self._slab = slab
        return self._file
