"""The owner's side of the directory: the table in a memfd that only this object can write.

Promise: the descriptor has READ_ONLY_SEALS, so whoever receives it can neither write nor cut the
table. What `put_many` has placed is found until it is removed or replaced; what `remove_many` or
`end_namespace` has ended is found by no lookup and passes no recheck that starts later. At all
times an entry that a reader accepts is one that was put.

Entries are removed by backward shift: later entries of the run move into the hole, so no tombstones
gather, and searches stay as short after a hundred million changes as in a fresh table (at a load of
one half about 1.5 entries for a page that is there). The price, entries that move under a reader,
is small: it reads a word that changes with every move and looks again for what it missed. The load
stays below one half always: past that, and past PROBES_MAX, a page is refused, which its readers
see as a miss.

The table begins small and is made anew, twice as long, whenever it is half full (header.py), so a
directory takes 256 to 512 bytes a page of those that there are. Making it anew takes about a second
for a million pages, and readers ask the daemon meanwhile. Memory is taken where an entry is written
or looked for.

Thread rule: the caller holds the store's lock for all but the properties and `use`.
Fork rule: a child does not get the memory; every use there raises TierIOError.
"""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from kvtier.core.page import Tier
from kvtier.errors import LimitExceeded
from kvtier.tiers.base import TierOperation, tier_io_error
from kvtier.tiers.memfd import create_read_only
from kvtier.transfer.local.entry import EMPTY, ENTRY_WORDS, Words
from kvtier.transfer.local.header import (
    HEADER_BYTES,
    IN_USE_WORD,
    NAMESPACE_PROBES,
    NAMESPACES_WORD,
    OPEN_WORD,
    SHIFTS_WORD,
    Header,
    encode_header,
    header_for,
    namespace_place,
    namespace_word,
)
from kvtier.transfer.local.loading import load_kernels
from kvtier.transfer.local.mapped import MappedTable
from kvtier.transfer.local.protocol import Kernels
from kvtier.transfer.local.vectors import fill

__all__ = ["Directory"]

_ENTRIES_FIRST: Final = 4096


class Directory:
    """An empty directory for up to `pages_max` entries and `namespaces_max` namespaces at once.

    `hash_seed` (64 random bits) spreads the entries; `kernels` are the fastest installed unless
    given. Raises TierIOError (open), InvalidConfigValue.
    """

    def __init__(
        self,
        *,
        pages_max: int,
        namespaces_max: int,
        boot_id: int,
        hash_seed: int,
        kernels: Kernels | None = None,
    ) -> None:
        header = header_for(
            pages_max=pages_max,
            namespaces_max=namespaces_max,
            boot_id=boot_id,
            hash_seed=hash_seed,
        )
        self._kernels = kernels or load_kernels()
        self._pid = os.getpid()
        self._pages_max = header.entries // 2
        self._fd, self._map = create_read_only(
            "kvtier-directory", header.file_bytes, tier=Tier.HOST
        )
        self._header = header
        self._table: MappedTable | None = _started(self._map, header)
        self._pages = 0
        self._refused = 0
        self._steps = 0
        self._longest = 0

    @property
    def fd(self) -> int:
        """The memfd, to pass to clients; the directory closes it. Raises TierIOError."""
        self._live()
        return self._fd

    @property
    def header(self) -> Header:
        self._live()
        return self._header

    @property
    def entries(self) -> int:
        """Entries in use: there is room for half as many pages, and then for twice as many."""
        return self._live().header.entries

    @property
    def pages(self) -> int:
        """Entries that are there."""
        return self._pages

    @property
    def pages_max(self) -> int:
        """Entries that there may be: what was asked for, or a little more."""
        return self._pages_max

    @property
    def refused(self) -> int:
        """Entries that found no place, since the start."""
        return self._refused

    @property
    def steps(self) -> int:
        """Entries looked at by all changes since the start: what they cost, in cache misses."""
        return self._steps

    @property
    def longest_probe(self) -> int:
        """Entries looked at for the one page that took most, of all that were put."""
        return self._longest

    @property
    def kernels(self) -> str:
        """The implementation in use."""
        return self._kernels.name

    def use(self, kernels: Kernels) -> None:
        """Changes the implementation. Any thread: a call that runs ends with the one it has."""
        self._kernels = kernels

    def put_many(self, rows: Words) -> NDArray[np.bool_]:
        """Enters copies, shape (n, 16) as entry.encode_entries gives them, each in place of what
        the page had. Sets the mix in `rows`.

        Which have a place, shape (n,). One that has none is refused and counted; if the page had an
        entry before, that is still there. Raises TierIOError.
        """
        table = self._roomy(len(rows))
        rows = _as_rows(rows)
        placed = np.empty(len(rows), np.uint8)
        room = self._pages_max - self._pages
        new, steps, longest = self._kernels.write(table, rows, placed, room)
        self._pages += new
        self._steps += steps
        self._longest = max(self._longest, longest)
        self._refused += len(rows) - int(np.count_nonzero(placed))
        return placed.view(np.bool_)

    def fill(self, rows: Words) -> NDArray[np.bool_]:
        """As `put_many`, for many pages that have no entry yet, in a few vector operations."""
        table = self._roomy(len(rows))
        room = self._pages_max - self._pages
        placed = fill(table, rows[:room])
        self._pages += int(np.count_nonzero(placed))
        self._refused += len(rows) - int(np.count_nonzero(placed))
        return np.concatenate([placed, np.zeros(len(rows) - len(placed), np.bool_)])

    def remove_many(self, rows: Words) -> NDArray[np.bool_]:
        """Removes the entries that entry.identities, or the entries themselves, name.

        Which were there, shape (n,). A row with a generation (word 5) means that allocation alone.
        Raises TierIOError.
        """
        table = self._live()
        rows = _as_rows(rows)
        removed = np.empty(len(rows), np.uint8)
        count, steps = self._kernels.remove(table, rows, removed)
        self._pages -= count
        self._steps += steps
        return removed.view(np.bool_)

    def set_namespace(self, number: int, generation: int) -> None:
        """Makes a namespace number current. Raises LimitExceeded, TierIOError."""
        table = self._live()
        word = namespace_word(number, generation)
        free = -1
        for at in _namespace_words(table, number):
            there = int(table.words[at])
            if there >> 32 == number:
                free = at
                break
            if there == 0 and free < 0:
                free = at
        if free < 0:
            raise LimitExceeded(
                f"no word of the directory is free for namespace {number}",
                remedy="delete namespaces that are not used, or raise limits.namespaces_max",
            )
        self._kernels.store(table, free, word)

    def end_namespace(self, number: int) -> bool:
        """No check that starts after this finds the number current; whether it was.

        Raises TierIOError.
        """
        table = self._live()
        for at in _namespace_words(table, number):
            if int(table.words[at]) >> 32 == number:
                self._kernels.store(table, at, 0)
                return True
        return False

    def clear(self) -> None:
        """Removes every entry; namespaces stay. Walks the whole table. Raises TierIOError."""
        self._kernels.empty(self._live())
        self._pages = 0

    def close(self) -> None:
        """Every lookup and recheck that starts later finds nothing. Again does nothing."""
        table, self._table = self._table, None
        if table is None:
            return
        os.close(self._fd)
        if self._pid != os.getpid():
            return  # the memory is not here, see tiers/memfd.py
        self._kernels.store(table, OPEN_WORD, 0)
        del table
        # somebody holds the table: the map goes with that
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

    def _roomy(self, more: int) -> MappedTable:
        """The table, made anew first if `more` pages would fill more than half of it."""
        table = self._live()
        in_use = table.header.entries
        while in_use < self._header.entries and 2 * (self._pages + more) > in_use:
            in_use *= 2
        if in_use > table.header.entries:
            table = self._table = self._made_anew(table, in_use)
        return table

    def _made_anew(self, table: MappedTable, in_use: int) -> MappedTable:
        rows = table.entries[table.entries[:, 4] != EMPTY]
        shifts = int(table.words[SHIFTS_WORD])
        self._kernels.store(table, SHIFTS_WORD, shifts + 1)
        table.entries[:] = 0
        self._kernels.store(table, IN_USE_WORD, in_use)
        made = MappedTable.over(self._map, self._header, in_use)
        lost = len(rows) - int(np.count_nonzero(fill(made, rows)))
        self._pages -= lost
        self._refused += lost
        self._kernels.store(table, SHIFTS_WORD, shifts + 2)
        return made

    def _live(self) -> MappedTable:
        if self._table is None:
            raise _closed("the directory is closed")
        if self._pid != os.getpid():
            raise _closed("the directory belongs to the parent process")
        return self._table


def _as_rows(rows: Words) -> Words:
    """As the kernels take them. Copies only what is not so already, which np.require is slow to
    find out.
    """
    flags = rows.flags
    if rows.ndim == 2 and rows.dtype == np.uint64 and flags.c_contiguous and flags.writeable:
        return rows
    return np.require(rows.reshape(-1, ENTRY_WORDS), np.uint64, ["C", "W"])


def _started(pages: mmap.mmap, header: Header) -> MappedTable:
    """The table over memory that is all zeros: of empty entries already."""
    pages[:HEADER_BYTES] = encode_header(header)
    in_use = min(header.entries, _ENTRIES_FIRST)
    table = MappedTable.over(pages, header, in_use)
    table.words[IN_USE_WORD] = in_use
    table.words[OPEN_WORD] = 1
    return table


def _namespace_words(table: MappedTable, number: int) -> list[int]:
    """Where in the file the word of `number` may lie, in order."""
    count = table.header.namespace_words
    first = namespace_place(number, count)
    return [NAMESPACES_WORD + ((first + step) & (count - 1)) for step in range(NAMESPACE_PROBES)]


def _closed(words: str) -> Exception:
    return tier_io_error(Tier.HOST, TierOperation.OPEN, OSError(errno.EBADF, words))
