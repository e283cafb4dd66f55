"""A mapped directory as the kernels take it: the words, and the numbers that lead to an entry.

Thread rule: a value; while one is held the memory stays mapped, so a kernel's caller holds it for
as long as the kernel runs.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from kvtier.transfer.local.entry import ENTRY_WORDS, Words, mix_seed
from kvtier.transfer.local.header import NAMESPACES_WORD, Header

__all__ = [
    "ENTRIES_AT",
    "ENTRY_MASK",
    "FILE_AT",
    "HASH_SEED",
    "HASH_SHIFT",
    "MIX_SEED",
    "NAMESPACE_WORDS",
    "MappedTable",
]

#: Indices into `MappedTable.shape`.
FILE_AT: Final = 0
ENTRIES_AT: Final = 1
ENTRY_MASK: Final = 2
HASH_SHIFT: Final = 3
HASH_SEED: Final = 4
MIX_SEED: Final = 5
NAMESPACE_WORDS: Final = 6


@dataclass(frozen=True, slots=True)
class MappedTable:
    """`words` is the whole file as uint64, `entries` the rows of sixteen that are in use, and
    `header` the file's with their number; `shape` (7 uint64) is for compiled code: addresses of the
    file and of entry 0, entry mask, hash shift, hash seed, mix seed, namespace words. `shape_at` is
    its address.
    """

    header: Header
    words: Words
    entries: Words
    namespaces: Words
    shape: Words
    shape_at: int

    @classmethod
    def over(
        cls, pages: mmap.mmap | bytearray, header: Header, in_use: int | None = None
    ) -> MappedTable:
        """Of a map of at least `header.file_bytes`, `in_use` entries of it (None: all)."""
        words = np.frombuffer(pages, np.uint64, count=header.file_bytes // 8)
        if in_use is not None:
            header = replace(header, entries=in_use)
        address = int(words.ctypes.data)
        first = header.entries_offset // 8
        shape = np.array(
            [
                address,
                address + header.entries_offset,
                header.entries - 1,
                header.shift,
                header.hash_seed,
                mix_seed(header.boot_id),
                header.namespace_words,
            ],
            np.uint64,
        )
        return cls(
            header,
            words,
            words[first : first + header.entries * ENTRY_WORDS].reshape(header.entries, -1),
            words[NAMESPACES_WORD : NAMESPACES_WORD + header.namespace_words],
            shape,
            int(shape.ctypes.data),
        )
