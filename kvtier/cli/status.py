"""`kvtier status`: how a running daemon is doing."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING, Any

from kvtier.cli.options import add_url, connected
from kvtier.cli.table import table
from kvtier.config.kinds import rounded_size_text

if TYPE_CHECKING:
    from kvtier.transfer.planes.values import (
        DeviceStatus,
        NamespaceStatus,
        PoolStatus,
        SessionStatus,
        Status,
        TierStatus,
    )

__all__ = ["register"]


def register(commands: Any) -> None:
    """Adds `kvtier status`."""
    parser = commands.add_parser("status", help="how a running daemon is doing")
    add_url(parser)
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    with connected(arguments) as connection:
        status = connection.status()
    if arguments.json:
        print(json.dumps(dataclasses.asdict(status), default=_plain, indent=2))
    else:
        print("\n".join(_lines(status)))
    return 0


def _plain(value: object) -> object:
    return value.hex() if isinstance(value, bytes) else str(value)


def _lines(status: Status) -> Iterator[str]:
    yield f"kvtier {status.version}: {status.state}, up {status.uptime_s:.0f} s"
    yield f"  boot       {status.boot_id}"
    yield f"  directory  {status.directory}"
    yield f"  listen     {', '.join(status.listen)}"
    yield f"  planes     {', '.join(status.planes) or '-'}"
    for warning in status.warnings:
        yield f"  warning    {warning}"
    counters = {_COPIES.get(name, name): n for name, n in status.counters.items() if n}
    tables = (
        (_TIER, [_tier(tier) for tier in status.tiers]),
        (_POOL, [_pool(pool) for pool in status.pools]),
        (_DEVICE, [_device(device) for device in status.devices]),
        (_NAMESPACE, [_namespace(space) for space in status.namespaces]),
        (_SESSION, [_session(session) for session in status.sessions]),
        (("counter", "total"), [(name, str(count)) for name, count in sorted(counters.items())]),
    )
    for header, rows in tables:
        if rows:
            yield ""
            yield from table(header, rows)


#: Totals of the store are of copies, of which a page has one in each tier where it is.
_COPIES = {
    name: f"copies_{name}" for name in ("stored", "deleted", "evicted", "evicted_last", "condemned")
}
_TIER = ("tier", "capacity", "ready", "used", "pages", "filling", "quarantined", "pinned")
_POOL = ("pool", "engine", "device", "capacity", "pages", "used", "draining", "pinned", "told")
_DEVICE = ("device", "online", "direct I/O", "capacity", "on disk", "reason")
_NAMESPACE = ("namespace", "tenant", "model", "weights", "generation", "shards", "copies")
_SESSION = ("session", "client", "idle", "handles", "leases")


def _tier(tier: TierStatus) -> tuple[str, ...]:
    return (
        _name(tier.tier),
        rounded_size_text(tier.capacity_bytes),
        _share(tier.ready_bytes, tier.capacity_bytes),
        _share(tier.used_bytes, tier.capacity_bytes),
        str(tier.pages_sealed),
        str(tier.pages_filling),
        str(tier.pages_quarantined),
        str(tier.pages_pinned),
    )


def _pool(told: PoolStatus) -> tuple[str, ...]:
    pool = told.pool
    return (
        pool.name,
        told.client_name or "-",
        pool.device,
        rounded_size_text(pool.pages * pool.page_bytes),
        str(pool.pages),
        _share(pool.held, pool.pages),
        str(pool.draining),
        str(pool.pinned),
        f"{told.age_s:.0f} s ago",
    )


def _device(device: DeviceStatus) -> tuple[str, ...]:
    return (
        device.path,
        _yes_or_no(device.is_online),
        _yes_or_no(device.is_direct_io),
        rounded_size_text(device.capacity_bytes),
        _share(device.disk_bytes, device.capacity_bytes),
        device.reason or "-",
    )


def _namespace(space: NamespaceStatus) -> tuple[str, ...]:
    return (
        space.fingerprint.hex()[:16],
        space.tenant or "-",
        space.model_id,
        space.weights_revision,
        str(space.generation),
        str(space.shard_count),
        str(space.pages),
    )


def _session(session: SessionStatus) -> tuple[str, ...]:
    return (
        str(session.session_id),
        session.client_name or "-",
        f"{session.idle_s:.0f} s",
        str(session.handles),
        str(session.leases),
    )


def _name(value: Enum) -> str:
    return value.name.lower()


def _yes_or_no(value: bool) -> str:
    return "yes" if value else "no"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"
