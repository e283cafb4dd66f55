"""The reader's side of the directory: which pages are where, without a lock or a round trip.

Promise: an entry that is found was in the table, whole, at a moment during the call. A page may be
missed while it or its neighbours are being changed: nearly always the search notices and looks
again, and where it gives up it says DOUBT instead of MISS and counts. Nothing that the memory holds
makes a call fail or read outside of the map; what an entry leads to is for the caller to check
(entry.entry_fits).

A get is: `lookup`; `readable`; copy out of the arena; verify the payload_sum; `recheck`;
`namespace_is_current`. If the last two hold, the page was the current one when the get ended.

Thread rule: any thread; counters can lag. `close` ends the view for everybody, and memory that a
running call uses is unmapped when that is done.
Fork rule: a child does not get the memory, and every use there raises ForkedClient.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kvtier.core.page import KEY_BYTES
from kvtier.errors import ClientClosed, DirectoryError, ForkedClient, UnknownHandle
from kvtier.tiers.memfd import READ_ONLY_SEALS, found_seals, map_shared
from kvtier.transfer.local.entry import ENTRY_WORDS, Words, key_words, name_word
from kvtier.transfer.local.header import (
    ENTRIES_MIN,
    HEADER_BYTES,
    IN_USE_WORD,
    OPEN_WORD,
    Header,
    decode_header,
)
from kvtier.transfer.local.loading import load_kernels
from kvtier.transfer.local.mapped import MappedTable
from kvtier.transfer.local.protocol import (
    DOUBT,
    IN_DOUBT,
    MADE_ANEW,
    ROUNDS_MAX,
    SETTLED,
    Found,
    Kernels,
    Readable,
)

__all__ = ["DirectoryView"]


class DirectoryView:
    """A read-only map of the directory behind `fd`, which stays the caller's and may be closed.

    `kernels` are the fastest installed unless given. Raises DirectoryError for what is no directory
    that can be trusted to stay as it is, UnknownHandle for that of another boot.
    """

    def __init__(self, fd: int, *, boot_id: int, kernels: Kernels | None = None) -> None:
        header = _checked_header(fd, boot_id)
        self._kernels = kernels or load_kernels()
        self._pid = os.getpid()
        try:
            self._map = map_shared(fd, header.file_bytes, writable=False)
        except OSError as error:
            raise DirectoryError(
                f"the directory of {header.file_bytes} bytes cannot be mapped: {error.strerror}",
                remedy="raise the limit of address space or of open files (ulimit -v, -n), or use "
                "another plane",
            ) from error
        self._header = header
        self._table: MappedTable | None = _present(self._map, header)
        self._is_closed = False
        self._lock = threading.RLock()  # a finalizer may look something up in the middle of a call
        self._torn_reads = 0
        self._doubts = 0

    @property
    def header(self) -> Header:
        self._live()
        return self._header

    @property
    def torn_reads(self) -> int:
        """Entries that were read again because they were being written."""
        return self._torn_reads

    @property
    def doubts(self) -> int:
        """Keys answered with DOUBT."""
        return self._doubts

    @property
    def kernels(self) -> str:
        """The implementation in use."""
        return self._kernels.name

    @property
    def is_open(self) -> bool:
        """The owner has not closed the directory. A killed owner cannot: watch its socket."""
        return int(self._live().words[OPEN_WORD]) == 1

    def lookup(
        self,
        keys: Sequence[bytes] | NDArray[np.uint8],
        *,
        namespace: int,
        shard: int,
        with_entries: bool = True,
        is_exact: bool = False,
    ) -> Found:
        """The entries of keys, a list of 32 bytes each or an array of uint8, shape (n, 32).

        Without `with_entries` only codes and tiers: 128 bytes a key less to write. With `is_exact`
        a copy that was rounded is a MISS.
        Raises KeyLengthError (see entry.key_words), LimitExceeded, ClientClosed, ForkedClient.
        """
        table = self._live()
        words = key_words(keys)
        found = Found.room_for(len(words) // 4, with_entries=with_entries, is_exact=is_exact)
        name = name_word(namespace, shard)
        torn, doubts = self._kernels.probe(table, words, name, found)
        for _ in range(ROUNDS_MAX):
            if _in_use(table) == table.header.entries:
                break
            # It was made anew meanwhile, and the search may have been in the wrong places.
            table = self._live()
            more, doubts = self._kernels.probe(table, words, name, found)
            torn += more
        if torn or doubts:
            with self._lock:
                self._torn_reads += torn
                self._doubts += doubts
        return found

    def answer(
        self,
        keys: Sequence[bytes],
        *,
        namespace: int,
        shard: int,
        generation: int,
        is_exact: bool = False,
    ) -> tuple[bytes, bytes] | None:
        """A lookup of up to ANSWER_KEYS_MAX keys and `namespace_is_current` in one: codes and
        tiers, or None where it is not, or a key is in doubt. Raises as `lookup`.
        """
        joined = b"".join(keys)
        count = len(keys)
        if len(joined) != KEY_BYTES * count:
            key_words(keys)  # raises for them
        name, current = name_word(namespace, shard), _namespace_word(namespace, generation)
        if not current:
            return None
        for _ in range(ROUNDS_MAX):
            state, torn, answers = self._kernels.answer(
                self._live(), joined, name, current, is_exact=is_exact
            )
            if torn or state == IN_DOUBT:
                with self._lock:
                    self._torn_reads += torn
                    self._doubts += answers[:count].count(DOUBT)
            if state == SETTLED:
                return answers[:count], answers[count:]
            if state != MADE_ANEW:
                break
        return None

    def readable(
        self, found: Found, block: Words, *, arena_bytes: int, length: int, lossy_ok: bool
    ) -> Readable:
        """Which of `found` are raw pages of `length` bytes whose whole record lies in the arena;
        `block` is checksum.bound_block, shape (16,).
        """
        return self._kernels.readable(
            found, block, arena_bytes=arena_bytes, length=length, lossy_ok=lossy_ok
        )

    def recheck(self, found: Found) -> NDArray[np.bool_]:
        """Which entries of `found` are still in the table exactly so, shape (n,).

        To be asked after the last look at the page's bytes: if the entry is still there, its slot
        was not written anew before. Raises ClientClosed, ForkedClient.
        """
        table = self._live()
        assert len(found.words) == ENTRY_WORDS * len(found.codes), "a lookup without entries"
        same = found.hits.view(np.uint8)
        self._kernels.recheck(table, found, same)
        return same.view(np.bool_)

    def namespace_is_current(self, number: int, generation: int) -> bool:
        """No bump or delete has ended the namespace. To be asked after `recheck`.

        Raises ClientClosed, ForkedClient.
        """
        table, word = self._live(), _namespace_word(number, generation)
        return word != 0 and self._kernels.namespace(table, number) == word

    def close(self) -> None:
        """Unmap. Again does nothing."""
        self._is_closed = True
        table, self._table = self._table, None
        if table is None:
            return
        if self._pid != os.getpid():
            return  # the memory is not here, see tiers/memfd.py
        del table
        # a call is running: the map goes with the table that it holds
        with suppress(BufferError):
            self._map.close()
        del self._map

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _live(self) -> MappedTable:
        table = self._table
        if table is None:
            raise ClientClosed("the directory view is closed", remedy="connect again")
        if self._pid != os.getpid():
            raise ForkedClient(
                "the directory view belongs to the parent process",
                remedy="connect in the process that uses it",
            )
        if _in_use(table) != table.header.entries:
            table = self._resized()
        return table

    def _resized(self) -> MappedTable:
        """The table of as many entries as are in use now; what calls that run have stays theirs."""
        # Without a lock: who closes must not wait for a call that was interrupted.
        table: MappedTable | None = None
        try:
            self._table = table = _present(self._map, self._header)
        except (ValueError, AttributeError):  # the map went while it was looked at
            if not self._is_closed:
                raise
        if table is None or self._is_closed:
            self._table = None
            raise ClientClosed("the directory view is closed", remedy="connect again")
        return table


def _namespace_word(number: int, generation: int) -> int:
    """0 for what no namespace has."""
    is_sound = 0 < number < 1 << 32 and 0 < generation < 1 << 32
    return number << 32 | generation if is_sound else 0


def _in_use(table: MappedTable) -> int:
    return int(table.words[IN_USE_WORD])


def _present(pages: mmap.mmap, header: Header) -> MappedTable:
    """The table of as many entries as are in use; of all, where the word makes no sense."""
    (in_use,) = np.frombuffer(pages, np.uint64, count=1, offset=8 * IN_USE_WORD).tolist()
    is_sound = ENTRIES_MIN <= in_use <= header.entries and in_use & (in_use - 1) == 0
    return MappedTable.over(pages, header, in_use if is_sound else None)


def _checked_header(fd: int, boot_id: int) -> Header:
    """The header of a file that nobody can cut while it is mapped. See DirectoryView."""
    remedy = "connect anew: the daemon passes the descriptor of its own directory"
    try:
        missing = READ_ONLY_SEALS & ~found_seals(fd)
        size = os.fstat(fd).st_size
        block = os.pread(fd, HEADER_BYTES, 0)
    except OSError as error:
        raise DirectoryError(f"no directory here: {error.strerror}", remedy=remedy) from error
    if missing:
        raise DirectoryError(f"the directory lacks the seals {missing:#x}", remedy=remedy)
    if len(block) < HEADER_BYTES:
        raise DirectoryError(f"the directory has {size} bytes", remedy=remedy)
    header = decode_header(block, size)
    if header.boot_id != boot_id:
        raise UnknownHandle(
            f"the directory is of boot {header.boot_id:x}, not {boot_id:x}",
            remedy="the daemon was restarted: connect again",
        )
    return header
