"""One attachment to the daemon's shared memory: the arena and the directory, mapped here, and the
control socket that they came through.

Promise: memory is mapped only if it was given by a process of this user, cannot be cut short and
belongs to the boot that was asked for. What was used is told to the daemon in batches, and dropped
rather than waited for.

Any thread, but for `attach`, which blocks. Unmapped when the last user has let go of it; a forked
child does not get the memory (its connection is refused there).
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from kvtier import errors
from kvtier.errors import DaemonUnavailable, InvalidFrame, KvtierError
from kvtier.packing.bulk_sums import load_summer
from kvtier.transfer.local import frames
from kvtier.transfer.local.arena_view import map_arena
from kvtier.transfer.local.lookup import DirectoryView

__all__ = ["LocalLink"]

_ATTACH_S_MAX: Final = 2.0
_CREDENTIALS: Final = struct.Struct("3i")
_FDS: Final = 2
_REMEDY: Final = "calls go over gRPC meanwhile; see the daemon's log"


@dataclass(slots=True)
class _Usage:
    """Of one namespace and shard, not told yet."""

    keys: list[bytes] = field(default_factory=list)
    lookup_hits: int = 0
    lookup_misses: int = 0
    get_hits: int = 0
    get_misses: int = 0
    get_bytes: int = 0


class LocalLink:
    def __init__(
        self, control: socket.socket, arena: NDArray[np.uint8], view: DirectoryView
    ) -> None:
        self._control = control
        self._lock = threading.Lock()
        self._usage: dict[tuple[int, int], _Usage] = {}
        self.arena = arena
        self.arena_address = int(arena.ctypes.data)
        self.summer = load_summer()
        self.view = view
        #: Batches of what was used that the daemon was too busy to hear.
        self.untold = 0

    @classmethod
    def attach(cls, path: str, *, boot_id: int, client_name: str) -> Self:
        """Raises DaemonUnavailable, DirectoryError, InvalidFrame, UnknownHandle (another boot), and
        what the daemon refuses it with.
        """
        control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds: list[int] = []
        try:
            control.settimeout(_ATTACH_S_MAX)
            packet = _greet(control, path, client_name, fds)
            welcome = _welcomed(packet, fds, boot_id)
            view = DirectoryView(fds[1], boot_id=boot_id)
            arena = map_arena(fds[0], welcome.arena_bytes)
            control.setblocking(False)
            return cls(control, arena, view)
        except OSError as error:
            control.close()
            raise DaemonUnavailable(f"{path}: {error.strerror or error}", remedy=_REMEDY) from error
        except BaseException:
            control.close()
            raise
        finally:
            for fd in fds:
                os.close(fd)

    def is_alive(self) -> bool:
        """The daemon has not ended, and has not cut this link off. Waits for nothing."""
        try:
            # Whatever it says after the welcome is a refusal.
            self._control.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def note_lookup(self, namespace: int, shard: int, *, hits: int, misses: int) -> bool:
        """Whether this is the first thing to tell since `tell`."""
        with self._lock:
            is_first = not self._usage
            usage = self._usage.setdefault((namespace, shard), _Usage())
            usage.lookup_hits += hits
            usage.lookup_misses += misses
            return is_first

    def note_get(
        self, namespace: int, shard: int, keys: list[bytes], *, nbytes: int, misses: int
    ) -> bool:
        """As `note_lookup`, of pages that were read, the head of a chain first."""
        with self._lock:
            is_first = not self._usage
            usage = self._usage.setdefault((namespace, shard), _Usage())
            usage.keys += keys
            usage.get_hits += len(keys)
            usage.get_misses += misses
            usage.get_bytes += nbytes
            return is_first

    def tell(self) -> None:
        """Tells the daemon what was used since the last time."""
        with self._lock:
            told, self._usage = self._usage, {}
        for (namespace, shard), usage in told.items():
            most = frames.KEYS_PER_FRAME_MAX
            for at in range(0, max(1, len(usage.keys)), most):
                is_first = at == 0
                frame = frames.Used(
                    namespace=namespace,
                    shard=shard,
                    keys=b"".join(usage.keys[at : at + most]),
                    lookup_hits=usage.lookup_hits if is_first else 0,
                    lookup_misses=usage.lookup_misses if is_first else 0,
                    get_hits=usage.get_hits if is_first else 0,
                    get_misses=usage.get_misses if is_first else 0,
                    get_bytes=usage.get_bytes if is_first else 0,
                )
                try:
                    self._control.send(frames.encode(frame))
                except OSError:  # its queue is full, or it is gone
                    self.untold += 1

    def close(self) -> None:
        """Tells what is left, and lets go. Calls that run keep the memory until they end."""
        self.tell()
        self.view.close()
        self._control.close()


def _greet(control: socket.socket, path: str, client_name: str, fds: list[int]) -> bytes:
    """Says hello; the answer, with the descriptors that came with it in `fds`."""
    control.connect(path)
    _, uid, _ = _CREDENTIALS.unpack(
        control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    if uid != os.geteuid():
        raise DaemonUnavailable(
            f"{path}: uid {uid} answers, and this process has uid {os.geteuid()}",
            remedy="run both as one user for shared memory; calls go over gRPC",
        )
    control.send(frames.encode(frames.Hello(version=frames.VERSION, client=client_name)))
    # MSG_CMSG_CLOEXEC: a child that is started meanwhile must not inherit them.
    packet, received, _, _ = socket.recv_fds(
        control, frames.FRAME_BYTES_MAX, _FDS, socket.MSG_CMSG_CLOEXEC
    )
    fds += received
    return packet


def _welcomed(packet: bytes, fds: list[int], boot_id: int) -> frames.Welcome:
    if not packet:
        raise DaemonUnavailable("the daemon has closed its control socket", remedy=_REMEDY)
    frame = frames.decode(packet)
    if isinstance(frame, frames.Refused):
        kind = getattr(errors, frame.error, None)
        if not (isinstance(kind, type) and kind in errors.leaves()):
            kind = DaemonUnavailable
        assert issubclass(kind, KvtierError), "a leaf of the tree"
        raise kind(frame.message, remedy=frame.remedy)
    if not isinstance(frame, frames.Welcome) or len(fds) != _FDS:
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
