"""The options that name a trace, and reading it, for the kinds of `kvtier bench` that take one."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

from kvtier.bench.arrivals import Arrivals
from kvtier.bench.errors import BenchInput
from kvtier.bench.formats import ReadOptions, TraceFormat, read_trace
from kvtier.bench.trace import Trace
from kvtier.cli.progress_bar import ProgressBar
from kvtier.config import process_environment

__all__ = ["check_arrivals", "find_trace", "given_arrivals", "load_trace"]

_TRACES: Final = "KVTIER_TRACES"
_DRAWN: Final = (TraceFormat.WEKA, TraceFormat.AGENT_COMPACT)


def load_trace(arguments: argparse.Namespace) -> Trace:
    """Reads it with a progress bar. Raises TraceError and BenchInput."""
    path = find_trace(arguments.trace)
    size = path.stat().st_size if path.is_file() else 1
    bar = ProgressBar(f"reading {path.name}", size, unit="bytes")
    drawn = given_arrivals(arguments)
    options = ReadOptions(
        block_tokens=arguments.block_tokens, arrivals=Arrivals(**drawn), progress=bar.at
    )
    try:
        trace = read_trace(path, options)
    finally:
        bar.end()
    check_arrivals(drawn, trace)
    return trace


def find_trace(path: Path) -> Path:
    """A name that is no file may be one in the folder of traces. Raises BenchInput for a pipe or
    device: a trace is opened more than once, the first time to see what it is.
    """
    folder = process_environment().get(_TRACES)
    if folder and not path.exists() and not path.is_absolute():
        beside = Path(folder) / path
        if beside.exists():
            path = beside
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise BenchInput(f"{path} is a pipe or device", remedy="name a regular file, or a folder")
    return path


def given_arrivals(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fields of Arrivals that were given."""
    given = {
        "hours": arguments.start_hours,
        "gap_max_s": arguments.gap_max,
        "seed": arguments.seed,
    }
    return {name: value for name, value in given.items() if value is not None}


def check_arrivals(given: dict[str, Any], trace: Trace) -> None:
    """Raises BenchInput when starts of sessions were described and the trace has its own."""
    if given and trace.format not in _DRAWN:
        raise BenchInput(
            "--start-hours, --gap-max and --seed are for traces of agents, whose starts are drawn",
            remedy="leave them out",
        )
