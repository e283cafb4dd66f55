"""The configuration: one frozen tree, parsed once, and where each value came from.

Sources, later ones win: the defaults here, one TOML file, the environment
(`KVTIER_HOST__BYTES=4GiB`: section and key in capitals, joined by two underscores),
`--set host.bytes=4GiB`. A key that nobody reads and a value outside its range are errors that name
key, value and source; nothing is clamped. The environment is read in this module alone.

Every field carries its kind (unit, range) and meaning; the reference page, `kvtier config default`
and the error texts are made from them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

from kvtier.config.fields import GIB, KIB, MIB, TIB, seconds, size, whole
from kvtier.config.kinds import Choice, Directory, Kind, ListenAddresses, MetricsAddress
from kvtier.config.local import LocalConfig, Switch
from kvtier.config.storage import (
    PAGE_BYTES_PER_INDEX_ENTRY,
    CodecName,
    DirectIo,
    HostConfig,
    HostPolicyName,
    NvmeConfig,
    PolicyName,
    ScrubConfig,
    Verify,
    WritePolicy,
)

__all__ = [
    "PAGE_BYTES_PER_INDEX_ENTRY",
    "CodecName",
    "Config",
    "DaemonConfig",
    "DirectIo",
    "GrpcConfig",
    "HostConfig",
    "LimitsConfig",
    "LocalConfig",
    "LogFormat",
    "LogLevel",
    "NvmeConfig",
    "HostPolicyName",
    "PolicyName",
    "ScrubConfig",
    "Setting",
    "Switch",
    "Verify",
    "WritePolicy",
    "process_environment",
    "settings",
]


class LogLevel(Enum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(Enum):
    LOGFMT = "logfmt"
    JSON = "json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One key. `name` is "section.key"; `default` is the value for the user of this process."""

    name: str
    kind: Kind[Any]
    meaning: str
    default: Any
    default_text: str

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return "KVTIER_" + self.name.replace(".", "__").upper()


def process_environment() -> Mapping[str, str]:
    """The process's environment, for `load`; the only place that names it."""
    return os.environ


def _default_directory() -> Path:
    if os.geteuid() == 0:
        return Path("/var/lib/kvtier")
    return Path.home() / ".local" / "share" / "kvtier"


def _default_listen() -> tuple[str, ...]:
    if os.geteuid() == 0:
        return ("unix:///run/kvtier/kvtier.sock",)
    runtime = process_environment().get("XDG_RUNTIME_DIR")
    directory = f"{runtime}/kvtier" if runtime else f"/tmp/kvtier-{os.geteuid()}"
    return (f"unix://{directory}/kvtier.sock",)


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonConfig:
    """The process: where it keeps its state, where it listens, how it logs and stops."""

    directory: Path = field(
        default_factory=_default_directory,
        metadata={
            "kind": Directory(),
            "meaning": "State of the daemon: lock, generation journal, namespaces. "
            "Mode 0700, one daemon at a time.",
            "default_text": "/var/lib/kvtier as root, else ~/.local/share/kvtier",
        },
    )
    listen: tuple[str, ...] = field(
        default_factory=_default_listen,
        metadata={
            "kind": ListenAddresses(),
            "meaning": "Where the daemon answers. A socket gets mode 0600, and a directory of "
            "its own with mode 0700; a TCP address can be used by every user of this host.",
            "default_text": "unix:///run/kvtier/kvtier.sock as root, "
            "else unix://$XDG_RUNTIME_DIR/kvtier/kvtier.sock",
        },
    )
    metrics_listen: str = field(
        default="",
        metadata={
            "kind": MetricsAddress(),
            "meaning": "Where Prometheus metrics are served, at /metrics. "
            "Any user of this host can read them.",
        },
    )
    log_level: LogLevel = field(
        default=LogLevel.INFO,
        metadata={"kind": Choice(members=LogLevel), "meaning": "The least severe events to log."},
    )
    log_format: LogFormat = field(
        default=LogFormat.LOGFMT,
        metadata={
            "kind": Choice(members=LogFormat),
            "meaning": "One event a line, on standard error.",
        },
    )
    drain_deadline_s: float = seconds(
        10.0, "After SIGTERM, calls under way get this long to end.", low=0.0, high=3600.0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """A bound on everything. GetCapabilities tells clients those they must keep."""

    keys_per_call_max: int = whole(
        65_536, "Keys in one Lookup, Get, Delete or Pin.", low=1, high=1_000_000, unit="keys"
    )
    pages_per_put_max: int = whole(16_384, "Pages in one Put.", low=1, high=1_000_000, unit="pages")
    bytes_per_call_max: int = size(
        4 * GIB, "Payload bytes in one Put or Get.", low=4 * KIB, high=TIB
    )
    message_bytes_max: int = size(
        16 * MIB, "The longest message that is taken.", low=64 * KIB, high=GIB
    )
    chunk_bytes: int = size(
        2 * MIB,
        "Payload bytes in one message of a Get. Stock gRPC clients refuse messages over 4 MiB.",
        low=4 * KIB,
        high=512 * MIB,
    )
    rpcs_max: int = whole(
        1_024,
        "Short calls under way at once; more are answered Busy.",
        low=1,
        high=100_000,
        unit="calls",
    )
    streams_max: int = whole(
        256,
        "Put, Get, Watch and Verify streams at once; more are Busy.",
        low=1,
        high=100_000,
        unit="calls",
    )
    bytes_under_way_max: int = size(
        8 * GIB,
        "Payload bytes of all Puts and Gets under way; more are Busy.",
        low=4 * KIB,
        high=64 * TIB,
    )
    sessions_max: int = whole(
        4_096, "Client sessions at once.", low=1, high=1_000_000, unit="sessions"
    )
    handles_per_session_max: int = whole(
        1_024, "Namespace handles of one session.", low=1, high=100_000, unit="handles"
    )
    namespaces_max: int = whole(
        4_096, "Namespaces known to the daemon.", low=1, high=60_000, unit="namespaces"
    )
    lease_ms_default: int = whole(
        10_000, "Life of a lease that names none.", low=1, high=86_400_000, unit="ms"
    )
    lease_ms_max: int = whole(
        600_000,
        "The longest life of a lease; a Pin that asks for more is told what it got.",
        low=1,
        high=86_400_000,
        unit="ms",
    )
    session_ttl_s: float = seconds(
        300.0,
        "A session without a call for so long is closed, with its leases.",
        low=0.05,
        high=86_400.0,
    )
    put_idle_ms: int = whole(
        10_000,
        "A Put that sends nothing for so long is ended and its pages dropped.",
        low=10,
        high=3_600_000,
        unit="ms",
    )
    get_idle_ms: int = whole(
        10_000,
        "A Get or Watch whose reader takes nothing for so long is ended.",
        low=10,
        high=3_600_000,
        unit="ms",
    )
    watch_events_max: int = whole(
        65_536,
        "Events held for one slow watcher before its stream is ended.",
        low=16,
        high=10_000_000,
        unit="events",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcConfig:
    """Keepalive of the gRPC connections. Clients may ping as often as they like."""

    keepalive_time_s: float = seconds(
        30.0, "A silent connection is pinged after so long.", low=1.0, high=86_400.0
    )
    keepalive_timeout_s: float = seconds(
        20.0, "A ping unanswered for so long ends the connection.", low=1.0, high=3_600.0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything that can be set. Build it with `kvtier.config.load.load`."""

    daemon: DaemonConfig = field(default_factory=DaemonConfig)
    host: HostConfig = field(default_factory=HostConfig)
    nvme: NvmeConfig = field(default_factory=NvmeConfig)
    scrub: ScrubConfig = field(default_factory=ScrubConfig)
    local: LocalConfig = field(default_factory=LocalConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    grpc: GrpcConfig = field(default_factory=GrpcConfig)


def settings() -> dict[str, Setting]:
    """Every key by its name "section.key", in the order of the reference."""
    found: dict[str, Setting] = {}
    default = Config()
    for section in fields(Config):
        values = getattr(default, section.name)
        for item in fields(values):
            name = f"{section.name}.{item.name}"
            kind = item.metadata["kind"]
            value = getattr(values, item.name)
            text = item.metadata.get("default_text") or kind.to_toml(value)
            found[name] = Setting(
                name=name,
                kind=kind,
                meaning=item.metadata["meaning"],
                default=value,
                default_text=text,
            )
    return found
