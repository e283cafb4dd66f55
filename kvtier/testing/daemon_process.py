"""A real daemon in a process of its own, for tests: started, waited for, and never left behind.

Every wait has a hard limit; `close` kills. One thread a DaemonProcess.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["DaemonNotReady", "DaemonProcess", "stop_process"]

_COMMAND = (sys.executable, "-m", "kvtier", "serve")
_READY_S = 20.0
#: States of a thread that does nothing more after a SIGSTOP: stopped, ended (proc(5)).
_STILL = frozenset("TtZX")
_END_S = 20.0


class DaemonNotReady(Exception):
    """The daemon ended, or was not READY in time; the message holds its output."""


class DaemonProcess:
    """`kvtier serve` with its directory and socket below `base`.

    `settings` are --set values on top of a small arena; a restart (`start` again) keeps directory
    and socket. `prefix` is put before the command, to run it in a namespace or under a limit.
    """

    def __init__(
        self, base: Path, *settings: str, prefix: Sequence[str] = (), umask: int = -1
    ) -> None:
        self.base = base
        self.directory = base / "state"
        self.socket = base / "run" / "kvtier.sock"
        self.url = f"unix://{self.socket}"
        self.log_path = base / "daemon.log"
        self._settings = settings
        self._prefix = tuple(prefix)
        self._umask = umask
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def log(self) -> str:
        """All output so far, of every start."""
        return self.log_path.read_text() if self.log_path.exists() else ""

    def start(self, *options: str, wait: bool = True, crash_point: str = "") -> DaemonProcess:
        """Starts it; with `wait` returns when it is READY, or raises DaemonNotReady.

        `options` are further words of the command, `crash_point` where it is to die by SIGKILL.
        """
        assert self._process is None or self._process.poll() is not None, "running"
        reader, writer = os.pipe()
        settings = {
            "daemon.directory": str(self.directory),
            "daemon.listen": self.url,
            "host.bytes": "16MiB",
        }
        settings |= dict(setting.split("=", 1) for setting in self._settings)
        words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
        environment = {"KVTIER_CRASH_POINT": crash_point} if crash_point else {}
        try:
            self._process = self._spawn([*words, *options], environment, ready_fd=writer)
        finally:
            os.close(writer)
        try:
            if wait:
                self._wait_ready(reader)
        finally:
            os.close(reader)
        return self

    def wait_logged(self, text: str, *, times: int = 1) -> None:
        """Returns when the output holds `text` so often. Raises DaemonNotReady after a while."""
        deadline = time.monotonic() + _READY_S
        while self.log.count(text) < times:
            if time.monotonic() > deadline:
                raise DaemonNotReady(f"{text!r} did not come in {_READY_S:g} s:\n{self.log}")
            time.sleep(0.01)

    def signal(self, number: signal.Signals) -> None:
        """After SIGSTOP it does nothing more when this returns, which can take a moment."""
        if number is signal.SIGSTOP:
            stop_process(self.pid)
        else:
            os.kill(self.pid, number)

    def wait(self, timeout_s: float = _END_S) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        assert self._process is not None, "not started"
        return self._process.wait(timeout_s)

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """SIGKILL to it and all it started, if it runs."""
        if self._process is None or self._process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_END_S)

    def close(self) -> None:
        self.kill()

    def __enter__(self) -> DaemonProcess:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _spawn(
        self, words: Sequence[str], environment: Mapping[str, str], *, ready_fd: int
    ) -> subprocess.Popen[bytes]:
        """`kvtier serve` with these words more; what it writes goes to the end of the log."""
        with self.log_path.open("ab") as output:
            return subprocess.Popen(
                [*self._prefix, *_COMMAND, *words, "--ready-fd", str(ready_fd)],
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(ready_fd,),
                umask=self._umask,
                start_new_session=True,
            )

    def _wait_ready(self, reader: int) -> None:
        readable, _, _ = select.select([reader], [], [], _READY_S)
        if not readable or os.read(reader, 64) != b"READY=1\n":
            self.kill()
            assert self._process is not None
            raise DaemonNotReady(f"exit code {self._process.returncode}:\n{self.log}")


def stop_process(pid: int) -> None:
    """SIGSTOP. Returns when all its threads have stopped, which is some time after the signal was
    sent. Raises ProcessLookupError, and TimeoutError if one goes on.
    """
    os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + _END_S
    while not all(map(_is_still, _threads(pid))):
        if time.monotonic() > until:
            raise TimeoutError(f"process {pid} did not stop in {_END_S:g} s")
        time.sleep(0.001)


def _threads(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except FileNotFoundError as error:
        raise ProcessLookupError(f"process {pid} has ended") from error


def _is_still(task: Path) -> bool:
    try:
        stat = (task / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True  # the thread has ended
    return stat.rpartition(")")[2].split()[0] in _STILL
