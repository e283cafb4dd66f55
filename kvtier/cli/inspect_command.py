"""`kvtier inspect`: what a file of kvtier is, and what it says.

Knows checkpoints, journals, segments, records, and the small files of a daemon directory. Exit code
0: every sum is right; 1: something is damaged, which is said; 2: no such file, or none of kvtier.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.cli.extras import daemon_extra

if TYPE_CHECKING:
    from kvtier.cli.file_contents import Contents

__all__ = ["register"]


def register(commands: Any) -> None:
    """Adds `kvtier inspect`."""
    parser = commands.add_parser("inspect", help="what a file of kvtier says", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    with daemon_extra():
        from kvtier.cli.file_contents import inspect_file
    contents = inspect_file(arguments.file)
    if arguments.json:
        whole = {
            "file": str(arguments.file),
            "kind": contents.kind,
            "problems": contents.problems,
            "facts": contents.facts,
            "items": contents.items,
        }
        json.dump(whole, sys.stdout, indent=2)
        print()
    else:
        for line in _lines(arguments.file, contents):
            print(line)
    return 1 if contents.problems else 0


def _lines(file: Path, contents: Contents) -> Iterator[str]:
    yield f"{file}: {contents.kind}"
    for name, value in contents.facts.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            yield f"  {name}"
            yield from (f"    {_words(item)}" for item in value)
        elif isinstance(value, dict):
            yield f"  {name}"
            yield from (f"    {key}: {_word(item)}" for key, item in value.items())
        else:
            yield f"  {name}: {_word(value)}"
    for item in contents.items:
        yield f"  {_words(item)}"
    for problem in contents.problems:
        yield f"damaged: {problem}"


def _words(item: dict[str, Any]) -> str:
    return "  ".join(f"{name}={_word(value)}" for name, value in item.items() if value != "")


def _word(value: object) -> str:
    """Texts come from clients: anything but plain letters is escaped."""
    if isinstance(value, str) and value.isascii() and value.isprintable():
        return value
    return json.dumps(value)
