"""One attachment to the daemon's shared memory: the arena and the directory, mapped here, and the
control socket that they came through.

Promise: memory is mapped only if it was given by a process of this user, cannot be cut short and
belongs to the boot that was asked for. What was used is told to the daemon in batches, and dropped
rather than waited for.

Any thread, but for `attach`, which blocks. Unmapped when the last user has let go of it; a forked
child does not get the memory (its connection is refused there).
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from kvtier.client.local_greeting import greeted
from kvtier.errors import InvalidFrame
from kvtier.packing.bulk_sums import load_summer
from kvtier.transfer.local import frames
from kvtier.transfer.local.arena_view import map_arena
from kvtier.transfer.local.lookup import DirectoryView

__all__ = ["LocalLink"]

#: Pages of one namespace whose uses wait for a daemon that is busy.
_KEYS_KEPT_MAX: Final = 65_536


@dataclass(slots=True)
class _Usage:
    """Of one namespace and shard, not told yet; `keys` in the order of their last use, those of
    `recent` after them.
    """

    keys: dict[bytes, None] = field(default_factory=dict)
    recent: list[Sequence[bytes]] = field(default_factory=list)
    recent_count: int = 0
    lookup_hits: int = 0
    lookup_misses: int = 0
    get_hits: int = 0
    get_misses: int = 0
    get_bytes: int = 0

    def use(self, keys: Sequence[bytes]) -> None:
        """Costs the same for one key and for thousands, until they are gathered."""
        if keys:
            self.recent.append(keys)
            self.recent_count += len(keys)
            if self.recent_count > _KEYS_KEPT_MAX:
                self.gather()

    def gather(self) -> None:
        """Puts the keys of `recent` where they belong in `keys`."""
        for key in chain.from_iterable(self.recent):
            self.keys.pop(key, None)
            self.keys[key] = None
        self.recent.clear()
        self.recent_count = 0


class LocalLink:
    def __init__(
        self, control: socket.socket, arena: NDArray[np.uint8], view: DirectoryView
    ) -> None:
        self.control = control
        self._lock = threading.RLock()  # a finalizer may look something up in the middle of a call
        self._usage: dict[tuple[int, int], _Usage] = {}
        self._is_telling = False
        self._left: list[tuple[tuple[int, int], _Usage]] = []  # could not be told, nor taken back
        self.arena = arena
        self.arena_address = int(arena.ctypes.data)
        self.summer = load_summer()
        self.view = view
        self.boot_id = view.header.boot_id
        #: Uses of pages that the daemon was too busy to hear of.
        self.untold = 0

    @classmethod
    def attach(cls, path: str, *, boot_id: int, client_name: str) -> Self:
        """Raises DaemonUnavailable, DirectoryError, InvalidFrame, UnknownHandle (another boot), and
        what the daemon refuses it with.
        """
        with greeted(path, boot_id=boot_id, client_name=client_name, writes=False) as welcomed:
            view = DirectoryView(welcomed.fds[1], boot_id=boot_id)
            arena = map_arena(welcomed.fds[0], welcomed.arena_bytes, writable=False)
            control = welcomed.keep()
        control.setblocking(False)
        return cls(control, arena, view)

    def fileno(self) -> int:
        """Of the control socket; -1 when it is closed."""
        return self.control.fileno()

    def is_alive(self) -> bool:
        """The daemon has not ended, and has not cut this link off. Waits for nothing."""
        # One each time: half the time of a read that finds nothing, and two threads may not use the
        # same one at once.
        poll = select.poll()
        try:
            poll.register(self.control, select.POLLIN)
            # Whatever it says after the welcome is a refusal.
            return not poll.poll(0)
        except (OSError, ValueError):  # closed by another thread
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
            usage = self._usage_of((namespace, shard))
            usage.lookup_hits += hits
            usage.lookup_misses += misses
            return self._asks()

    def note_get(
        self, namespace: int, shard: int, keys: Sequence[bytes], *, nbytes: int, misses: int
    ) -> bool:
        """As `note_lookup`, of pages that were read, the head of a chain first; `keys` is kept."""
        with self._lock:
            usage = self._usage_of((namespace, shard))
            usage.use(keys)
            usage.get_hits += len(keys)
            usage.get_misses += misses
            usage.get_bytes += nbytes
            return self._asks()

    def _usage_of(self, name: tuple[int, int]) -> _Usage:
        usage = self._usage.get(name)
        if usage is None:
            usage = self._usage[name] = _Usage()
        return usage

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
            usage.gather()
            if not self._tell_one(*name, usage):
                self._left.append((name, usage))
        return self._take_back()

    def _take_back(self) -> bool:
        """What could not be told is told next time; whether there is something to tell."""
        if not self._lock.acquire(blocking=False):
            return True
        try:
            while self._left:
                self._keep(*self._left.pop())
            self._is_telling = self._is_telling or bool(self._usage)
            return bool(self._usage)
        finally:
            self._lock.release()

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
        new.gather()
        for key in new.keys:
            old.keys.pop(key, None)
        keys = old.keys | new.keys
        too_many = max(0, len(keys) - _KEYS_KEPT_MAX)
        for key in list(islice(keys, too_many)):
            del keys[key]
        self.untold += too_many
        self._usage[name] = _Usage(
            keys=keys,
            lookup_hits=old.lookup_hits + new.lookup_hits,
            lookup_misses=old.lookup_misses + new.lookup_misses,
            get_hits=old.get_hits + new.get_hits,
            get_misses=old.get_misses + new.get_misses,
            get_bytes=old.get_bytes + new.get_bytes,
        )

    def close(self) -> None:
        """Tells what is left, and lets go. Calls that run keep the memory until they end."""
        self.tell()
        self.view.close()
        self.control.close()
