"""The header of a directory, and the namespace words: where the entries lie and what is current.

    offset size field
         0    8 magic 89 4b 56 54 44 49 52 0a ("\\x89KVTDIR\\n")
         8    4 version              u32, 1
        12    4 header bytes         u32, 4096
        16   16 boot id              u128
        32    8 entries              u64, a power of two
        40    8 hash seed            u64, of the entries' places
        48    8 namespace words      u64, a power of two
        56    8 offset of entry 0    u64, a multiple of 4096
        64    8 bytes of the file    u64
        72   48 zero
       120    8 mix                  u64, of the fifteen words before it, as an entry's
       128    8 shifts               u64, odd while entries are being moved to other places
       192    8 is_open              u64, 1 until the owner closes the directory
       256    8 entries in use       u64, a power of two up to `entries`
      4096      namespace words, then zeros up to a multiple of 4096, then the entries

The table begins small and is made anew, twice as long, when it is half full: entries lie where the
number in use says, and shifts is odd meanwhile. So a directory has as much memory as its pages
need, and not as the most that there may be.

Bytes 0-127 are written once, before anybody else has the descriptor; all others may change under a
reader, each 64-bit word at once.

A namespace word is `number << 32 | generation`, or 0. Numbers are never used again and grow without
bound, so a number has no word of its own: it lies in one of NAMESPACE_PROBES words in a row, the
first being a hash of the number. A reader looks at all of them, so a word never has to move and
removing one is writing 0; a new one takes the first 0. With four words for each namespace that may
be open at once the run is never full in practice (the owner says so if it is).

DIRECTORY_VERSION rises with every change to this page, to the entries (entry.py) or to what a word
means. A reader takes its own version only: owner and readers are of one installation, and one that
is not does without the directory.

Pure functions, safe from any thread; little-endian machines only.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvtier.errors import DirectoryError, InvalidConfigValue, LimitExceeded
from kvtier.transfer.local.entry import ENTRY_BYTES, mix_many, mix_seed

__all__ = [
    "DIRECTORY_VERSION",
    "ENTRIES_MIN",
    "HEADER_BYTES",
    "IN_USE_WORD",
    "NAMESPACES_WORD",
    "NAMESPACE_FACTOR",
    "NAMESPACE_PROBES",
    "OPEN_WORD",
    "SHIFTS_WORD",
    "Header",
    "decode_header",
    "encode_header",
    "header_for",
    "namespace_place",
    "namespace_word",
]

DIRECTORY_VERSION: Final = 1
#: The part that is written once.
HEADER_BYTES: Final = 128
NAMESPACE_PROBES: Final = 64
#: Places of what changes, in words from the start of the file.
SHIFTS_WORD: Final = 128 // 8
OPEN_WORD: Final = 192 // 8
IN_USE_WORD: Final = 256 // 8
NAMESPACES_WORD: Final = 4096 // 8

_PAGE_BYTES: Final = 4096
_WORDS_OF_NAMESPACE: Final = 4
_MAGIC: Final = b"\x89KVTDIR\n"
_HEADER: Final = struct.Struct("<8sII16sQQQQQ48xQ")
ENTRIES_MIN: Final = 16
_ENTRIES_MAX: Final = 1 << 36
_NAMESPACES_MIN: Final = 512
_NAMESPACES_MAX: Final = 1 << 28
_REMEDY: Final = "connect anew: the daemon passes the descriptor of its own directory"
#: Odd, near 2**32 over the golden ratio: numbers that follow each other land far apart.
NAMESPACE_FACTOR: Final = 0x9E3779B1


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What says where everything lies; `entries` and `namespace_words` are powers of two."""

    boot_id: int
    hash_seed: int
    entries: int
    namespace_words: int

    @property
    def entries_offset(self) -> int:
        end = NAMESPACES_WORD * 8 + self.namespace_words * 8
        return end + -end % _PAGE_BYTES

    @property
    def file_bytes(self) -> int:
        return self.entries_offset + self.entries * ENTRY_BYTES

    @property
    def shift(self) -> int:
        """How far a 64-bit hash is shifted to be a place."""
        return 65 - self.entries.bit_length()


def header_for(*, pages_max: int, namespaces_max: int, boot_id: int, hash_seed: int) -> Header:
    """The smallest directory that holds `pages_max` entries at a load of at most one half.

    Raises InvalidConfigValue.
    """
    entries = max(ENTRIES_MIN, _power_of_two(2 * pages_max))
    words = max(_NAMESPACES_MIN, _power_of_two(_WORDS_OF_NAMESPACE * namespaces_max))
    if pages_max < 1 or entries > _ENTRIES_MAX or namespaces_max < 1 or words > _NAMESPACES_MAX:
        raise InvalidConfigValue(
            f"a directory of {pages_max} pages and {namespaces_max} namespaces",
            remedy=f"pages are 1 to {_ENTRIES_MAX // 2}, namespaces 1 to {_NAMESPACES_MAX // 4}",
        )
    if not (0 < boot_id < 1 << 128 and 0 <= hash_seed < 1 << 64):
        raise InvalidConfigValue(
            "the boot id or hash seed of a directory does not fit its field",
            remedy="a boot id is 1 to 2**128 - 1, a hash seed 0 to 2**64 - 1",
        )
    return Header(boot_id=boot_id, hash_seed=hash_seed, entries=entries, namespace_words=words)


def encode_header(header: Header) -> bytes:
    """Bytes 0-127."""
    block = _HEADER.pack(
        _MAGIC,
        DIRECTORY_VERSION,
        _PAGE_BYTES,
        header.boot_id.to_bytes(16, "little"),
        header.entries,
        header.hash_seed,
        header.namespace_words,
        header.entries_offset,
        header.file_bytes,
        0,
    )
    return block[:-8] + struct.pack("<Q", _header_mix(block, header.boot_id))


def decode_header(block: bytes, file_bytes: int) -> Header:
    """The header that `block` (128 bytes of the reader's own) holds, of a file of `file_bytes`.

    Raises DirectoryError naming what is wrong. What it returns lies within the file.
    """
    magic, version, page, boot, entries, seed, words, offset, size, mix = _HEADER.unpack(block)
    if magic != _MAGIC:
        raise _refused(f"no directory here: it starts with {magic.hex()}, not {_MAGIC.hex()}")
    if version != DIRECTORY_VERSION:
        raise DirectoryError(
            f"directory version {version}; this build reads version {DIRECTORY_VERSION}",
            remedy="run the daemon and its clients from one version of kvtier",
        )
    boot_id = int.from_bytes(boot, "little")
    if mix != _header_mix(block, boot_id):
        raise _refused("the directory's header is damaged")
    if not (
        _is_power(entries, ENTRIES_MIN, _ENTRIES_MAX)
        and _is_power(words, _NAMESPACES_MIN, _NAMESPACES_MAX)
    ):
        raise _refused(f"{entries} entries and {words} namespace words are no powers of two")
    header = Header(boot_id=boot_id, hash_seed=seed, entries=entries, namespace_words=words)
    if page != _PAGE_BYTES or offset != header.entries_offset or size != header.file_bytes:
        raise _refused("the directory's header contradicts itself")
    if file_bytes != size:
        raise _refused(f"the directory has {file_bytes} bytes and says {size}")
    return header


def namespace_word(number: int, generation: int) -> int:
    """The word that says that `number` is current. Raises LimitExceeded."""
    if not (0 < number < 1 << 32 and 0 < generation < 1 << 32):
        raise LimitExceeded(
            f"namespace number {number} in generation {generation} does not fit the directory",
            remedy="both are 1 to 2**32 - 1; restart the daemon with a new directory",
        )
    return number << 32 | generation


def namespace_place(number: int, words: int) -> int:
    """The first of the NAMESPACE_PROBES words, of `words`, that `number` may lie in."""
    bits = words.bit_length() - 1
    return ((number * NAMESPACE_FACTOR) & 0xFFFFFFFF) >> (32 - bits)


def _header_mix(block: bytes, boot_id: int) -> int:
    words = np.frombuffer(block, np.uint64).reshape(1, -1)
    return int(mix_many(words, mix_seed(boot_id))[0])


def _power_of_two(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()


def _is_power(value: int, low: int, high: int) -> bool:
    return low <= value <= high and value & (value - 1) == 0


def _refused(message: str) -> DirectoryError:
    return DirectoryError(message, remedy=_REMEDY)
