"""`kvtier serve`: the daemon, in the foreground."""

from __future__ import annotations

import argparse
import os
from typing import Any

from kvtier.cli.extras import daemon_extra
from kvtier.cli.options import add_config, configuration
from kvtier.errors import InvalidConfigValue

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
    if arguments.ready_fd is not None:
        _check_open(arguments.ready_fd)
    with daemon_extra():
        from kvtier.daemon.run import run

    return run(effective, ready_fd=arguments.ready_fd, discard_cache=arguments.discard_cache)


def _check_open(fd: int) -> None:
    """Raises InvalidConfigValue unless it is an open descriptor."""
    try:
        os.fstat(fd)
    except (OSError, OverflowError) as error:
        raise InvalidConfigValue(
            f"--ready-fd {fd} is not an open descriptor",
            remedy="pass the writing end of a pipe that the daemon inherits",
        ) from error
