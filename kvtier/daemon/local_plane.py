"""The daemon's side of the local plane: the directory, the listing that fills it, and the socket
that gives both it and the arena to clients, read-only to readers and writable to writers.

Made before the store, which tells the listing of its pages; serves from `start` on; closed after
everything that uses the store. `start` and `close` on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from kvtier.core.page import KEY_BYTES
from kvtier.core.store import Store
from kvtier.daemon.local_listing import DirectoryListing
from kvtier.daemon.local_server import LocalServer, Offer, Writes
from kvtier.daemon.metrics import Metrics
from kvtier.daemon.sockets import Refuse
from kvtier.tiers.host import HostArena
from kvtier.transfer.local import frames
from kvtier.transfer.local.directory import Directory
from kvtier.transfer.local.loading import load_kernels
from kvtier.transfer.local.vectors import NumpyKernels

__all__ = ["LocalPlane"]

_LOADING_S_MAX = 0.5


class LocalPlane:
    """A directory for `pages_max` pages. Raises TierIOError, InvalidConfigValue."""

    def __init__(self, boot_id: int, *, pages_max: int, namespaces_max: int) -> None:
        self._boot_id = boot_id
        self._directory = Directory(
            pages_max=pages_max,
            namespaces_max=namespaces_max,
            boot_id=boot_id,
            hash_seed=secrets.randbits(64),
            kernels=NumpyKernels(),
        )
        self._stack = ExitStack()
        self._stack.callback(self._directory.close)
        self._loading: threading.Thread | None = None
        self._server: LocalServer | None = None
        self.listing = DirectoryListing(self._directory, self._load_kernels)

    @property
    def clients(self) -> int:
        """Clients that are attached."""
        return self._server.attached if self._server is not None else 0

    @property
    def writers(self) -> int:
        """Clients that may write to what they are granted."""
        return self._server.writers if self._server is not None else 0

    @property
    def pages_unlisted(self) -> int:
        """Pages that found no place in the directory since the start."""
        return self._directory.refused

    def start(
        self,
        path: Path,
        arena: HostArena,
        store: Store,
        metrics: Metrics,
        writes: Writes,
        *,
        connections_max: int,
        refuse: Refuse,
    ) -> str:
        """Serves at a socket; its path. Raises what `refuse` makes when it cannot be had."""
        loop = asyncio.get_running_loop()

        def used(frame: frames.Used) -> None:
            keys = np.frombuffer(frame.keys, np.uint8).reshape(-1, KEY_BYTES)
            store.usage.used(
                frame.namespace,
                frame.shard,
                keys,
                hits=frame.lookup_hits,
                misses=frame.lookup_misses,
            )
            loop.call_soon_threadsafe(
                metrics.local_gets, frame.get_hits, frame.get_misses, frame.get_bytes
            )

        # Opened anew, so that no reader writes to the arena by mistake.
        arena_fd = os.open(f"/proc/self/fd/{arena.fd}", os.O_RDONLY | os.O_CLOEXEC)
        self._stack.callback(os.close, arena_fd)
        offer = Offer(
            welcome=frames.Welcome(
                version=frames.VERSION, boot_id=self._boot_id, arena_bytes=arena.capacity_bytes
            ),
            arena_fd=arena_fd,
            directory_fd=self._directory.fd,
            writable_fd=arena.fd,
        )
        server = LocalServer(
            path, offer, used, self._load_kernels, writes, connections_max=connections_max
        )
        self._stack.callback(server.close)
        server.start(refuse)
        self._server = server
        return str(server.path)

    def close(self) -> None:
        """Clients that are attached notice at once. Closing twice is no error."""
        self._stack.close()
        if self._loading is not None:
            # Compiling for the first time takes many seconds, which nobody waits for.
            self._loading.join(_LOADING_S_MAX)

    def _load_kernels(self) -> None:
        """Somebody reads the directory, or it changes often: it is worth being quick."""
        if self._loading is None:
            self._loading = threading.Thread(
                target=lambda: self._directory.use(load_kernels()),
                name="kvtier-kernels",
                daemon=True,
            )
            self._loading.start()
