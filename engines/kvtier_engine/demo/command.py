"""The subcommand `kvtier demo`. Light: everything that needs the extra is loaded when it runs."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from kvtier_engine.errors import require_extra

__all__ = ["register"]


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the parser; called by the `kvtier` command through the entry point kvtier.commands."""
    parser = subparsers.add_parser(
        "demo",
        help="one chat over several engines, killed daemons and damaged pages, and check it",
        description="Starts a daemon, begins a chat in one engine and goes on with it in others:"
        " from its memory, and from NVMe after SIGKILL. Checks each claim; ends with 1 if one does"
        " not hold.",
    )
    parser.add_argument(
        "--model-dir",
        type=Path,
        metavar="DIR",
        help="where the converted model is kept (default: in the user's cache directory)",
    )
    parser.add_argument(
        "--tokens",
        type=_count,
        default=32,
        metavar="N",
        help="tokens to generate a turn (default 32)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 when every claim holds, else 1. Raises KvtierError when they cannot be shown."""
    require_extra()
    # Loads torch, which nobody who asks for another command should wait for.
    demo = importlib.import_module("kvtier_engine.demo.run")
    return int(demo.run(model_dir=args.model_dir, tokens=args.tokens, as_json=args.json))


def _count(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 1 <= number <= 512:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 512")
    return number
