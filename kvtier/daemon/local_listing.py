"""The store's pages in the shared directory.

Called under the store's lock. The directory is written with numpy alone until somebody reads it or
it is written often: the compiled loops cost half a second of processor time when they are loaded,
which a daemon that does little need not spend.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvtier.core.listing import Listed, ListedMany
from kvtier.errors import LimitExceeded
from kvtier.transfer.local.directory import Directory
from kvtier.transfer.local.entry import ENTRY_WORDS, encode_columns, encode_into, named_rows

__all__ = ["DirectoryListing"]

log = logging.getLogger(__name__)

#: Changes since the start, but for those of a restart.
_OFTEN = 4096


class DirectoryListing:
    """A core.listing.Listing over `directory`. A page that finds no place there, which is counted,
    is a miss to local clients.
    """

    def __init__(self, directory: Directory, on_often: Callable[[], None] | None = None) -> None:
        """`on_often` is called once, when it is worth being quick; it must not block."""
        self._directory = directory
        # One row is used again and again: made anew it would cost more than entering it.
        self._row = np.zeros((1, ENTRY_WORDS), np.uint64)
        self._entry = self._row.view(np.uint8).reshape(-1).data
        self._on_often = on_often
        self._changes = 0

    def put(self, page: Listed) -> None:
        self._count(1)
        encode_into(self._entry, page)
        self._directory.put_many(self._row)

    def put_many(self, pages: ListedMany) -> None:
        self._count(len(pages.slot))
        self._directory.put_many(encode_columns(**pages._asdict()))

    def fill(self, pages: ListedMany) -> None:
        self._directory.fill(encode_columns(**pages._asdict()))

    def remove(self, namespace: int, shard: int, key: bytes) -> None:
        self._count(1)
        encode_into(self._entry, Listed(namespace, shard, key, 0, 0, False, 0, 0, 0))
        self._directory.remove_many(self._row)

    def remove_many(
        self,
        namespace: NDArray[np.uint32],
        shard: NDArray[np.uint16],
        key_words: NDArray[np.uint64],
    ) -> None:
        self._count(len(key_words))
        self._directory.remove_many(named_rows(key_words, namespace, shard))

    def open_namespace(self, namespace: int, shard_count: int, generation: int) -> None:
        if not namespace:
            return  # the self-test's own, which no client can open
        try:
            self._directory.set_namespace(namespace, generation)
        except LimitExceeded as error:
            # Local clients find nothing of it current, and ask the daemon.
            log.warning("local.namespace_unlisted", extra={"why": str(error)})

    def _count(self, changes: int) -> None:
        is_new = self._changes < _OFTEN
        self._changes += changes
        if is_new and self._changes >= _OFTEN and self._on_often is not None:
            self._on_often()

    def end_namespace(self, namespace: int) -> None:
        self._directory.end_namespace(namespace)
