"""`kvtier serve`: the daemon, in the foreground."""

from __future__ import annotations

import argparse
from typing import Any

from kvtier.cli.extras import daemon_extra
from kvtier.cli.options import add_config, configuration

__all__ = ["register"]


def register(commands: Any) -> None:
    """Adds `kvtier serve`."""
    parser = commands.add_parser(
        "serve",
        help="run the daemon",
        description="Runs in the foreground. SIGTERM or Ctrl-C drains it, a second one kills it.",
    )
    add_config(parser)
    parser.add_argument(
        "--ready-fd",
        type=int,
        metavar="N",
        help='write "READY=1" and a newline to this open descriptor when calls are served',
    )
    parser.add_argument(
        "--discard-cache",
        action="store_true",
        help="give up what is cached on NVMe (every page of it is then a miss), as after a device "
        "was exchanged or the format has changed",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    effective = configuration(arguments)
    with daemon_extra():
        from kvtier.daemon.run import run

    return run(effective, ready_fd=arguments.ready_fd, discard_cache=arguments.discard_cache)
