"""Commands that other packages add through entry points: functions that get argparse's subparsers,
add a parser and set its `run` default to a function from the parsed arguments to an exit code.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from typing import Any

__all__ = ["BENCHES", "COMMANDS", "add_foreign"]

#: `kvtier NAME`, and `kvtier bench NAME`.
COMMANDS = "kvtier.commands"
BENCHES = "kvtier.bench_commands"
_EXIT_FAILED = 1


def add_foreign(group: str, commands: Any, word: str | None) -> None:
    """Adds the group's commands to `commands`; `word` is the one that the user has typed.

    A package that cannot be loaded hides its own command, and says why only if it was meant: then
    raises SystemExit.
    """
    for entry in entry_points(group=group):
        try:
            register = entry.load()
        except ImportError as error:
            if entry.name == word:
                print(f"error: kvtier {entry.name} cannot be loaded: {error}", file=sys.stderr)
                print(
                    "remedy: install its extra, as in pip install 'kvtier[engine]'", file=sys.stderr
                )
                raise SystemExit(_EXIT_FAILED) from error
        else:
            register(commands)
