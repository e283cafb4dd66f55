"""The control socket of the local plane: gives clients of this user the arena and the directory,
hears what they have used, and takes what they write.

A thread of its own, so that calls under way do not hold up a client that attaches. A client that
breaks a rule of the frames is told so and cut off; none can make the daemon wait. A writer's
process is watched (pidfd): its connection can end while it still writes, so what it was granted is
not used again before it has given that back or its process has ended. `start` and `close` are
called once, `attached` from any thread.
"""

from __future__ import annotations

import errno
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Protocol

from kvtier.daemon.sockets import Refuse, claimed_socket
from kvtier.errors import KvtierError, LimitExceeded
from kvtier.transfer.local import frames

__all__ = ["LocalServer", "Offer", "Writes"]

log = logging.getLogger(__name__)

_BACKLOG = 128
_HELLO_S_MAX = 5.0
_ACCEPT_PAUSE_S = 0.1
#: Packets of one client in a row, so that one that never stops does not keep the others waiting.
_PACKETS_PER_TURN = 32
_CREDENTIALS = struct.Struct("3i")
#: sys/socket.h, since Linux 6.5: a descriptor of the very process that connected.
_SO_PEERPIDFD = 77
#: Between two looks at grants whose time may have passed.
_EXPIRE_S = 0.2


class Writes(Protocol):
    """What is done with writers; see daemon.local_writes. A holder is one connection of one."""

    def write(self, holder: int, frame: frames.Write) -> Iterator[frames.Written]: ...
    def expire(self) -> None: ...
    def ended(self, holder: int) -> bool: ...
    def exited(self, holder: int) -> None: ...
    def undelivered(self, holder: int, answer: frames.Written) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a client gets. The descriptors are the giver's, and open as long as the server is."""

    welcome: frames.Welcome
    arena_fd: int  # read-only
    directory_fd: int
    writable_fd: int  # the arena, for writers


@dataclass(slots=True, eq=False)
class _Client:
    socket: socket.socket
    hello_by: float
    is_attached: bool = False
    writer: _Writer | None = None
    is_gone: bool = False  # there may be packets of it that were not read yet
    #: Told when it has said hello: what is sent to one that has unread packets gets lost.
    refused: frames.Refused | None = None


@dataclass(slots=True, eq=False)
class _Writer:
    """A process that may write to what `holder` was granted; `pidfd` says when it has ended."""

    holder: int
    pidfd: int
    client: _Client | None  # None: its connection has ended


class LocalServer:
    """`on_used` and `on_attached` are called in the server's thread."""

    def __init__(
        self,
        path: Path,
        offer: Offer,
        on_used: Callable[[frames.Used], None],
        on_attached: Callable[[], None],
        writes: Writes,
        *,
        connections_max: int,
    ) -> None:
        self.path = path
        self._offer = offer
        self._on_used = on_used
        self._on_attached = on_attached
        self._writes = writes
        self._holders = count(1)
        self._writers: set[_Writer] = set()
        self._connections_max = connections_max
        self._clients: set[_Client] = set()
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._wake_r, self._wake_w = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="kvtier-local", daemon=True)
        self._is_listening = False
        self._accepts_at = 0.0  # when to accept again; 0: it does

    @property
    def attached(self) -> int:
        """Clients that have the arena and the directory."""
        return sum(c.is_attached and c.writer is None for c in list(self._clients))

    @property
    def writers(self) -> int:
        """Clients that may write to what they are granted."""
        return sum(client.writer is not None for client in list(self._clients))

    def start(self, refuse: Refuse) -> None:
        """Listens. Raises what `refuse` makes when the socket cannot be had."""
        with claimed_socket(self.path, refuse):
            try:
                self._listener.bind(str(self.path))
            except OSError as error:
                raise refuse(
                    f"{self.path} cannot be bound: {error.strerror}", "Name a shorter path."
                ) from error
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_r, selectors.EVENT_READ)
        self._is_listening = True
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and every connection; clients that are attached notice by that."""
        os.close(self._wake_w)
        if self._is_listening:
            self._thread.join()
            self.path.unlink(missing_ok=True)
        for client in self._clients:
            client.socket.close()
        self._clients.clear()
        for writer in self._writers:
            os.close(writer.pidfd)
        self._writers.clear()
        self._selector.close()
        self._listener.close()
        os.close(self._wake_r)

    def _serve(self) -> None:
        expire_at = 0.0
        while True:
            for key, _ in self._selector.select(self._wait_s()):
                if key.fileobj == self._wake_r:
                    return
                with self._guarded():
                    self._happened(key)
            now = time.monotonic()
            if self._writers and now >= expire_at:
                with self._guarded():
                    self._writes.expire()
                expire_at = now + _EXPIRE_S
            for client in [c for c in self._clients if not c.is_attached and c.hello_by < now]:
                with self._guarded():
                    self._drop(client)
            if self._accepts_at and self._accepts_at <= now:
                self._accepts_at = 0.0
                self._selector.register(self._listener, selectors.EVENT_READ)

    def _happened(self, key: selectors.SelectorKey) -> None:
        if key.fileobj is self._listener:
            self._accept()
        elif isinstance(key.data, _Writer):
            self._exited(key.data)
        elif key.data in self._clients:
            self._take(key.data)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """The thread serves all clients: what goes wrong with one must not end it."""
        try:
            yield
        except Exception:
            log.exception("task.crashed", extra={"task": "local"})

    def _wait_s(self) -> float | None:
        if self._accepts_at:
            return _ACCEPT_PAUSE_S
        if self._writers:
            return _EXPIRE_S
        is_hello_due = any(not client.is_attached for client in self._clients)
        return _HELLO_S_MAX if is_hello_due else None

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError as error:  # it went away, or there are no descriptors left
            log.warning("local.accept_failed", extra={"error": str(error)})
            self._pause_accepting()
            return
        accepted.setblocking(False)
        client = _Client(accepted, time.monotonic() + _HELLO_S_MAX)
        self._clients.add(client)
        self._selector.register(accepted, selectors.EVENT_READ, client)
        _, uid, _ = _CREDENTIALS.unpack(
            accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if uid != os.geteuid():
            client.refused = frames.Refused(
                error="LimitExceeded",
                message=f"uid {uid} is not the daemon's",
                remedy="use the gRPC plane",
            )
        elif len(self._clients) > self._connections_max:
            client.refused = frames.Refused(
                error="LimitExceeded",
                message=f"{self._connections_max} connections are attached, the most (two for each "
                "of limits.sessions_max)",
                remedy="close connections that are not needed, or raise limits.sessions_max",
            )

    def _pause_accepting(self) -> None:
        """Whoever waits goes on waiting, without keeping this thread busy."""
        self._selector.unregister(self._listener)
        self._accepts_at = time.monotonic() + _ACCEPT_PAUSE_S

    def _take(self, client: _Client) -> None:
        """What a client has sent, some packets at a time."""
        for _ in range(_PACKETS_PER_TURN):
            try:
                packet, _, flags, _ = client.socket.recvmsg(frames.FRAME_BYTES_MAX)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # it has gone with answers unread: what it said before is still there
            except OSError:
                packet, flags = b"", 0
            if not packet:
                self._drop(client)
                return
            try:
                if flags & socket.MSG_TRUNC:
                    raise frames.invalid(f"has more than {frames.FRAME_BYTES_MAX} bytes")
                self._handle(client, frames.decode(packet))
            except KvtierError as error:
                kind, message = type(error).__name__, str(error)
                refused = frames.Refused(error=kind, message=message, remedy=error.remedy)
                self._refuse(client, refused)
            except Exception:
                self._drop(client)
                raise
            if client not in self._clients:
                return

    def _handle(self, client: _Client, frame: frames.Frame) -> None:
        """Raises InvalidFrame."""
        if isinstance(frame, frames.Write) and client.writer is not None:
            holder = client.writer.holder
            if client.is_gone:
                frame = replace(frame, wanted=0)
            for answer in self._writes.write(holder, frame):
                if not self._answer(client, holder, answer):
                    break  # else it would be granted slots that nobody ever takes back
        elif isinstance(frame, frames.Used) and client.is_attached and client.writer is None:
            self._on_used(frame)
        elif isinstance(frame, frames.Hello) and client.refused is not None:
            self._refuse(client, client.refused)
        elif isinstance(frame, frames.Hello) and not client.is_attached:
            if frame.version != frames.VERSION:
                raise frames.invalid(
                    f"is of version {frame.version}, the daemon's is {frames.VERSION}"
                )
            self._welcome(client, frame)
        else:
            raise frames.invalid(f"comes out of turn: {type(frame).__name__}")

    def _welcome(self, client: _Client, hello: frames.Hello) -> None:
        offer = self._offer
        if hello.writes:
            self._watch(client)
            fds = [offer.writable_fd]
        else:
            fds = [offer.arena_fd, offer.directory_fd]
        client.is_attached = True
        try:
            socket.send_fds(client.socket, [frames.encode(offer.welcome)], fds)
        except OSError:
            self._drop(client)
            return
        self._on_attached()
        log.info(
            "local.attached",
            extra={"client": hello.client, "writes": hello.writes, "clients": self.attached},
        )

    def _watch(self, client: _Client) -> None:
        """Raises LimitExceeded where it cannot be known when the client's process ends."""
        try:
            pidfd = _pidfd_of(client.socket)
        except OSError as error:
            raise LimitExceeded(
                f"the client's process cannot be watched: {error.strerror}",
                remedy="run client and daemon in one pid namespace; puts go over gRPC meanwhile",
            ) from error
        client.writer = writer = _Writer(next(self._holders), pidfd, client)
        self._writers.add(writer)
        self._selector.register(pidfd, selectors.EVENT_READ, writer)

    def _exited(self, writer: _Writer) -> None:
        """Its process has ended, so it writes no more."""
        client = writer.client
        if client is not None:
            self._drop(client)
        if writer in self._writers:
            self._writes.exited(writer.holder)
            self._forget(writer)

    def _forget(self, writer: _Writer) -> None:
        self._writers.discard(writer)
        self._selector.unregister(writer.pidfd)
        os.close(writer.pidfd)

    def _answer(self, client: _Client, holder: int, frame: frames.Written) -> bool:
        """Whether it was sent."""
        try:
            client.socket.send(frames.encode(frame))
        except (BrokenPipeError, ConnectionResetError):
            # What it said before is still read: what it gives back, above all.
            client.is_gone = True
            self._writes.undelivered(holder, frame)
        except OSError:  # it does not read what it asked for
            self._writes.undelivered(holder, frame)
            self._drop(client)
        else:
            return True
        return False

    def _refuse(self, client: _Client, refused: frames.Refused) -> None:
        log.warning("local.refused", extra={"error": refused.error, "why": refused.message})
        with suppress(OSError):  # it is cut off all the same
            client.socket.send(frames.encode(refused))
        self._drop(client)

    def _drop(self, client: _Client) -> None:
        if client not in self._clients:
            return
        self._clients.discard(client)
        if client.socket in self._selector.get_map():
            self._selector.unregister(client.socket)
        client.socket.close()
        writer, client.writer = client.writer, None
        if writer is not None:
            writer.client = None
            if not self._writes.ended(writer.holder):
                self._forget(writer)


def _pidfd_of(peer: socket.socket) -> int:
    """A descriptor that is readable when the process behind `peer` has ended. Raises OSError."""
    try:
        return peer.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise
    pid, _, _ = _CREDENTIALS.unpack(
        peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    if pid == 0:
        raise OSError(errno.ESRCH, "it is in another pid namespace")
    return os.pidfd_open(pid)
