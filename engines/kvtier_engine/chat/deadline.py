"""A socket whose reads together have to end in time: its own timeout is for each read alone, and
somebody who sends a byte now and then is waited for for ever.

One thread.
"""

from __future__ import annotations

import io
import socket
import time
from http.client import HTTPResponse
from typing import Any, cast

__all__ = ["Deadline", "response_within"]


class Deadline:
    """By the monotonic clock, `seconds_max` after it was made or begun again."""

    def __init__(self, seconds_max: float) -> None:
        self._seconds_max = seconds_max
        self._ends = 0.0
        self.begin()

    def begin(self) -> None:
        self._ends = time.monotonic() + self._seconds_max

    def left(self) -> float:
        """Seconds. Raises TimeoutError when there are none."""
        left = self._ends - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


class _Read(io.RawIOBase):
    """What a socket receives."""

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self._sock = sock
        self._raw = sock.makefile("rb", buffering=0)  # keeps the socket open as long as it is
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(self._deadline.left())
        return cast("io.RawIOBase", self._raw).readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Socket:
    """As much of one as HTTPResponse uses."""

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self._sock = sock
        self._deadline = deadline

    def makefile(self, _: str) -> io.BufferedReader:
        return io.BufferedReader(_Read(self._sock, self._deadline))


def response_within(deadline: Deadline) -> Any:
    """What HTTPConnection.response_class may be: its reads raise TimeoutError at the deadline."""

    def made(sock: socket.socket, *args: Any, **words: Any) -> HTTPResponse:
        return HTTPResponse(cast("socket.socket", _Socket(sock, deadline)), *args, **words)

    return made
