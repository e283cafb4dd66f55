"""A daemon of the demo's own, on a unix socket in a temporary directory; ends with the demo."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kvtier_engine.errors import DemoFailed

__all__ = ["Daemon", "running_daemon"]

START_SECONDS_MAX = 20
STOP_SECONDS_MAX = 10
HOST_BYTES = "256MiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Daemon:
    url: str
    pid: int


@contextlib.contextmanager
def running_daemon() -> Iterator[Daemon]:
    """Starts `kvtier serve`, waits until it answers, and stops it at the end."""
    with tempfile.TemporaryDirectory(prefix="kvtier-demo-") as home:
        log = Path(home, "daemon.log")
        url = f"unix://{home}/kvtier.sock"
        ready, ready_writer = os.pipe()
        with os.fdopen(ready, "rb", buffering=0) as reader, log.open("wb") as sink:
            process = subprocess.Popen(
                [*_command(home, url), "--ready-fd", str(ready_writer)],
                stdout=sink,
                stderr=sink,
                pass_fds=[ready_writer],
                env=_environment(),
            )
            os.close(ready_writer)
            try:
                _wait_until_ready(reader, log)
                yield Daemon(url=url, pid=process.pid)
            finally:
                _stop(process)


def _environment() -> dict[str, str]:
    """Ours without kvtier's settings: those are for the user's own daemon."""
    return {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}


def _command(home: str, url: str) -> list[str]:
    settings = {
        "daemon.directory": f"{home}/state",
        "daemon.listen": url,
        "host.bytes": HOST_BYTES,
    }
    command = [sys.executable, "-m", "kvtier", "serve"]
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    return command


def _wait_until_ready(reader: BinaryIO, log: Path) -> None:
    """The daemon writes a line when it serves, and closes the pipe when it ends."""
    heard, _, _ = select.select([reader], [], [], START_SECONDS_MAX)
    if not heard or not reader.read(1):
        raise DemoFailed(
            f"the daemon did not get ready:\n{log.read_text(encoding='utf-8')[-2000:]}",
            remedy="its log above says why",
        )


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
