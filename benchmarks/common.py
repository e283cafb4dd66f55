"""What every benchmark needs: a daemon of its own, medians, and a word about the machine."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np

import kvtier
from kvtier.testing.daemon_process import DaemonProcess

__all__ = ["daemon", "environment", "malloc_environment", "median", "report", "resident_bytes"]


def malloc_environment() -> dict[str, str]:
    """glibc keeps message-sized blocks instead of giving them back: both sides of a comparison."""
    return os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "1073741824",
        "MALLOC_TRIM_THRESHOLD_": "8589934592",
    }


@contextmanager
def daemon(*settings: str) -> Iterator[tuple[str, int, float]]:
    """A daemon in a directory of its own: (url, process id, seconds until READY)."""
    with tempfile.TemporaryDirectory(prefix="kvt-") as home:
        process = DaemonProcess(Path(home), *settings)
        started = time.monotonic()
        with process as running:
            yield running.url, running.pid, time.monotonic() - started


def resident_bytes(pid: int) -> int:
    """Anonymous resident memory of a process: what it holds beside the shared arena and files."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no RssAnon for process {pid}")


def median(values: list[float]) -> float:
    return statistics.median(values)


def environment() -> dict[str, object]:
    """Machine, versions and commit, for the report."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "grpcio": grpc.__version__,
        "numpy": np.__version__,
        "kvtier": kvtier.__version__,
        "commit": commit or "unknown",
    }


def report(name: str, rows: list[dict[str, object]], out: str | None) -> None:
    """Prints the rows as a Markdown table and writes them as JSON where `out` says."""
    columns = list(rows[0])
    lines = [" | ".join(columns), " | ".join("---" for _ in columns)]
    lines += [" | ".join(_text(row[column]) for column in columns) for row in rows]
    machine = environment()
    sys.stdout.write(f"\n## {name}\n\n")
    sys.stdout.write(", ".join(f"{key} {value}" for key, value in machine.items()) + "\n\n")
    sys.stdout.write("".join(f"| {line} |\n" for line in lines))
    if out:
        document = {"name": name, "environment": machine, "rows": rows}
        Path(out).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _text(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
