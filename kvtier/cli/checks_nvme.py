"""What `kvtier doctor` says of the paths of the NVMe tier. Leaves nothing on them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from kvtier.cli.finding import Finding, fail, ok, warn
from kvtier.config import DirectIo, NvmeConfig
from kvtier.tiers.memory import mib
from kvtier.tiers.nvme_geometry import first_segment_bytes, segment_file_bytes

__all__ = ["check_nvme"]


def check_nvme(config: NvmeConfig) -> list[Finding]:
    """One Finding a path; one alone when the tier is off."""
    if not config.paths:
        return [ok("nvme", "off: nvme.paths names no directory")]
    share = config.bytes // len(config.paths)
    segment = first_segment_bytes(config.bytes, devices=len(config.paths))
    return [_check_path(path, share, segment, config.direct_io) for path in config.paths]


def _check_path(path: Path, share_bytes: int, segment_bytes: int, direct_io: DirectIo) -> Finding:
    there = next(item for item in (path, *path.parents) if item.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return fail(
            "nvme",
            f"{there} cannot be written",
            f"Make {path} with mode 0700, or take it out of nvme.paths.",
        )
    own = sum(item.stat().st_blocks * 512 for item in path.glob("segment-*"))
    room = shutil.disk_usage(there).free + own
    found = f"{path}: {mib(room)} for a share of {mib(share_bytes)}"
    if room < segment_file_bytes(segment_bytes):
        return warn(
            "nvme",
            f"{found}, and no room for one segment: a new tier of this nvme.bytes is cut into"
            f" segments of {mib(segment_bytes)}, a 16th of the share",
            f"Set nvme.bytes so that the share is at most {mib(room)}, and if the tier was made"
            " already start once with --discard-cache.",
        )
    if room < share_bytes:
        return warn(
            "nvme",
            found,
            "Lower nvme.bytes, or make room: the tier works within what the disk takes.",
        )
    refusal = _direct_refusal(there)
    if refusal and direct_io is DirectIo.REQUIRED:
        return fail("nvme", f"{found}; no O_DIRECT ({refusal})", 'Set nvme.direct_io to "auto".')
    if refusal and direct_io is DirectIo.AUTO:
        return warn(
            "nvme",
            f"{found}; no O_DIRECT ({refusal})",
            "It goes through the page cache; ext4 and xfs on a block device take O_DIRECT.",
        )
    return ok("nvme", f"{found}, {'page cache' if refusal else 'O_DIRECT'}")


def _direct_refusal(directory: Path) -> str:
    """Why files there cannot be opened past the page cache; empty when they can."""
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_DIRECT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return error.strerror or str(error)
    os.close(fd)
    return ""
