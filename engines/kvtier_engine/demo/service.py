"""A daemon of the demo's own, on a unix socket in a temporary directory; ends with the demo.

It has an NVMe tier in that directory, and can be killed without warning and started again.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from kvtier.config import process_environment
from kvtier_engine.errors import DemoFailed

__all__ = ["Daemon", "running_daemon"]

START_SECONDS_MAX = 20
STOP_SECONDS_MAX = 20
HOST_BYTES = "256MiB"
NVME_BYTES = "512MiB"


class Daemon:
    """`kvtier serve` with everything below `home`."""

    def __init__(self, home: Path) -> None:
        self.url = f"unix://{home}/kvtier.sock"
        self.nvme_directory = home / "nvme"
        self._state_directory = home / "state"
        self._log = home / "daemon.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def start(self) -> None:
        """Returns when it answers. Raises DemoFailed."""
        ready, ready_writer = os.pipe()
        with os.fdopen(ready, "rb", buffering=0) as reader, self._log.open("ab") as sink:
            self._process = subprocess.Popen(
                [*self._command(), "--ready-fd", str(ready_writer)],
                stdout=sink,
                stderr=sink,
                pass_fds=[ready_writer],
                env=_environment(),
            )
            os.close(ready_writer)
            self._wait_until_ready(reader)

    def kill(self) -> None:
        """SIGKILL: it has no time to save anything."""
        assert self._process is not None, "not started"
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """In order, if it runs."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self.kill()

    def _command(self) -> list[str]:
        settings = {
            "daemon.directory": self._state_directory,
            "daemon.listen": self.url,
            "host.bytes": HOST_BYTES,
            "nvme.paths": self.nvme_directory,
            "nvme.bytes": NVME_BYTES,
        }
        command = [sys.executable, "-m", "kvtier", "serve"]
        for name, value in settings.items():
            command += ["--set", f"{name}={value}"]
        return command

    def _wait_until_ready(self, reader: BinaryIO) -> None:
        """The daemon writes a line when it serves, and closes the pipe when it ends."""
        heard, _, _ = select.select([reader], [], [], START_SECONDS_MAX)
        if not heard or not reader.read(1):
            raise DemoFailed(
                f"the daemon did not get ready:\n{self._log.read_text(encoding='utf-8')[-2000:]}",
                remedy="its log above says why",
            )


@contextlib.contextmanager
def running_daemon() -> Iterator[Daemon]:
    """Starts `kvtier serve`, waits until it answers, and stops it at the end."""
    with tempfile.TemporaryDirectory(prefix="kvtier-demo-") as home:
        daemon = Daemon(Path(home))
        try:
            daemon.start()
            yield daemon
        finally:
            daemon.stop()


def _environment() -> dict[str, str]:
    """Ours without kvtier's settings: those are for the user's own daemon."""
    return {
        name: value
        for name, value in process_environment().items()
        if not name.startswith("KVTIER_")
    }
