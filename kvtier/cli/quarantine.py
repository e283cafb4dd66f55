"""`kvtier quarantine`: copies that failed their checks, as a running daemon keeps them.

They are never served. They end with the daemon, or when their slots are needed. `list` prints one
line a copy: REF (tier:slot:generation), how long ago it was found, on which device, of which page,
and why. `export` writes the record as it lies (4 KiB of header block, then the payload). `clear`
frees the slots of those named, or of all.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from kvtier.cli.options import add_url, connected
from kvtier.cli.table import table
from kvtier.errors import InvalidConfigValue

if TYPE_CHECKING:
    from kvtier.client import Connection
    from kvtier.core.page import PageRef
    from kvtier.transfer.planes.values import QuarantinedPage

__all__ = ["register"]

#: What REF says: tier, slot, generation. A generation is never used again, by any boot.
_Ref: TypeAlias = tuple[str, int, int]

_COLUMNS = (
    "ref", "found", "device", "namespace", "shard", "key", "bytes", "codec", "reason",
)  # fmt: skip
_REF = re.compile(r"([a-z]+):([0-9]{1,20}):([0-9]{1,20})")


def register(commands: Any) -> None:
    """Adds `kvtier quarantine`."""
    parser = commands.add_parser(
        "quarantine", help="list, export and clear pages that were found damaged",
        description=__doc__,
    )  # fmt: skip
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="what there is, oldest first")
    add_url(listing)
    listing.add_argument("--json", action="store_true")
    listing.set_defaults(run=_list)
    export = actions.add_parser("export", help="write the record of one copy to a file")
    add_url(export)
    export.add_argument("--force", action="store_true", help="replace FILE if it is there")
    export.add_argument("ref", type=_ref, metavar="REF")
    export.add_argument("file", type=Path, metavar="FILE")
    export.set_defaults(run=_export)
    clear = actions.add_parser("clear", help="free the slots of these copies, or of all")
    add_url(clear)
    clear.add_argument("refs", type=_ref, metavar="REF", nargs="*")
    clear.set_defaults(run=_clear)


def _ref(text: str) -> _Ref:
    match = _REF.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not tier:slot:generation, as list prints it")
    tier, slot, generation = match.groups()
    return tier, int(slot), int(generation)


def _name(ref: PageRef) -> _Ref:
    return ref.tier.name.lower(), ref.slot, ref.generation


def _text(ref: _Ref) -> str:
    return ":".join(map(str, ref))


def _list(arguments: argparse.Namespace) -> int:
    with connected(arguments) as connection:
        pages = connection.quarantine.list()
    if arguments.json:
        shown = [
            {
                "ref": _text(_name(page.ref)),
                "boot_id": page.ref.boot_id,
                "namespace": page.fingerprint.hex(),
                "shard": page.shard,
                "key": page.key.hex(),
                "bytes": page.length,
                "codec": page.codec.name.lower(),
                "device": page.device,
                "age_seconds": page.age_s,
                "reason": page.reason,
            }
            for page in pages
        ]
        print(json.dumps(shown, indent=2))
        return 0
    rows = [
        (
            _text(_name(page.ref)),
            _ago(page),
            page.device or "-",
            page.fingerprint.hex()[:16],
            str(page.shard),
            page.key.hex(),
            str(page.length),
            page.codec.name.lower(),
            page.reason or "-",
        )
        for page in pages
    ]
    print("\n".join(table(_COLUMNS, rows)))
    return 0


def _ago(page: QuarantinedPage) -> str:
    return "-" if page.age_s is None else f"{page.age_s:.0f}s ago"


def _export(arguments: argparse.Namespace) -> int:
    target: Path = arguments.file
    # Looked at before anything is fetched; it is opened so that a file made meanwhile stays.
    if target.exists() and not target.is_file():
        raise InvalidConfigValue(
            f"{target} is not a regular file", remedy="name a new file, or one to --force over"
        )
    if target.exists() and not arguments.force:
        raise InvalidConfigValue(
            f"{target} is there already", remedy="name another file, or replace it with --force"
        )
    with connected(arguments) as connection:
        (ref,) = _found(connection, [arguments.ref])
        record = connection.quarantine.read(ref)
    if arguments.force:
        temporary = target.with_name(f"{target.name}.{os.getpid()}.part")
        _write_new(temporary, record)
        try:
            temporary.replace(target)
        except OSError:
            temporary.unlink()
            raise
    else:
        _write_new(target, record)
    return 0


def _write_new(path: Path, record: bytes) -> None:
    """All of it, or no file."""
    with path.open("xb") as file:
        try:
            file.write(record)
            file.flush()
        except OSError as error:
            path.unlink()
            raise OSError(error.errno, error.strerror, str(path)) from error


def _clear(arguments: argparse.Namespace) -> int:
    with connected(arguments) as connection:
        refs = _found(connection, arguments.refs) if arguments.refs else None
        freed = connection.quarantine.clear(refs)
    print(f"{freed} freed")
    return 0


def _found(connection: Connection, wanted: Sequence[_Ref]) -> list[PageRef]:
    """The whole refs. Raises StaleGeneration naming the first one that is not there."""
    from kvtier.errors import StaleGeneration

    there = _by_name(connection.quarantine.list())
    for ref in wanted:
        if ref not in there:
            raise StaleGeneration(
                f"{_text(ref)} is not in the quarantine of this daemon",
                remedy="see `kvtier quarantine list`; a slot that is needed is taken from there",
            )
    return [there[ref] for ref in wanted]


def _by_name(pages: Iterable[QuarantinedPage]) -> dict[_Ref, PageRef]:
    return {_name(page.ref): page.ref for page in pages}
