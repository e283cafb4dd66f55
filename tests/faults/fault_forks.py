"""Daemons forked from a process that has imported everything already: a start without the second
that Python takes to load the code, so that a test can have a hundred of them.

    tests -> forker (loads the daemon's code, does nothing else) -> daemon, a process group leader

The daemon is the whole `kvtier serve` as the command line runs it, with its own descriptors and
environment. One thread at a time.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvtier.testing.daemon_process import DaemonProcess

_MESSAGE_BYTES_MAX = 1 << 16
_LOAD_S = 60.0


class Forked:
    """A forked daemon, as far as DaemonProcess needs a Popen."""

    def __init__(self, pid: int, status_fd: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status_fd = status_fd

    def poll(self) -> int | None:
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"daemon {self.pid}", timeout or 0.0)
        return code

    def _ended(self, timeout_s: float | None) -> int | None:
        if self.returncode is None and select.select([self._status_fd], [], [], timeout_s)[0]:
            text = os.read(self._status_fd, 16)
            os.close(self._status_fd)
            assert text, "the forker has died"
            self.returncode = int(text)
        return self.returncode


class Forker:
    """Close it; daemons that still run are killed with it."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(_LOAD_S)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            )

    def fork(
        self, words: Sequence[str], environment: Mapping[str, str], log: Path, ready_fd: int
    ) -> Forked:
        """`kvtier` with these words; {ready_fd} in them is the number of that descriptor."""
        status, writer = os.pipe()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        message = json.dumps({"words": list(words), "environment": dict(environment)}).encode()
        assert len(message) < _MESSAGE_BYTES_MAX
        try:
            socket.send_fds(self._channel, [message], [writer, output, ready_fd])
            answer = self._channel.recv(16)
        finally:
            os.close(writer)
            os.close(output)
        return Forked(int(answer), status)

    def close(self) -> None:
        self._channel.close()
        self._process.wait(10)


class ForkedDaemon(DaemonProcess):
    """As DaemonProcess, with the process from `forker`."""

    def __init__(self, forker: Forker, base: Path, *settings: str) -> None:
        super().__init__(base, *settings)
        self._forker = forker

    def _spawn(
        self, words: Sequence[str], environment: Mapping[str, str], *, ready_fd: int
    ) -> Forked:
        words = ["serve", *words, "--ready-fd", "{ready_fd}"]
        return self._forker.fork(words, environment, self.log_path, ready_fd)


# -- the forker's own process ----------------------------------------------------------------------


def _serve_forks(channel: socket.socket) -> None:
    """Until the other end is closed, and the daemons are gone with it."""
    children: dict[int, tuple[int, int]] = {}  # pidfd -> pid, where its exit code goes
    while True:
        ready, _, _ = select.select([channel, *children], [], [])
        for pidfd in set(ready) & set(children):
            pid, status_fd = children.pop(pidfd)
            _, status = os.waitpid(pid, 0)
            os.write(status_fd, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(status_fd)
            os.close(pidfd)
        if channel in ready:
            message, fds, _, _ = socket.recv_fds(channel, _MESSAGE_BYTES_MAX, 3)
            if not message:
                for pid, _ in children.values():
                    os.kill(pid, signal.SIGKILL)
                return
            request = json.loads(message)
            status_fd, output, ready_fd = fds
            pid = os.fork()
            if pid == 0:
                for fd in (channel.detach(), status_fd, *children):
                    os.close(fd)
                for _, other in children.values():
                    os.close(other)
                _become_daemon(request, output, ready_fd)
            os.close(output)
            os.close(ready_fd)
            children[os.pidfd_open(pid)] = (pid, status_fd)
            channel.send(str(pid).encode())


def _become_daemon(request: dict, output: int, ready_fd: int) -> None:
    code = 70
    try:
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        os.environ |= request["environment"]
        words = [word.format(ready_fd=ready_fd) for word in request["words"]]
        code = main(words)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    import kvtier.daemon.run  # noqa: F401
    from kvtier.cli import main

    # What is there now stays shared: a daemon that collects garbage must not copy all of it.
    gc.collect()
    gc.freeze()
    _serve_forks(socket.socket(fileno=int(sys.argv[1])))
