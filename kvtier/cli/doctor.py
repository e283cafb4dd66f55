"""`kvtier doctor`: what this host gives kvtier, one line a matter, each with its remedy.

Exit code 1 when something fails, 0 else; warnings are about things that work in a lesser way.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from kvtier.cli.options import add_url, configuration

__all__ = ["register"]


def register(commands: Any) -> None:
    """Adds `kvtier doctor`."""
    parser = commands.add_parser(
        "doctor", help="check this host, line by line", description=__doc__
    )
    add_url(parser)
    parser.set_defaults(timeout=2.0)
    parser.add_argument("--json", action="store_true")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    effective = configuration(arguments)
    from kvtier.cli.checks import Grade, run_checks

    url = arguments.url or effective.config.daemon.listen[0]
    findings = run_checks(effective, url, timeout_s=arguments.timeout)
    if arguments.json:
        print(
            json.dumps(
                [
                    {
                        "check": finding.check,
                        "grade": finding.grade.value,
                        "found": finding.found,
                        "remedy": finding.remedy,
                    }
                    for finding in findings
                ],
                indent=2,
            )
        )
    else:
        for finding in findings:
            print(f"{finding.grade.value:4}  {finding.check:12}  {finding.found}")
            if finding.remedy:
                print(f"{'':20}remedy: {finding.remedy}")
    return 1 if any(finding.grade is Grade.FAIL for finding in findings) else 0
