"""`kvtier fsck`: checks a daemon directory and its NVMe devices, while no daemon uses them.

Exit code 0: everything is as it was written; 1: damage was found that a start copes with (what is
damaged is a miss); 2: no daemon directory, or in use; 3: damage with which no daemon starts, and
what to do about it. Nothing is changed.

The devices are those at the paths that the daemon directory has noted, and each is named. A copied
daemon directory names the devices of the one that it is a copy of.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.cli.extras import daemon_extra
from kvtier.cli.failures import say_error
from kvtier.cli.table import table
from kvtier.errors import DirectoryError

if TYPE_CHECKING:
    from kvtier.cli.directory_check import DeviceFindings, DirectoryFindings

__all__ = ["register"]

_DAMAGE = 1
_WRONG_INPUT = 2
_NO_START = 3


def register(commands: Any) -> None:
    """Adds `kvtier fsck`."""
    parser = commands.add_parser(
        "fsck", help="check what lies on NVMe, without a daemon", description=__doc__
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="the daemon.directory")
    parser.add_argument("--payloads", action="store_true", help="read and check every page whole")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    with daemon_extra():
        from kvtier.cli.directory_check import check_directory
    try:
        findings = check_directory(arguments.directory, payloads=arguments.payloads)
    except DirectoryError as error:
        # A daemon has it: that is no damage.
        say_error(error)
        return _WRONG_INPUT if isinstance(error.__cause__, BlockingIOError) else _NO_START
    if arguments.json:
        print(json.dumps(_plain(findings), indent=2))
    else:
        print("\n".join(_lines(findings)))
    if findings.refusals:
        return _NO_START
    return _DAMAGE if findings.damage else 0


def _plain(findings: DirectoryFindings) -> dict[str, Any]:
    return {
        "directory": str(findings.path),
        "clean": not findings.damage,
        "payloads_checked": findings.payloads,
        "total": _totals(findings),
        "devices": [
            {
                "number": device.look.number,
                "path": str(device.look.path),
                "problem": device.look.problem,
                "rejected": device.look.rejected,
                "foreign": device.look.foreign,
                **_counts(device),
            }
            for device in findings.devices
        ],
        "namespaces": [
            {
                "fingerprint": space.fingerprint.hex(),
                "tenant": space.tenant,
                "model": space.model_id,
                "generation": space.generation,
                "pages": space.pages,
                "payload_bytes": space.payload_bytes,
            }
            for space in findings.namespaces
        ],
        "checkpoints": [
            {
                "file": file.path.name,
                "state": file.state.name.lower(),
                "reason": file.reason,
                "number": file.number,
            }
            for file in findings.checkpoints
        ],
        "journals": [
            {
                "file": journal.path.name,
                "frames": journal.frames,
                "bad_frames": journal.bad_frames,
                "torn_bytes": journal.torn_bytes,
            }
            for journal in findings.journals
        ],
        "damage": findings.damage,
        "refusals": findings.refusals,
        "notes": findings.notes,
    }


def _counts(device: DeviceFindings) -> dict[str, int]:
    return {
        "segments": len(device.look.segments),
        "pages": device.pages,
        "payload_bytes": device.payload_bytes,
        "stale_records": device.stale,
        "bad_headers": device.bad_headers,
        "corrupt_payloads": device.corrupt,
        "unreadable": device.unreadable,
    }


def _totals(findings: DirectoryFindings) -> dict[str, int]:
    counts = [_counts(device) for device in findings.devices]
    return {name: sum(count[name] for count in counts) for name in counts[0]} if counts else {}


def _lines(findings: DirectoryFindings) -> Iterator[str]:
    if findings.devices:
        yield from table(*_device_table(findings))
        yield ""
    if findings.namespaces:
        yield from table(
            ("namespace", "tenant", "model", "generation", "pages", "bytes"),
            [
                (
                    space.fingerprint.hex()[:16],
                    space.tenant or "-",
                    space.model_id,
                    str(space.generation),
                    str(space.pages),
                    str(space.payload_bytes),
                )
                for space in findings.namespaces
            ],
        )
        yield ""
    for file in findings.checkpoints:
        number = f", number {file.number}" if file.number else ""
        yield f"{file.path.name}: {file.state.name.lower()}{number}"
    for journal in findings.journals:
        yield (
            f"{journal.path.name}: {journal.frames} frames, {journal.bad_frames} damaged, "
            f"{journal.torn_bytes} torn bytes"
        )
    for note in findings.notes:
        yield f"note: {note}"
    for what in findings.damage:
        yield f"damage: {what}"
    for what in findings.refusals:
        yield f"no start: {what}"
    # The directory names its devices by path: a copy of it leads to the same ones.
    for device in findings.devices:
        yield f"looked at: {device.look.path} (device {device.look.number})"
    yield f"{findings.path}: {'damage found' if findings.damage else 'clean'}"


def _device_table(findings: DirectoryFindings) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    header = ("device", "segments", "pages", "bytes", "stale", "bad headers", "corrupt", "path")
    rows = [
        (str(device.look.number), *_cells(_counts(device), findings), str(device.look.path))
        for device in findings.devices
    ]
    return header, [*rows, ("total", *_cells(_totals(findings), findings), "")]


def _cells(counts: dict[str, int], findings: DirectoryFindings) -> tuple[str, ...]:
    names = ("segments", "pages", "payload_bytes", "stale_records", "bad_headers")
    corrupt = str(counts["corrupt_payloads"]) if findings.payloads else "-"
    return (*(str(counts[name]) for name in names), corrupt)
