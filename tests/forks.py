"""Daemons and commands forked from a process that has imported everything already: a start without
the second that Python takes to load the code, so that a test can have a hundred of them.

    tests -> forker (loads the code, does nothing else) -> `kvtier WORDS`, a process group leader

Each is the whole of `kvtier serve`, or of another command, as the command line runs it, with its
own descriptors and the environment that it is given. Tests of what is loaded when, and of limits
and namespaces of a process, start fresh ones. One thread at a time.
"""

from __future__ import annotations

import gc
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvtier.testing.daemon_process import DaemonProcess

_MESSAGE_BYTES_MAX = 1 << 17
_LOAD_S = 60.0


class Forked:
    """A forked process, as far as DaemonProcess needs a Popen. Any thread."""

    def __init__(self, pid: int, status_fd: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status_fd = status_fd
        self._lock = threading.Lock()  # between reading the status and closing its pipe

    def poll(self) -> int | None:
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def _ended(self, timeout_s: float | None) -> int | None:
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._lock:
                if self.returncode is None and select.select([self._status_fd], [], [], 0)[0]:
                    text = os.read(self._status_fd, 16)
                    os.close(self._status_fd)
                    assert text, "the forker has died"
                    self.returncode = int(text)
            is_late = until is not None and time.monotonic() >= until
            if self.returncode is not None or is_late:
                return self.returncode
            time.sleep(0.002)


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
        self, words: Sequence[str], environment: Mapping[str, str], *, output: Sequence[int]
    ) -> Forked:
        """`kvtier` with these words, this environment and nothing more of it; `output` are its
        standard output and error, and a third descriptor, whose number is what {ready_fd} in a word
        stands for.
        """
        status, writer = os.pipe()
        message = json.dumps({"words": list(words), "environment": dict(environment)}).encode()
        assert len(message) < _MESSAGE_BYTES_MAX
        try:
            socket.send_fds(self._channel, [message], [writer, *output])
            answer = self._channel.recv(16)
        finally:
            os.close(writer)
        return Forked(int(answer), status)

    def run(
        self, words: Sequence[str], environment: Mapping[str, str], *, timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """A command until its end, and what it wrote. Raises subprocess.TimeoutExpired."""
        with ExitStack() as stack:
            out, err = (
                stack.enter_context(os.fdopen(os.memfd_create(name), "rb"))
                for name in ("stdout", "stderr")
            )
            made = self.fork(words, environment, output=(out.fileno(), err.fileno()))
            try:
                code = made.wait(timeout_s)
            except subprocess.TimeoutExpired:
                os.killpg(made.pid, signal.SIGKILL)
                made.wait(timeout_s)
                raise
            said = []
            for stream in (out, err):
                stream.seek(0)
                said.append(stream.read().decode())
        return subprocess.CompletedProcess(list(words), code, *said)

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
        log = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            return self._forker.fork(words, os.environ | environment, output=(log, log, ready_fd))
        finally:
            os.close(log)


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
            message, fds, _, _ = socket.recv_fds(channel, _MESSAGE_BYTES_MAX, 4)
            if not message:
                for pid, _ in children.values():
                    os.kill(pid, signal.SIGKILL)
                return
            request = json.loads(message)
            status_fd, *output = fds
            pid = os.fork()
            if pid == 0:
                os.setsid()
                for fd in (channel.detach(), status_fd, *children):
                    os.close(fd)
                for _, other in children.values():
                    os.close(other)
                _become(request, output)
            for fd in output:
                os.close(fd)
            children[os.pidfd_open(pid)] = (pid, status_fd)
            channel.send(str(pid).encode())


def _become(request: dict, output: Sequence[int]) -> None:
    """The command, and the end of the process."""
    code: object = 70
    try:
        out, err, *ready = output
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.close(out)
        if err != out:
            os.close(err)
        os.environ.clear()
        os.environ |= request["environment"]
        words = request["words"]
        if ready:
            words = [word.replace("{ready_fd}", str(ready[0])) for word in words]
        code = main(words)
    except SystemExit as end:  # argparse has said the rest
        code = end.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


if __name__ == "__main__":
    import kvtier
    import kvtier.daemon.run
    from kvtier.cli import main

    # Compiled code is loaded once, here.
    kvtier.warm_up()

    # What is there now stays shared: a daemon that collects garbage must not copy all of it.
    gc.collect()
    gc.freeze()
    _serve_forks(socket.socket(fileno=int(sys.argv[1])))


@contextmanager
def daemon_of_its_own(forker: Forker, *settings: str) -> Iterator[ForkedDaemon]:
    """A running daemon in a directory with a name short enough for a socket path."""
    base = Path(tempfile.mkdtemp(prefix="kvt-"))
    try:
        with ForkedDaemon(forker, base, *settings) as running:
            yield running
    finally:
        shutil.rmtree(base, ignore_errors=True)
