"""`kvtier status`: how a running daemon is doing."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from kvtier.cli.options import add_url, daemon_url
from kvtier.config_kinds import size_text

if TYPE_CHECKING:
    from kvtier.transfer.planes.values import Status

__all__ = ["register"]


def register(commands: Any) -> None:
    """Adds `kvtier status`."""
    parser = commands.add_parser("status", help="how a running daemon is doing")
    add_url(parser)
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from kvtier.client import connect

    with connect(daemon_url(arguments), deadline=arguments.timeout) as connection:
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
    yield ""
    header = ("tier", "capacity", "ready", "used", "pages", "filling", "quarantined", "pinned")
    rows = [
        (
            _name(tier.tier),
            size_text(tier.capacity_bytes),
            f"{_share(tier.ready_bytes, tier.capacity_bytes)}",
            f"{_share(tier.used_bytes, tier.capacity_bytes)}",
            str(tier.pages_sealed),
            str(tier.pages_filling),
            str(tier.pages_quarantined),
            str(tier.pages_pinned),
        )
        for tier in status.tiers
    ]
    yield from _table(header, rows)
    if status.namespaces:
        yield ""
        names = [
            (
                space.fingerprint.hex()[:16],
                space.tenant or "-",
                space.model_id,
                space.weights_revision,
                str(space.generation),
                str(space.shard_count),
                str(space.pages),
            )
            for space in status.namespaces
        ]
        columns = ("namespace", "tenant", "model", "weights", "generation", "shards", "pages")
        yield from _table(columns, names)
    if status.sessions:
        yield ""
        sessions = [
            (
                str(session.session_id),
                session.client_name or "-",
                f"{session.idle_s:.0f} s",
                str(session.handles),
                str(session.leases),
            )
            for session in status.sessions
        ]
        yield from _table(("session", "client", "idle", "handles", "leases"), sessions)
    counters = {name: count for name, count in status.counters.items() if count}
    if counters:
        yield ""
        yield from _table(
            ("counter", "total"), [(name, str(count)) for name, count in sorted(counters.items())]
        )


def _name(value: Enum) -> str:
    return value.name.lower()


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, *rows):
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
