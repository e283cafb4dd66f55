"""Clients of the local plane, each a process that a test holds, stops or kills in the middle of
what it does.

    tests -> crew (has loaded the client's code, does nothing else) -> a client for each `client`

A client runs a role of `local_roles`, which talks to its test in lines: what it says is read by
`heard`, what `tell` says goes to it. One thread at a time.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kvtier
from tests.client.local_rig import attached
from tests.faults.local_roles import MESSAGE_BYTES_MAX, PAGES

__all__ = ["Crew", "Mate", "client", "settled", "store"]

_ROOT = Path(__file__).parents[2]
_SAY_S_MAX = 30.0


class Mate:
    """A client; ended with the crew at the latest."""

    def __init__(self, pid: int, said: int, told: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._said, self._told = said, os.fdopen(told, "w")
        self._unread = b""

    def heard(self) -> Any:
        """The next thing that it says."""
        while b"\n" not in self._unread:
            assert select.select([self._said], [], [], _SAY_S_MAX)[0], "it says nothing"
            more = os.read(self._said, 1 << 16)
            assert more, "it has died"
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def tell(self, text: str = "go") -> None:
        self._told.write(text + "\n")
        self._told.flush()

    def signal(self, number: signal.Signals) -> None:
        signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """SIGKILL; it has ended when this returns."""
        if self._told.closed:
            return
        if not select.select([self._pidfd], [], [], 0)[0]:
            self.signal(signal.SIGKILL)
        assert select.select([self._pidfd], [], [], 10)[0]
        self._told.close()
        os.close(self._said)
        os.close(self._pidfd)


class Crew:
    """Close it; clients that still run are killed with it."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(60)
        self._mates: list[Mate] = []
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.local_roles", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                cwd=_ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def client(self, url: str, role: str, **options: Any) -> Mate:
        says, said = os.pipe()
        told, tells = os.pipe()
        message = json.dumps({"url": url, "role": role, "options": options}).encode()
        assert len(message) < MESSAGE_BYTES_MAX
        try:
            socket.send_fds(self._channel, [message], [said, told])
            pid = int(self._channel.recv(16))
        finally:
            os.close(said)
            os.close(told)
        mate = Mate(pid, says, tells)
        self._mates.append(mate)
        return mate

    def end(self) -> None:
        """Kills every client."""
        for mate in self._mates:
            mate.kill()
        self._mates.clear()

    def close(self) -> None:
        self.end()
        self._channel.close()
        self._process.wait(10)


def settled(condition: Callable[[], object], within_s: float = 2.0) -> None:
    """Returns as soon as it holds."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not so within {within_s:g} s"
        time.sleep(0.02)


@contextmanager
def client(
    daemon: Any, *, layout: kvtier.Layout = PAGES.layout, deadline: float = 10.0
) -> Iterator[tuple[kvtier.Connection, kvtier.Namespace]]:
    """A client in this process that reads and writes by shared memory."""
    with kvtier.connect(daemon.url, deadline=deadline) as kv:
        ns = kv.namespace(layout)
        attached(kv)
        yield kv, ns


def store(ns: kvtier.Namespace, numbers: Any, version: int = 1) -> kvtier.PutResult:
    """Puts pages, each for itself."""
    pages = [PAGES.page(number, version) for number in numbers]
    return ns.put(PAGES.keys(numbers), pages, chain=False)
