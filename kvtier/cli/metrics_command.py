"""`kvtier metrics`: which metrics there are."""

from __future__ import annotations

import argparse
from typing import Any

from kvtier.cli.extras import daemon_extra

__all__ = ["register"]


def register(commands: Any) -> None:
    """Adds `kvtier metrics`."""
    parser = commands.add_parser("metrics", help="list the metrics that a daemon exports")
    parser.add_argument("--markdown", action="store_true", help="print the reference page")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    with daemon_extra():
        from kvtier.daemon.metrics import METRICS, metrics_markdown

    if arguments.markdown:
        print(metrics_markdown(), end="")
        return 0
    for spec in METRICS:
        labels = "{" + ",".join(spec.labels) + "}" if spec.labels else ""
        print(f"{spec.name + labels:48} {spec.kind:9} {spec.help}")
    return 0
