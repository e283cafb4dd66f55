"""What was measured on and with: a word about the machine, the versions and the commit.

No number means anything without it. Reads files and asks git; one thread.
"""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import kvtier

__all__ = ["described", "environment"]

_PACKAGES = ("numpy", "numba", "torch", "grpcio", "xxhash")


def environment(seed: int) -> dict[str, object]:
    commit = _git("rev-parse", "--short", "HEAD")
    return {
        "machine": {
            "cpu": _field("/proc/cpuinfo", "model name"),
            "cores": os.cpu_count(),
            "cores_usable": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "kernel": platform.release(),
        },
        "versions": {"python": platform.python_version()}
        | {name: _version(name) for name in _PACKAGES}
        | {"kvtier": kvtier.__version__},
        "commit": commit or "unknown",
        "dirty": bool(_git("status", "--porcelain")) if commit else None,
        "seed": seed,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def described(facts: dict[str, object]) -> str:
    """One paragraph of it, for people."""
    machine, versions = facts["machine"], facts["versions"]
    memory = machine["memory_bytes"] / (1 << 30)
    named = ", ".join(f"{name} {number}" for name, number in versions.items())
    state = {True: " with changes", False: "", None: ""}[facts["dirty"]]
    loads = " ".join(f"{load:g}" for load in facts["load_average"])
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {memory:.0f} GiB, Linux {machine['kernel']}; "
        f"{named}; commit {facts['commit']}{state}; seed {facts['seed']}; {facts['date']}; "
        f"load average at start {loads}"
    )


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        if line.startswith(name):
            return line.split(":", 1)[1].strip()
    return "unknown"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _git(*words: str) -> str:
    """What git says of the folder of this file; nothing without git or a repository."""
    try:
        done = subprocess.run(
            ["git", *words],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
