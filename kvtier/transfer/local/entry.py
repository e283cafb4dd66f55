"""The entry: what the directory says about one page, in 128 bytes that prove themselves whole.

Sixteen little-endian 64-bit words, aligned to 128 bytes; bits not named are zero:

    word byte size field
     0-3    0   32 key
       4   32    4 namespace          u32, the number: one family in one namespace generation
                36 2 shard            u16
                38 1 tier             u8, core.page.Tier
                39 1 state            u8, bits 0-3: 1 SEALED, bit 4: words 8-11 are known
       5   40    8 generation         u64, of the copy's allocation
       6   48    8 slot               u64, offset of the record in its tier in units of 4096
       7   56    6 length             u48, payload bytes as packed
                62 1 codec            u8, core.page.Codec
                63 1 flags            u8, bit 0: lossy
     8-9   64   16 payload_sum        as its maker made it; the payload lies 4096 behind the slot
   10-11   80   16 origin_sum         zero: none
   12-14   96   24 zero
      15  120    8 mix                u64, of words 0-14 and the boot id; 0: empty, 1: being written

Word 15 is the entry's state as well: a writer sets it to 1 before it touches another word and to
the mix when all are there, so memory that is all zeros is a table of empty entries. Word 4 is zero
in an empty entry too, so that a search sees by the first half of an entry that it goes on. A reader
copies the words to memory of its own and believes them only if their mix is what word 15 held
afterwards. Every word goes through a bijection of its own into a sum, so a change of one word is
always seen, and that of several with all but 2**-64 of the chances; an entry of another boot never
passes.

The place of an entry in the table is a hash of key, namespace and shard with a seed of the header.
The format changes only together with header.DIRECTORY_VERSION: tests/golden/directory_v1.hex.

Pure functions over arrays, safe from any thread; little-endian machines only. `words` is always an
array of uint64, shape (n, 16), in memory that nobody else writes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvtier.core.listing import Listed
from kvtier.core.page import KEY_BYTES, NO_SUM, SUM_BYTES, Codec, PageMeta, PageRef, Tier
from kvtier.errors import KeyLengthError, LimitExceeded

__all__ = [
    "BUSY",
    "EMPTY",
    "ENTRY_BYTES",
    "ENTRY_WORDS",
    "HOST_WITH_SUMS",
    "LENGTH_BYTES_MAX",
    "MIX_FACTORS",
    "NAME_BITS",
    "PLACE_FACTORS",
    "SLOT_BYTES",
    "Words",
    "encode_columns",
    "encode_entries",
    "encode_entry",
    "encode_into",
    "entry_fits",
    "identities",
    "key_words",
    "mix_many",
    "mix_one",
    "mix_seed",
    "name_word",
    "named_rows",
    "place_many",
    "place_one",
]

Words: TypeAlias = NDArray[np.uint64]

ENTRY_WORDS: Final = 16
ENTRY_BYTES: Final = 128
EMPTY: Final = 0
BUSY: Final = 1
LENGTH_BYTES_MAX: Final = (1 << 48) - 1
#: Of the place word, those that say which page this is: namespace and shard.
NAME_BITS: Final = (1 << 48) - 1

_SEALED: Final = 1
_HAS_SUMS: Final = 16
_LOSSY: Final = 1
#: The place word's highest 16 bits in the entry of a host copy with sums.
HOST_WITH_SUMS: Final = Tier.HOST | (_SEALED | _HAS_SUMS) << 8
#: The record header that lies before the payload.
_HEADER_BYTES: Final = 4096
#: What slots are counted in.
SLOT_BYTES: Final = 4096

_ENTRY: Final = struct.Struct("<32sIHBBQQIHBB16s16s24xQ")
_ALL: Final = (1 << 64) - 1
_CODECS: Final = tuple(np.uint64(codec) for codec in Codec)

#: Odd numbers without structure, part of the format: the first 20 outputs of splitmix64 from seed
#: 2026, each with bit 0 set.
_SPLITMIX_SEED: Final = 2026


def _splitmix(seed: int, count: int) -> list[int]:
    """See Steele, Lea, Flood: Fast splittable pseudorandom number generators (2014)."""
    made = []
    for _ in range(count):
        seed = (seed + 0x9E3779B97F4A7C15) & _ALL
        z = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _ALL
        made.append(z ^ (z >> 31))
    return made


_FACTORS: Final = [value | 1 for value in _splitmix(_SPLITMIX_SEED, 22)]
#: One for each of words 0-14, and one for their sum.
MIX_FACTORS: Final = tuple(_FACTORS[:16])
#: For key words 1-3, the name, and the last step.
PLACE_FACTORS: Final = tuple(_FACTORS[16:21])


def mix_seed(boot_id: int) -> int:
    """The 64 bits that the mix starts from, of a boot id below 2**128."""
    low, high = boot_id & _ALL, boot_id >> 64
    spread = ((high ^ (high >> 32)) * _FACTORS[21]) & _ALL
    return ((low ^ spread) * _FACTORS[20]) & _ALL


def mix_many(words: Words, seed: int) -> Words:
    """What word 15 of each row has to be, shape (n,)."""
    terms = words[:, :15] * np.array(MIX_FACTORS[:15], np.uint64)
    terms ^= terms >> np.uint64(32)
    total: Words = terms.sum(axis=1, dtype=np.uint64)
    total += np.uint64(seed)
    total ^= total >> np.uint64(32)
    total *= np.uint64(MIX_FACTORS[15])
    total ^= total >> np.uint64(29)
    # 0 and 1 have a meaning of their own.
    total[total <= BUSY] += np.uint64(2)
    return total


def place_many(words: Words, names: Words | np.uint64, seed: int, shift: int) -> NDArray[np.int64]:
    """The first place to look at for each key, shape (n,), of key words (n, 4) and names."""
    factors = [np.uint64(factor) for factor in PLACE_FACTORS]
    mixed = words[:, 0] + words[:, 1] * factors[0]
    mixed += words[:, 2] * factors[1]
    mixed += words[:, 3] * factors[2]
    mixed += np.asarray(names).reshape(-1) * factors[3]
    mixed += np.uint64(seed)
    mixed ^= mixed >> np.uint64(32)
    mixed *= factors[4]
    return (mixed >> np.uint64(shift)).astype(np.int64)


def mix_one(row: Sequence[int], seed: int) -> int:
    """`mix_many` of one row, quicker than an array of one."""
    total = seed
    for word, factor in zip(row, MIX_FACTORS[:15], strict=False):
        term = (word * factor) & _ALL
        total += term ^ (term >> 32)
    total &= _ALL
    total = ((total ^ (total >> 32)) * MIX_FACTORS[15]) & _ALL
    total ^= total >> 29
    return total + 2 if total <= BUSY else total


def place_one(row: Sequence[int], seed: int, shift: int) -> int:
    """`place_many` of an entry's words 0-4."""
    first, second, third, fourth, last = PLACE_FACTORS
    mixed = row[0] + row[1] * first + row[2] * second + row[3] * third
    mixed = (mixed + (row[4] & NAME_BITS) * fourth + seed) & _ALL
    return (((mixed ^ (mixed >> 32)) * last) & _ALL) >> shift


def name_word(namespace: int, shard: int) -> int:
    """Namespace and shard as they lie in the place word. Raises LimitExceeded."""
    if not (0 <= namespace < 1 << 32 and 0 <= shard < 1 << 16):
        raise LimitExceeded(
            f"shard {shard} of namespace {namespace} does not fit a directory entry",
            remedy="namespace numbers have 32 bits and shard numbers 16",
        )
    return namespace | shard << 32


def key_words(keys: Sequence[bytes] | NDArray[np.uint8]) -> Words:
    """Keys as native words, one after the other, shape (4 n,); no copy of an array that is fit.

    A list is joined, which is the fastest way and cannot see keys of other lengths that happen to
    come to 32 bytes each: they are found nowhere. Raises KeyLengthError for all else.
    """
    if isinstance(keys, np.ndarray):
        if keys.dtype != np.uint8 or keys.ndim != 2 or keys.shape[1] != KEY_BYTES:
            raise KeyLengthError(
                f"keys are an array of {keys.dtype}, shape {keys.shape}",
                remedy=f"pass uint8 of shape (n, {KEY_BYTES})",
            )
        flat = np.require(keys, requirements="C").reshape(-1)
        if flat.ctypes.data % 8:
            flat = flat.copy()
        words: Words = flat.view(np.uint64)
        return words
    joined = b"".join(keys)
    if len(joined) != KEY_BYTES * len(keys):
        raise KeyLengthError(
            f"{len(keys)} keys have {len(joined)} bytes together",
            remedy=f"keys are the {KEY_BYTES} bytes of a chain hash",
        )
    return np.frombuffer(joined, np.uint64)


def identities(
    keys: Sequence[bytes] | NDArray[np.uint8],
    *,
    namespaces: ArrayLike,
    shards: ArrayLike,
    generations: ArrayLike = 0,
) -> Words:
    """Rows that name entries to remove, shape (n, 16): words 0-5, the others zero.

    Namespaces and shards are one number or one for each key. With a generation other than 0 only an
    entry of that allocation is meant.
    """
    rows = named_rows(
        key_words(keys).reshape(-1, 4),
        np.asarray(namespaces, np.uint32),
        np.asarray(shards, np.uint16),
    )
    rows[:, 5] = np.asarray(generations, np.uint64)
    return rows


def named_rows(
    key_words: Words, namespaces: NDArray[np.uint32], shards: NDArray[np.uint16]
) -> Words:
    """`identities` of keys as words, shape (n, 4), whatever their generations."""
    rows = np.zeros((len(key_words), ENTRY_WORDS), np.uint64)
    rows[:, :4] = key_words
    rows[:, 4] = shards
    rows[:, 4] <<= np.uint64(32)
    rows[:, 4] |= namespaces
    return rows


def encode_entry(
    ref: PageRef, meta: PageMeta, *, namespace: int, shard: int, has_sums: bool = True
) -> bytes:
    """The 128 bytes of a sealed copy's entry; the owner's table fills the mix in.

    `has_sums` False: the sums of this copy are not at hand, and its reader has to ask the daemon.
    Raises KeyLengthError, LimitExceeded.
    """
    entry = bytearray(ENTRY_BYTES)
    encode_into(
        entry,
        Listed(
            namespace,
            shard,
            meta.key,
            ref.tier,
            meta.codec,
            meta.lossy,
            ref.slot,
            meta.length,
            ref.generation,
            has_sums,
            meta.payload_sum,
            meta.origin_sum,
        ),
    )
    return bytes(entry)


def encode_into(entry: bytearray | memoryview, page: Listed) -> None:
    """Writes the 128 bytes of a listed page's entry but for the mix. Raises as encode_entry."""
    if len(page.key) != KEY_BYTES:
        raise KeyLengthError(
            f"key has {len(page.key)} bytes", remedy=f"keys are the {KEY_BYTES} bytes of a hash"
        )
    # struct would cut or pad silently.
    assert len(page.payload_sum) == len(page.origin_sum) == SUM_BYTES, "payload_sum, origin_sum"
    has_sums = page.has_sums
    try:
        _ENTRY.pack_into(
            entry,
            0,
            page.key,
            page.namespace,
            page.shard,
            page.tier,
            _SEALED | _HAS_SUMS if has_sums else _SEALED,
            page.generation,
            page.slot,
            page.length & 0xFFFFFFFF,
            page.length >> 32,
            page.codec,
            _LOSSY if page.lossy else 0,
            page.payload_sum if has_sums else NO_SUM,
            page.origin_sum if has_sums else NO_SUM,
            0,
        )
    except struct.error as error:
        raise LimitExceeded(
            f"a number does not fit its field of a directory entry: {error}",
            remedy="see the diagram in kvtier/transfer/local/entry.py for every field's width",
        ) from error


def encode_columns(
    key_words: Words,
    *,
    namespace: NDArray[Any],
    shard: NDArray[Any],
    tier: Tier | int,
    generation: NDArray[Any],
    slot: NDArray[Any],
    length: NDArray[Any],
    codec: NDArray[Any],
    lossy: NDArray[Any],
    payload_sum: NDArray[np.uint8] | None = None,
    origin_sum: NDArray[np.uint8] | None = None,
) -> Words:
    """Many entries of one tier as rows for the owner's table, shape (n, 16): from keys as words,
    shape (n, 4), and columns of n numbers that fit their fields; with sums, shape (n, 16), if both
    are there.
    """

    def shifted(column: NDArray[Any], bits: int) -> Words:
        return column.astype(np.uint64) << np.uint64(bits)

    rows = named_rows(key_words, namespace, shard)
    rows[:, 4] |= np.uint64(int(tier) << 48 | _SEALED << 56)
    rows[:, 5] = generation
    rows[:, 6] = slot
    rows[:, 7] = length
    rows[:, 7] |= shifted(codec, 48) | shifted(lossy != 0, 56)
    if payload_sum is not None and origin_sum is not None:
        rows[:, 4] |= np.uint64(_HAS_SUMS << 56)
        rows[:, 8:10] = np.ascontiguousarray(payload_sum).view(np.uint64)
        rows[:, 10:12] = np.ascontiguousarray(origin_sum).view(np.uint64)
    return rows


def encode_entries(encoded: Sequence[bytes]) -> Words:
    """What `encode_entry` made, as rows for the owner's table, shape (n, 16), writable."""
    return np.frombuffer(bytearray().join(encoded), np.uint64).reshape(-1, ENTRY_WORDS)


def entry_fits(words: Words, arena_bytes: int) -> NDArray[np.bool_]:
    """Which rows are of host copies whose whole record lies in an arena of so many bytes, whose
    sums are known and whose codec is one: what a reader must know before it follows them.
    """
    place, packed = words[:, 4], words[:, 7]
    length = packed & np.uint64(LENGTH_BYTES_MAX)
    fits: NDArray[np.bool_] = place >> np.uint64(48) == np.uint64(HOST_WITH_SUMS)
    codec = (packed >> np.uint64(48)) & np.uint64(0xFF)
    fits &= np.logical_or.reduce([codec == known for known in _CODECS])
    fits &= packed >> np.uint64(56) <= np.uint64(_LOSSY)
    # Divided, not multiplied: a slot may be any 64 bits, and nothing here may wrap.
    slots = arena_bytes // SLOT_BYTES
    slot = words[:, 6]
    fits &= slot < np.uint64(slots)
    room = (np.uint64(slots) - np.minimum(slot, np.uint64(slots))) * np.uint64(SLOT_BYTES)
    fits &= (room >= np.uint64(_HEADER_BYTES)) & (length <= room - np.uint64(_HEADER_BYTES))
    return fits
