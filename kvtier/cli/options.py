"""Options that several subcommands share."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvtier.config import process_environment
from kvtier.config_load import Effective, load

__all__ = ["add_config", "add_url", "configuration", "daemon_url"]


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


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 86_400:
        raise ValueError(text)
    return value
