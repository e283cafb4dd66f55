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
import weakref
from dataclasses import dataclass, field
from itertools import islice
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
#: Pages of one namespace whose uses wait for a daemon that is busy.
_KEYS_KEPT_MAX: Final = 65_536
_SEND_BUFFER_BYTES: Final = 1 << 20
_REMEDY: Final = "calls go over gRPC meanwhile; see the daemon's log"


@dataclass(slots=True)
class _Usage:
    """Of one namespace and shard, not told yet; `keys` in the order of their last use."""

    keys: dict[bytes, None] = field(default_factory=dict)
    lookup_hits: int = 0
    lookup_misses: int = 0
    get_hits: int = 0
    get_misses: int = 0
    get_bytes: int = 0


#: Links of this process: a forked child must not hold on to the daemon's places for clients.
_links: weakref.WeakSet[LocalLink] = weakref.WeakSet()


def _close_in_child() -> None:
    for link in list(_links):
        link.control.close()


os.register_at_fork(after_in_child=_close_in_child)


class LocalLink:
    def __init__(
        self, control: socket.socket, arena: NDArray[np.uint8], view: DirectoryView
    ) -> None:
        self.control = control
        self._lock = threading.Lock()
        self._usage: dict[tuple[int, int], _Usage] = {}
        self._is_telling = False
        self.arena = arena
        self.arena_address = int(arena.ctypes.data)
        self.summer = load_summer()
        self.view = view
        self.boot_id = view.header.boot_id
        #: Uses of pages that the daemon was too busy to hear of.
        self.untold = 0
        _links.add(self)

    @classmethod
    def attach(cls, path: str, *, boot_id: int, client_name: str) -> Self:
        """Raises DaemonUnavailable, DirectoryError, InvalidFrame, UnknownHandle (another boot), and
        what the daemon refuses it with.
        """
        control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds: list[int] = []
        try:
            control.settimeout(_ATTACH_S_MAX)
            control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
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

    def fileno(self) -> int:
        """Of the control socket; -1 when it is closed."""
        return self.control.fileno()

    def is_alive(self) -> bool:
        """The daemon has not ended, and has not cut this link off. Waits for nothing."""
        try:
            # Whatever it says after the welcome is a refusal.
            self.control.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def farewell(self) -> str:
        """Why the link has ended, as far as the daemon said."""
        try:
            frame = frames.decode(self.control.recv(frames.FRAME_BYTES_MAX))
        except (OSError, InvalidFrame):
            return "the daemon has ended"
        said = frame.message if isinstance(frame, frames.Refused) else type(frame).__name__
        return f"the daemon has cut it off: {said}"

    def note_lookup(self, namespace: int, shard: int, *, hits: int, misses: int) -> bool:
        """Whether `tell` has to be called, which it has not been since it was asked for last."""
        with self._lock:
            usage = self._usage.setdefault((namespace, shard), _Usage())
            usage.lookup_hits += hits
            usage.lookup_misses += misses
            return self._asks()

    def note_get(
        self, namespace: int, shard: int, keys: list[bytes], *, nbytes: int, misses: int
    ) -> bool:
        """As `note_lookup`, of pages that were read, the head of a chain first."""
        with self._lock:
            usage = self._usage.setdefault((namespace, shard), _Usage())
            for key in keys:
                usage.keys.pop(key, None)
                usage.keys[key] = None
            usage.get_hits += len(keys)
            usage.get_misses += misses
            usage.get_bytes += nbytes
            return self._asks()

    def _asks(self) -> bool:
        was_telling, self._is_telling = self._is_telling, True
        return not was_telling

    def tell(self) -> bool:
        """Tells the daemon what was used since the last time; whether something is left, because it
        was too busy. Of that only the newest uses are kept.
        """
        with self._lock:
            told, self._usage = self._usage, {}
            self._is_telling = False
        for name, usage in told.items():
            if not self._tell_one(*name, usage):
                with self._lock:
                    self._keep(name, usage)
        with self._lock:
            self._is_telling = self._is_telling or bool(self._usage)
            return bool(self._usage)

    def _tell_one(self, namespace: int, shard: int, usage: _Usage) -> bool:
        """False: it did not take all; what it took is no longer in `usage`."""
        is_first = True
        while is_first or usage.keys:
            some = list(islice(usage.keys, frames.KEYS_PER_FRAME_MAX))
            frame = frames.Used(
                namespace=namespace,
                shard=shard,
                keys=b"".join(some),
                lookup_hits=usage.lookup_hits,
                lookup_misses=usage.lookup_misses,
                get_hits=usage.get_hits,
                get_misses=usage.get_misses,
                get_bytes=usage.get_bytes,
            )
            try:
                self.control.send(frames.encode(frame))
            except OSError:  # its queue is full, or it is gone
                return False
            is_first = False
            for key in some:
                del usage.keys[key]
            usage.lookup_hits = usage.lookup_misses = 0
            usage.get_hits = usage.get_misses = usage.get_bytes = 0
        return True

    def _keep(self, name: tuple[int, int], old: _Usage) -> None:
        """Puts back what could not be told, before what has come since."""
        new = self._usage.get(name, _Usage())
        for key in new.keys:
            old.keys.pop(key, None)
        keys = old.keys | new.keys
        too_many = max(0, len(keys) - _KEYS_KEPT_MAX)
        for key in list(islice(keys, too_many)):
            del keys[key]
        self.untold += too_many
        self._usage[name] = _Usage(
            keys,
            old.lookup_hits + new.lookup_hits,
            old.lookup_misses + new.lookup_misses,
            old.get_hits + new.get_hits,
            old.get_misses + new.get_misses,
            old.get_bytes + new.get_bytes,
        )

    def close(self) -> None:
        """Tells what is left, and lets go. Calls that run keep the memory until they end."""
        self.tell()
        self.view.close()
        self.control.close()


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
