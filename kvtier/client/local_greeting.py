"""Saying hello to the daemon's control socket: what it gives, and only if it may be trusted.

Promise: descriptors are taken only from a process of this user, of the boot that was asked for, and
are closed unless they are kept. A forked child does not hold on to the daemon's places for clients.

Blocks for two seconds at most, or as long as it is told. Any thread.
"""

from __future__ import annotations

import os
import socket
import struct
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from kvtier import errors
from kvtier.errors import DaemonUnavailable, InvalidFrame, KvtierError
from kvtier.transfer.local import frames

__all__ = ["Welcomed", "greeted"]

_ATTACH_S_MAX: Final = 2.0
_CREDENTIALS: Final = struct.Struct("3i")
_SEND_BUFFER_BYTES: Final = 1 << 20
_REMEDY: Final = "calls go over gRPC meanwhile; see the daemon's log"
_FILES_REMEDY: Final = "raise the limit of open files (ulimit -n); calls go over gRPC meanwhile"

#: Of this process.
_controls: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    for control in list(_controls):
        control.close()


os.register_at_fork(after_in_child=_close_in_child)


@dataclass(slots=True)
class Welcomed:
    """`fds`: of a reader the arena and the directory, of a writer the arena."""

    _control: socket.socket
    fds: list[int] = field(default_factory=list)
    arena_bytes: int = 0
    _is_kept: bool = False

    def keep(self) -> socket.socket:
        """The control socket, which is the caller's from now on."""
        self._is_kept = True
        return self._control


@contextmanager
def greeted(
    path: str, *, boot_id: int, client_name: str, writes: bool, within_s: float = _ATTACH_S_MAX
) -> Iterator[Welcomed]:
    """An attachment, ended with the block unless `keep` is called in it; the descriptors are closed
    in any case.

    Raises DaemonUnavailable (also for another boot, and where this process may not open more
    files), InvalidFrame, and what the daemon refuses it with.
    """
    try:
        control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError as error:
        raise DaemonUnavailable(f"no socket: {error.strerror}", remedy=_FILES_REMEDY) from error
    _controls.add(control)
    welcomed = Welcomed(control)
    try:
        try:
            control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            hello = frames.Hello(version=frames.VERSION, client=client_name, writes=int(writes))
            packet = _exchange(control, path, hello, welcomed.fds, min(within_s, _ATTACH_S_MAX))
        except OSError as error:
            raise DaemonUnavailable(f"{path}: {error.strerror or error}", remedy=_REMEDY) from error
        expected = 1 if writes else 2
        welcomed.arena_bytes = _checked(packet, welcomed.fds, boot_id, expected).arena_bytes
        yield welcomed
    finally:
        for fd in welcomed.fds:
            os.close(fd)
        if not welcomed._is_kept:
            control.close()


def _exchange(
    control: socket.socket, path: str, hello: frames.Hello, fds: list[int], within_s: float
) -> bytes:
    """Says hello; the answer, with the descriptors that came with it in `fds`."""
    end = time.monotonic() + within_s
    control.settimeout(within_s)
    control.connect(path)
    _, uid, _ = _CREDENTIALS.unpack(
        control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    if uid != os.geteuid():
        raise DaemonUnavailable(
            f"{path}: uid {uid} answers, and this process has uid {os.geteuid()}",
            remedy="run both as one user for shared memory; calls go over gRPC",
        )
    control.settimeout(max(0.001, end - time.monotonic()))
    control.send(frames.encode(hello))
    control.settimeout(max(0.001, end - time.monotonic()))
    # MSG_CMSG_CLOEXEC: a child that is started meanwhile must not inherit them.
    packet, received, flags, _ = socket.recv_fds(
        control, frames.FRAME_BYTES_MAX, 2, socket.MSG_CMSG_CLOEXEC
    )
    fds += received
    if flags & socket.MSG_CTRUNC:
        raise DaemonUnavailable(
            f"this process could take {len(received)} of the descriptors that the daemon passed: "
            "it has too many open files",
            remedy=_FILES_REMEDY,
        )
    return packet


def _checked(packet: bytes, fds: list[int], boot_id: int, expected: int) -> frames.Welcome:
    if not packet:
        raise DaemonUnavailable("the daemon has closed its control socket", remedy=_REMEDY)
    frame = frames.decode(packet)
    if isinstance(frame, frames.Refused):
        kind = getattr(errors, frame.error, None)
        if not (isinstance(kind, type) and kind in errors.leaves()):
            kind = DaemonUnavailable
        assert issubclass(kind, KvtierError), "a leaf of the tree"
        raise kind(frame.message, remedy=frame.remedy)
    if not isinstance(frame, frames.Welcome) or len(fds) != expected:
        raise InvalidFrame(
            f"a {type(frame).__name__} with {len(fds)} descriptors instead of a welcome",
            remedy="use a client and daemon of the same version",
        )
    if frame.boot_id != boot_id:
        raise DaemonUnavailable(
            f"a daemon of boot {frame.boot_id:x} answers, not {boot_id:x}",
            remedy="it was restarted; the next call opens the namespace again",
        )
    return frame
