"""`kvtier config`: the default file, the values in force, the check of a file, the reference."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from kvtier.cli.failures import say_error
from kvtier.cli.options import add_config, configuration
from kvtier.config.docs import default_toml, effective_table, effective_toml, reference_markdown
from kvtier.config.load import problems

__all__ = ["register"]

_EXIT_INPUT = 2


def register(commands: Any) -> None:
    """Adds `kvtier config`."""
    parser = commands.add_parser(
        "config", help="show, check and explain the configuration", description=__doc__
    )
    parser.add_argument("--markdown", action="store_true", help="print the reference page")
    parser.set_defaults(run=_reference(parser))
    actions = parser.add_subparsers(metavar="ACTION")
    show = actions.add_parser("show", help="the values in force and where each came from")
    add_config(show)
    show.add_argument("--json", action="store_true")
    show.set_defaults(run=_show)
    check = actions.add_parser("check", help="check a file; says every error in it")
    check.add_argument("file", type=Path)
    check.set_defaults(run=_check)
    default = actions.add_parser("default", help="a whole file with every key, its range, default")
    default.set_defaults(run=_default)


def _reference(parser: argparse.ArgumentParser) -> Any:
    def run(arguments: argparse.Namespace) -> int:
        if not arguments.markdown:
            parser.error("an ACTION is missing (show, check, default)")
        print(reference_markdown(), end="")
        return 0

    return run


def _show(arguments: argparse.Namespace) -> int:
    effective = configuration(arguments)
    if arguments.json:
        print(json.dumps(effective_table(effective), indent=2))
    else:
        print(effective_toml(effective), end="")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    # The file alone: the environment of whoever checks it says nothing about it.
    found = problems(arguments.file)
    for error in found:
        say_error(error)
    if found:
        return _EXIT_INPUT
    print(f"{arguments.file}: ok")
    return 0


def _default(_arguments: argparse.Namespace) -> int:
    print(default_toml(), end="")
    return 0
