"""What the two implementations of the directory's inner loops agree on.

Results are identical, and owner and readers may use different ones. `probe` and `recheck` may miss
what is there while it is being changed, and never find what is not.

Thread rule: a Found belongs to one thread; see Kernels for the functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvtier.transfer.local.entry import ENTRY_WORDS, LENGTH_BYTES_MAX, Words
from kvtier.transfer.local.mapped import MappedTable

__all__ = [
    "ANSWER_KEYS_MAX",
    "DOUBT",
    "HIT",
    "IN_DOUBT",
    "MADE_ANEW",
    "MISS",
    "NOT_CURRENT",
    "PROBES_MAX",
    "READS_MAX",
    "ROUNDS_MAX",
    "SETTLED",
    "Found",
    "Kernels",
    "Readable",
]

#: The outcome of one key. DOUBT is a miss that may be one only because the table was being changed,
#: or because its writer ended in the middle of an entry.
MISS: Final = 0
HIT: Final = 1
DOUBT: Final = 2

#: How a whole lookup ended: every key is HIT or MISS in a namespace that is current; one at least
#: is in doubt; the namespace is not current; the table was made anew meanwhile, look again.
SETTLED: Final = 0
IN_DOUBT: Final = 1
NOT_CURRENT: Final = 2
MADE_ANEW: Final = 3
#: Keys of a whole lookup, which are moved by Python.
ANSWER_KEYS_MAX: Final = 64

#: Entries that a search looks at. The owner puts none beyond: at a load of one half a run of
#: neighbours this long does not come up by chance (their lengths fall by 0.82 with each entry).
PROBES_MAX: Final = 256
#: Reads of an entry that is being written, before a search goes on without it.
READS_MAX: Final = 64
#: Searches for what was missed while entries were being moved.
ROUNDS_MAX: Final = 8


@dataclass(slots=True)
class Found:
    """What a probe found, in memory of its own: `codes` (n) are HIT, MISS or DOUBT, `tiers` (n)
    core.page.Tier or 0, `places` (n) where the entries lay; `words` (16 n) are the entries, zeros
    where there is none, or nothing if they were not asked for. With `is_exact` a copy that was
    rounded is a MISS.
    """

    words: Words
    places: NDArray[np.int64]
    codes: NDArray[np.uint8]
    tiers: NDArray[np.uint8]
    is_exact: bool = False

    @classmethod
    def room_for(cls, count: int, *, with_entries: bool = True, is_exact: bool = False) -> Found:
        return cls(
            np.empty(count * ENTRY_WORDS if with_entries else 0, np.uint64),
            np.empty(count, np.int64),
            np.empty(count, np.uint8),
            np.empty(count, np.uint8),
            is_exact,
        )

    @property
    def entries(self) -> Words:
        """The entries as rows, shape (n, 16)."""
        return self.words.reshape(-1, ENTRY_WORDS)

    @property
    def hits(self) -> NDArray[np.bool_]:
        """Which keys have an entry, shape (n,)."""
        found: NDArray[np.bool_] = self.codes == HIT
        return found

    # Columns of the entries, shape (n,); see entry. They mean something where there is one.

    @property
    def generations(self) -> Words:
        return self.entries[:, 5]

    @property
    def slots(self) -> Words:
        """In units of 4 KiB."""
        return self.entries[:, 6]

    @property
    def lengths(self) -> Words:
        """Payload bytes."""
        return self.entries[:, 7] & np.uint64(LENGTH_BYTES_MAX)

    @property
    def codecs(self) -> Words:
        return (self.entries[:, 7] >> np.uint64(48)) & np.uint64(0xFF)

    @property
    def lossy(self) -> Words:
        """1 or 0."""
        return self.entries[:, 7] >> np.uint64(56)

    @property
    def sums(self) -> Words:
        """Payload sums, shape (n, 2)."""
        return self.entries[:, 8:10]


@dataclass(slots=True)
class Readable:
    """Which keys of a Found have a raw page of one length in the arena, whose sum is known, and
    where: `rows` (k) are their numbers, `offsets` (k) the first payload bytes, counted from where
    the arena begins; `blocks` (k, 16) their bound blocks without digests and `sums` (k, 2) their
    payload sums. `outcomes` (n) says of each key HIT for those, MISS for a miss, and DOUBT for what
    has to be asked of the daemon.
    """

    rows: NDArray[np.int64]
    offsets: NDArray[np.int64]
    blocks: Words
    sums: Words
    outcomes: NDArray[np.uint8]


class Kernels(Protocol):
    """The inner loops over a MappedTable. Arrays are C-contiguous, of n keys or rows, and `keys`
    has 4 n words; a row is an entry's 16 words. Only what readers use (`probe`, `answer`,
    `readable`, `recheck`, `namespace`) may run in several threads at once.
    """

    @property
    def name(self) -> str:
        """For status and benchmarks."""

    def probe(self, table: MappedTable, keys: Words, name: int, found: Found) -> tuple[int, int]:
        """Fills `found` with what the keys have under a name word; (torn reads, DOUBTs)."""

    def answer(
        self, table: MappedTable, keys: bytes, name: int, current: int, *, is_exact: bool
    ) -> tuple[int, int, bytes]:
        """A whole lookup of up to ANSWER_KEYS_MAX keys, one after another, in the namespace with
        the word `current`: (SETTLED or what else, torn reads, n codes and then n tiers); `is_exact`
        as in Found.
        """

    def readable(
        self, found: Found, block: Words, *, arena_bytes: int, length: int, lossy_ok: bool
    ) -> Readable:
        """What can be read of `found`, as entry.entry_fits says it: raw pages of `length`, whose
        bound blocks are `block` (16) with their keys.
        """

    def recheck(self, table: MappedTable, found: Found, same: NDArray[np.uint8]) -> None:
        """Clears same (n) where the entry of `found` is no longer in the table, exactly so."""

    def namespace(self, table: MappedTable, number: int) -> int:
        """The word of a namespace number, 0 if it is not current."""

    def write(
        self, table: MappedTable, rows: Words, placed: NDArray[np.uint8], room: int
    ) -> tuple[int, int, int]:
        """Writes rows (n, 16), of which up to `room` may be new, and their mixes into them.

        (how many were new, entries looked at, most of them for one row); sets placed (n).
        """

    def remove(
        self, table: MappedTable, rows: Words, removed: NDArray[np.uint8]
    ) -> tuple[int, int]:
        """Removes what rows (n, 16) name by words 0-5; (how many, entries looked at)."""

    def empty(self, table: MappedTable) -> None:
        """Removes all entries."""

    def store(self, table: MappedTable, word: int, value: int) -> None:
        """Sets one word of the file, by its index."""
