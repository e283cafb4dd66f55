"""Opens the devices of the NVMe tier, before there is a store: which path is which device, and how
many segments each may have.

A device is known by the file in its directory, so its path may change. One that cannot be used is
left out and named; a path that belongs to another daemon stops the start. Blocks as long as the
devices do.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from kvtier.config import PAGE_BYTES_PER_INDEX_ENTRY, CodecName, DirectIo, NvmeConfig
from kvtier.core.slabs import SlabAllocator
from kvtier.errors import DirectoryError, InvalidConfigValue, KvtierError, TierIOError
from kvtier.packing.fp8 import warm_up
from kvtier.tiers.base import errno_of
from kvtier.tiers.direct_file import DirectMode
from kvtier.tiers.nvme import NvmeTier
from kvtier.tiers.nvme_base import without_geometry
from kvtier.tiers.nvme_device import NvmeDevice, open_device
from kvtier.tiers.nvme_directory import read_identity
from kvtier.tiers.nvme_geometry import (
    DEVICE_SLABS_MAX,
    DIRECTORY_ID_BYTES,
    Geometry,
    Plan,
    first_segment_bytes,
    load_geometry,
    plan,
    save_geometry,
    slab_number,
)
from kvtier.tiers.nvme_paths import with_paths
from kvtier.tiers.plain_file import NOT_A_FILE

__all__ = ["DIRECT_MODES", "NvmeParts", "prepare"]

log = logging.getLogger(__name__)

_RIGHTS = frozenset((errno.EACCES, errno.EPERM, errno.EROFS))
#: What a device may have for a while. Where all have it, host memory is served without the tier.
#: Not what the operator has to decide: a path that is not mounted, or that nobody may make.
_MAY_PASS = _RIGHTS | {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENODEV, errno.ENXIO}

DIRECT_MODES = {
    DirectIo.AUTO: DirectMode.AUTO,
    DirectIo.OFF: DirectMode.OFF,
    DirectIo.REQUIRED: DirectMode.REQUIRED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeParts:
    """What has to be known before there is a store."""

    config: NvmeConfig
    directory: Path
    geometry: Geometry
    plan: Plan
    tier: NvmeTier
    #: Why a path of the configuration is not used.
    unusable: dict[Path, str]

    @property
    def pages_max(self) -> int:
        """Pages that fit, at the least that a page can take, within nvme.pages_max."""
        room = self.plan.segments_per_device * len(self.tier.devices) * self.tier.segment_bytes
        return min(room // PAGE_BYTES_PER_INDEX_ENTRY, self.config.pages_max)

    def remove_segments_over(self) -> None:
        """Those that there is no room for where nvme.bytes is less than it was; what cannot be used
        takes up room as well. A thread. Raises TierIOError."""
        limit = self.plan.segments_per_device
        for device in self.tier.devices:
            for local in sorted(n for n in device.segments if n >= limit):
                try:
                    self.tier.remove_segment(slab_number(device.number, local))
                except TierIOError as error:
                    if errno_of(error) != errno.EROFS:  # there it stays, and is not used
                        raise
            # What has a number that no segment can have is nothing of kvtier's: it stays.
            rejected = sorted(device.rejected_segments)
            for local in [n for n in rejected if limit <= n < DEVICE_SLABS_MAX]:
                with suppress(TierIOError):  # it stays, and is named in the warnings
                    self.tier.remove_segment(slab_number(device.number, local))

    def allocator(self) -> SlabAllocator:
        """For all segments that the tier may ever have."""
        numbers = [
            slab_number(device.number, local)
            for device in self.tier.devices
            for local in range(self.plan.segments_per_device)
        ]
        return SlabAllocator(slab_bytes=self.geometry.segment_bytes, numbers=numbers)


def prepare(config: NvmeConfig, directory: Path, *, discard_cache: bool = False) -> NvmeParts:
    """Opens every device; none may be left if every one fails in a way that may be over later.

    Raises KvtierError when the tier cannot be had as configured. With `discard_cache` every page
    that is there is given up first.
    """
    _check_paths(config.paths, directory)
    if config.codec is CodecName.FP8:
        warm_up()  # takes seconds, which no page should wait for
    known = load_geometry(directory)
    if known is None and not discard_cache and (refusal := without_geometry(directory)):
        raise refusal
    if known is None:
        known = Geometry(
            directory_id=secrets.token_bytes(DIRECTORY_ID_BYTES),
            segment_bytes=first_segment_bytes(config.bytes, devices=len(config.paths)),
            devices=(),
        )
        # Before any device carries its id: else a start that is cut short here could not go on.
        save_geometry(directory, known)
    geometry = with_paths(known, config.paths)
    planned = plan(
        config.bytes,
        devices=len(config.paths),
        segment_bytes=geometry.segment_bytes,
        pages_max=config.pages_max,
    )
    devices, unusable = _open_all(config, geometry, known, discard=discard_cache)
    # A device that could not be made is a new one at the next start too.
    made = [item for item in geometry.devices if item in known.devices or item[1] not in unusable]
    numbers = {number for number, _ in made}
    made += [item for item in known.devices if item[0] not in numbers]
    geometry = replace(geometry, devices=tuple(sorted(made)))
    if geometry != known:
        save_geometry(directory, geometry)
    return NvmeParts(
        config=config,
        directory=directory,
        geometry=geometry,
        plan=planned,
        tier=NvmeTier(devices, segment_bytes=geometry.segment_bytes),
        unusable=unusable,
    )


def _check_paths(paths: tuple[Path, ...], directory: Path) -> None:
    """Raises InvalidConfigValue for paths that cannot be devices beside each other."""
    real = [path.resolve() for path in paths]
    own = directory.resolve()
    for at, (path, where) in enumerate(zip(paths, real, strict=True)):
        if where == own:
            raise InvalidConfigValue(
                f"nvme.paths names {path}, which is the daemon's own directory (daemon.directory)",
                remedy=f"Name a directory of its own, such as {path / 'nvme'}.",
            )
        if (where / "format").is_file() and (where / "generations").is_file():
            raise InvalidConfigValue(
                f"nvme.paths names {path}, which is the directory of a daemon (it has the files"
                " `format` and `generations`)",
                remedy="Name a directory of its own for the device.",
            )
        for other, place in zip(paths[:at], real[:at], strict=True):
            if where == place:
                raise InvalidConfigValue(
                    f"nvme.paths names one directory twice: {other} and {path} are {where}",
                    remedy="Take one of them out.",
                )
            if place in where.parents or where in place.parents:
                inner, outer = (path, other) if place in where.parents else (other, path)
                raise InvalidConfigValue(
                    f"nvme.paths names {inner}, which lies in {outer}, another of its paths",
                    remedy="Name directories that do not lie in each other.",
                )


def _open_all(
    config: NvmeConfig, geometry: Geometry, known: Geometry, *, discard: bool
) -> tuple[list[NvmeDevice], dict[Path, str]]:
    """(devices, why others are not used). Raises KvtierError with nothing left open."""
    devices: list[NvmeDevice] = []
    unusable: dict[Path, str] = {}
    failures: list[int] = []
    try:
        for number, path in geometry.devices:
            if path not in config.paths:
                continue
            is_new = (number, path) not in known.devices or discard  # or has moved here
            try:
                if not is_new and read_identity(path) is None:
                    raise TierIOError(
                        f"{path} has no file `device`: it is not mounted, or was emptied",
                        remedy="Mount it, or start once with `--discard-cache`.",
                    )
                devices.append(
                    open_device(
                        path,
                        directory_id=geometry.directory_id,
                        number=number,
                        segment_bytes=geometry.segment_bytes,
                        mode=DIRECT_MODES[config.direct_io],
                        create=is_new,
                        discard=discard,
                    )
                )
            except (TierIOError, OSError) as error:
                unusable[path] = _words(error)
                failures.append(_errno(error) if not (is_new and _errno(error) in _RIGHTS) else 0)
                extra = {"path": str(path), "reason": unusable[path]}
                log.error("nvme.device_unusable", extra=extra)
        if not devices and not all(number in _MAY_PASS for number in failures):
            raise _none_usable(unusable, failures)
    except KvtierError:
        for device in devices:
            device.close()
        raise
    return devices, unusable


def _words(error: TierIOError | OSError) -> str:
    words = str(error)
    if isinstance(error, OSError):
        words = f"{error.filename or 'it'} cannot be used: {error.strerror}"
    if _errno(error) in (errno.EACCES, errno.EPERM):
        words += f"; give the daemon's user (uid {os.geteuid()}) the right to it (chown, chmod)"
    return words


def _errno(error: TierIOError | OSError) -> int:
    return (error.errno or 0) if isinstance(error, OSError) else errno_of(error)


def _none_usable(unusable: dict[Path, str], failures: list[int]) -> DirectoryError:
    path, reason = next(iter(unusable.items()))
    remedy = (
        "Check and mount the devices, take them out of nvme.paths, or give up what is cached on "
        "them with `kvtier serve --discard-cache`."
    )
    if failures[0] in NOT_A_FILE:
        remedy = "Remove what is none of kvtier's, and start again."
    elif failures[0] == 0 and not path.exists():
        remedy = (
            "If there were pages on them, check and mount the devices. Else name directories in"
            " nvme.paths that the daemon's user can make and write."
        )
    return DirectoryError(f"no path of nvme.paths can be used; {path}: {reason}", remedy=remedy)
