"""The sections of the configuration that say where pages lie: host memory, NVMe, and the scrub.

Part of `kvtier.config`, which has the rules and from which everything here is imported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from kvtier.config.fields import GIB, KIB, MIB, TIB, seconds, size, whole
from kvtier.config.kinds import Choice, Directories

__all__ = [
    "PAGE_BYTES_PER_INDEX_ENTRY",
    "CodecName",
    "DirectIo",
    "HostConfig",
    "HostPolicyName",
    "NvmeConfig",
    "PolicyName",
    "ScrubConfig",
    "Verify",
    "WritePolicy",
]

#: The index has one entry for so many bytes of the tier. A record is never shorter (a header block
#: and at least one block of payload), so the tier is full before its index.
PAGE_BYTES_PER_INDEX_ENTRY = 8192


class Verify(Enum):
    ALWAYS = "always"
    SAMPLED = "sampled"
    OFF = "off"


class PolicyName(Enum):
    LRU = "lru"
    ARC = "arc"
    S3_FIFO = "s3-fifo"


class HostPolicyName(Enum):
    LRU = "lru"
    ARC = "arc"
    S3_FIFO = "s3-fifo"
    GITTINS = "gittins"


class WritePolicy(Enum):
    BACK = "back"
    THROUGH = "through"
    SELECTIVE = "selective"


class DirectIo(Enum):
    AUTO = "auto"
    OFF = "off"
    REQUIRED = "required"


class CodecName(Enum):
    RAW = "raw"
    FP8 = "fp8"


_POLICY = {
    "kind": Choice(members=PolicyName),
    "meaning": "Which page gives way: least recently used, ARC, or S3-FIFO. "
    "In all of them the tail of a chain goes before its head.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostConfig:
    """The host-memory tier."""

    bytes: int = size(
        4 * GIB,
        "Capacity of the arena, record headers included. It is cut into slabs of 64 MiB or "
        "somewhat more (below that, one slab); a page must fit into one.",
        low=MIB,
        high=64 * TIB,
    )
    verify: Verify = field(
        default=Verify.ALWAYS,
        metadata={
            "kind": Choice(members=Verify),
            "meaning": "Which pages are checked against their checksum when they are sent to a "
            "reader that does not say that it checks them itself. kvtier's own client does, unless "
            "told not to; a page that it finds wrong it asks for again, and that one is checked "
            "here. When pages are stored, all are.",
        },
    )
    sample_one_in: int = whole(
        16, 'With verify = "sampled": one page in so many is checked.', low=2, high=1_000_000
    )
    policy: HostPolicyName = field(
        default=HostPolicyName.LRU,
        metadata={
            "kind": Choice(members=HostPolicyName),
            "meaning": "Which page gives way: least recently used, ARC, S3-FIFO, or gittins, which "
            "learns when pages are used again and helps where memory is short (it needs numba, and "
            "compiles for a minute before the first start on a machine is READY). "
            "In all of them the tail of a chain goes before its head.",
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmeConfig:
    """The NVMe tier. It is on when `paths` names a directory."""

    paths: tuple[Path, ...] = field(
        default=(),
        metadata={
            "kind": Directories(items_max=16),
            "meaning": "One directory a device, each of the daemon's own (mode 0700). "
            "A device that fails goes offline alone.",
        },
    )
    bytes: int = size(
        64 * GIB,
        "Hard cap of everything the tier keeps on disk, its checkpoint and journal included, "
        "shared equally by the paths.",
        low=4 * MIB,
        high=4096 * TIB,
    )
    write_policy: WritePolicy = field(
        default=WritePolicy.BACK,
        metadata={
            "kind": Choice(members=WritePolicy),
            "meaning": "When pages are copied to NVMe. back: before host memory needs their room; "
            "through: when they are stored; selective: as back, but only pages that were used "
            "again. `durability` NVME and Flush copy in any case.",
        },
    )
    codec: CodecName = field(
        default=CodecName.RAW,
        metadata={
            "kind": Choice(members=CodecName),
            "meaning": "How pages are packed on NVMe. fp8 (lossy) needs numba or torch, and "
            "packs the families whose layout allows it.",
        },
    )
    policy: PolicyName = field(default=PolicyName.LRU, metadata=_POLICY)
    clean_percent: int = whole(
        10,
        "Write-back keeps so much of host memory free or already copied, coldest first.",
        low=0,
        high=100,
        unit="%",
    )
    write_bytes_per_day: int = size(
        0,
        "Write budget, for the endurance of the device; 0 is none. Over it pages are not copied, "
        "and counted.",
        low=0,
        high=4096 * TIB,
    )
    direct_io: DirectIo = field(
        default=DirectIo.AUTO,
        metadata={
            "kind": Choice(members=DirectIo),
            "meaning": "O_DIRECT. auto: where the file system takes it, else through the page "
            "cache, which status shows.",
        },
    )
    io_threads: int = whole(
        4, "Reads and writes under way at once, for each device.", low=1, high=64, unit="threads"
    )
    queue_pages_max: int = whole(
        1_024,
        "Movements between tiers that wait or run. Over it a copy to NVMe is dropped and counted, "
        "a call is answered BUSY.",
        low=1,
        high=1_000_000,
        unit="pages",
    )
    io_timeout_ms: int = whole(
        5_000,
        "A read or write that takes longer is given up, and its device taken offline.",
        low=10,
        high=600_000,
        unit="ms",
    )
    pages_max: int = whole(
        16_777_216,
        "Pages that the index has room for; more are not copied to NVMe. Its memory is used as "
        "pages come.",
        low=1_024,
        high=1_000_000_000,
        unit="pages",
    )
    retry_s: float = seconds(
        10.0,
        "A device that is offline or full is tried again after so long.",
        low=0.05,
        high=3600.0,
    )
    checkpoint_s: float = seconds(
        60.0,
        "A checkpoint is written after so long, if anything has changed; what changed since is "
        "scanned by the next start.",
        low=0.05,
        high=86_400.0,
    )
    sync_s: float = seconds(
        5.0, "Written pages survive a power cut after so long.", low=0.05, high=3600.0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubConfig:
    """Reading pages again in the background, to find damage before a reader does."""

    interval_s: float = seconds(
        86_400.0, "From the end of one scrub to the next; 0 is never.", low=0.0, high=31_536_000.0
    )
    bytes_per_second: int = size(100 * MIB, "How fast a scrub reads.", low=64 * KIB, high=TIB)
