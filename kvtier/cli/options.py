"""Options that several subcommands share."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvtier.config import process_environment
from kvtier.config.load import Effective, load
from kvtier.errors import DaemonUnavailable, DeadlineExceeded

if TYPE_CHECKING:
    from kvtier.client import Connection

__all__ = ["add_config", "add_url", "configuration", "connected", "daemon_url", "naming"]

_TIMEOUT_S_MIN: Final = 0.001
_TIMEOUT_S_MAX: Final = 86_400.0


def add_config(parser: argparse.ArgumentParser) -> None:
    """--config and --set: which configuration this command goes by."""
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="a TOML file (else the one that KVTIER_CONFIG names, if any)",
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="one value, as in --set host.bytes=4GiB; may be repeated",
    )


def add_url(parser: argparse.ArgumentParser) -> None:
    """The options of `add_config`, and --url and --timeout: which daemon is called."""
    add_config(parser)
    parser.add_argument(
        "--url",
        help="the daemon: unix:///path or grpc://127.0.0.1:port (else the first of daemon.listen)",
    )
    parser.add_argument(
        "--timeout", type=_seconds, default=5.0, metavar="SECONDS", help="default: %(default)s"
    )


def configuration(arguments: argparse.Namespace) -> Effective:
    """The configuration of this command line. Raises ConfigError."""
    return load(file=arguments.config, environ=process_environment(), overrides=arguments.overrides)


def daemon_url(arguments: argparse.Namespace) -> str:
    """Where the daemon is meant to be: --url, else daemon.listen's first. Raises ConfigError."""
    url: str | None = arguments.url
    return url if url is not None else configuration(arguments).config.daemon.listen[0]


@contextmanager
def connected(arguments: argparse.Namespace) -> Iterator[Connection]:
    """A connection to the daemon of this command line, `naming` it."""
    from kvtier.client import connect

    url, timeout_s = daemon_url(arguments), arguments.timeout
    with naming(url, timeout_s), connect(url, deadline=timeout_s) as connection:
        yield connection


@contextmanager
def naming(url: str, timeout_s: float | None) -> Iterator[None]:
    """An error of a call that got no answer says which daemon that was, and how long it was waited
    for, where --timeout says that.
    """
    try:
        yield
    except DeadlineExceeded as error:
        within = "" if timeout_s is None else f" within {timeout_s:g} s"
        more = "" if timeout_s is None else "raise --timeout, or "
        raise DeadlineExceeded(
            f"the daemon at {url} did not answer{within} ({error})",
            remedy=f"{more}see why it is slow or stopped (kvtier doctor, its log)",
        ) from error
    except DaemonUnavailable as error:
        raise DaemonUnavailable(
            f"no answer from the daemon at {url} ({error})",
            remedy=f"{error.remedy} (kvtier doctor; its log)",
        ) from error


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not _TIMEOUT_S_MIN <= value <= _TIMEOUT_S_MAX:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of seconds from {_TIMEOUT_S_MIN:g} to {_TIMEOUT_S_MAX:g}"
        )
    return value
