"""The bytes of a journal: its entries, the frames they lie in, and how a damaged file is read.

    head, 64 bytes (all numbers little-endian; see nvme_state for the rule of heads)
         0    8 magic 89 4b 56 54 4a 4e 4c 0a ("\\x89KVTJNL\\n")
         8    4 version       u32, 2
        12    4 head bytes    u32, 64
        16   16 directory id
        32    8 number        u64, also in the file's name
        40   16 zero
        56    8 head sum
    frames, each at a multiple of 64 and padded with zeros to the next one
         0    8 magic 89 4b 56 54 46 52 4d 0a ("\\x89KVTFRM\\n")
         8    4 length        u32, of the content
        12    4 zero
        16    8 frame number  u64, from 0, each one more than that of the frame before
        24    8 sum           xxh3-64 of bytes 0 to 23 and the content, with a seed
        32    - content       msgpack, a list of entries: [1, slab, record bytes] MARK,
                              [2, [generation, ...]] DROP,
                              [3, fingerprint, generation, shard, keys, bound] DELETE,
                              [4, names, [[journal, bytes], ...]] KNOWN

Version 1 had no KNOWN.


The seed is xxh3-64 of directory id and number: a frame of another journal, or a client's bytes that
look like a frame, never pass. Pure, safe from any thread.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgpack
import xxhash

from kvtier.core.page import KEY_BYTES
from kvtier.tiers.nvme_snapshot import FINGERPRINT_BYTES
from kvtier.tiers.nvme_state import DIRECTORY_ID_BYTES, Head, padded, sealed_head

__all__ = [
    "JOURNAL_HEAD_BYTES",
    "JOURNAL_MAGIC",
    "JOURNAL_VERSION",
    "JOURNAL_VERSIONS",
    "Delete",
    "Drop",
    "Entry",
    "Frames",
    "JournalHead",
    "Known",
    "Mark",
    "encode_frame",
    "encode_head",
    "frame_seed",
    "parse_frames",
]

JOURNAL_MAGIC: Final = b"\x89KVTJNL\n"
JOURNAL_VERSION: Final = 2

_HEAD_FIELDS: Final = struct.Struct("<16sQ16x")
_HEAD_FIELDS_OFFSET: Final = 16
_FRAME_MAGIC: Final = b"\x89KVTFRM\n"
_FRAME: Final = struct.Struct("<8sI4xQ")
_FRAME_SUM: Final = struct.Struct("<Q")
_FRAME_HEAD_BYTES: Final = _FRAME.size + _FRAME_SUM.size
_ALIGN: Final = 64
_MARK, _DROP, _DELETE, _KNOWN = 1, 2, 3, 4


@dataclass(frozen=True, slots=True)
class Mark:
    """From now on the slab's slots are written with records of up to `record_bytes`."""

    slab: int
    record_bytes: int


@dataclass(frozen=True, slots=True)
class Drop:
    """The copies with these generations are none any more."""

    generations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Delete:
    """Every copy of these pages with a generation up to `bound` is deleted.

    `keys` are 32 bytes each, one after another; `generation` is that of the namespace.
    """

    fingerprint: bytes
    generation: int
    shard: int
    keys: bytes
    bound: int

    def __post_init__(self) -> None:
        if len(self.fingerprint) != FINGERPRINT_BYTES or len(self.keys) % KEY_BYTES:
            raise ValueError(f"{len(self.fingerprint)} and {len(self.keys)} bytes of ids")


@dataclass(frozen=True, slots=True)
class Known:
    """What was durable already when this was written: by it a start finds out that something is
    older, or shorter, than it was.

    `names` is the number that the registry of namespaces gave last; `lengths` are journals before,
    and how many bytes of each were acknowledged.
    """

    names: int
    lengths: tuple[tuple[int, int], ...] = ()


Entry: TypeAlias = Mark | Drop | Delete | Known


@dataclass(frozen=True, slots=True)
class JournalHead:
    directory_id: bytes
    number: int

    @classmethod
    def of(cls, head: Head) -> JournalHead:
        return cls(*_HEAD_FIELDS.unpack_from(head.fields, _HEAD_FIELDS_OFFSET))


@dataclass(frozen=True, slots=True, kw_only=True)
class Frames:
    """What the frames of a file say. `bad` counts those that are lost in the middle of it,
    `torn_bytes` what comes after the last good one.
    """

    entries: tuple[Entry, ...]
    good: int
    bad: int
    torn_bytes: int


def encode_head(directory_id: bytes, number: int) -> bytes:
    """The first JOURNAL_HEAD_BYTES of a journal."""
    assert len(directory_id) == DIRECTORY_ID_BYTES, directory_id
    return sealed_head(JOURNAL_MAGIC, JOURNAL_VERSION, _HEAD_FIELDS.pack(directory_id, number))


JOURNAL_HEAD_BYTES: Final = len(encode_head(bytes(DIRECTORY_ID_BYTES), 0))


def frame_seed(directory_id: bytes, number: int) -> int:
    """What the sums of a journal's frames begin with."""
    return xxhash.xxh3_64_intdigest(directory_id + number.to_bytes(8, "little"))


def encode_frame(entries: Sequence[Entry], *, frame: int, seed: int) -> bytes:
    """One frame with `entries`, padded. Raises ValueError for a number over 64 bits."""
    try:
        content = msgpack.packb([_plain(entry) for entry in entries], use_bin_type=True)
    except OverflowError as error:
        raise ValueError(f"a number of {entries!r} does not fit 64 bits") from error
    head = _FRAME.pack(_FRAME_MAGIC, len(content), frame)
    whole: bytes = head + _FRAME_SUM.pack(_sum(head, content, seed)) + content
    return whole + bytes(padded(len(whole), _ALIGN) - len(whole))


def parse_frames(blob: bytes, *, version: int, seed: int) -> Frames:
    """Every frame of the file `blob` that is whole, wherever the others are damaged."""
    entries: list[Entry] = []
    good = bad = 0
    expected = 0  # number of the next frame
    end = min(JOURNAL_HEAD_BYTES, len(blob))
    for start, number, content, after in _whole_frames(blob, end, seed):
        if number < expected:
            continue
        lost = number - expected
        bad += max(lost, 1) if start > end or lost else 0
        found = _ENTRY_READERS[version](content)
        if found is None:
            bad += 1
        else:
            good += 1
            entries += found
        expected, end = number + 1, after
    return Frames(entries=tuple(entries), good=good, bad=bad, torn_bytes=len(blob) - end)


def _whole_frames(blob: bytes, at: int, seed: int) -> Iterator[tuple[int, int, bytes, int]]:
    """(start, number, content, start of what follows) of each frame that passes its sum."""
    while (at := blob.find(_FRAME_MAGIC, at)) >= 0:
        frame = _frame_at(blob, at, seed) if at % _ALIGN == 0 else None
        if frame is None:
            at += 1
            continue
        number, content, after = frame
        yield at, number, content, after
        at = after


def _frame_at(blob: bytes, at: int, seed: int) -> tuple[int, bytes, int] | None:
    if at + _FRAME_HEAD_BYTES > len(blob):
        return None
    _, length, number = _FRAME.unpack_from(blob, at)
    content_at = at + _FRAME_HEAD_BYTES
    after = padded(content_at + length, _ALIGN)
    if after > len(blob):
        return None
    content = blob[content_at : content_at + length]
    stored = _FRAME_SUM.unpack_from(blob, at + _FRAME.size)[0]
    if stored != _sum(blob[at : at + _FRAME.size], content, seed):
        return None
    return number, content, after


def _sum(head: bytes, content: bytes, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(head + content, seed)


def _plain(entry: Entry) -> list[Any]:
    match entry:
        case Mark():
            return [_MARK, entry.slab, entry.record_bytes]
        case Drop():
            return [_DROP, list(entry.generations)]
        case Delete():
            family = [entry.fingerprint, entry.generation]
            return [_DELETE, *family, entry.shard, entry.keys, entry.bound]
        case Known():
            return [_KNOWN, entry.names, [list(item) for item in entry.lengths]]


def _entries_of_version_1(content: bytes) -> list[Entry] | None:
    entries = _entries(content)
    return None if entries is None or any(isinstance(e, Known) for e in entries) else entries


def _entries(content: bytes) -> list[Entry] | None:
    """None: the sum is right and the content makes no sense, so a faulty writer made it."""
    try:
        return [_checked(_entry(values)) for values in msgpack.unpackb(content, raw=False)]
    except (TypeError, ValueError):
        return None


def _entry(values: Any) -> Entry:
    match values:
        case [1, int(slab), int(record_bytes)]:
            return Mark(slab=slab, record_bytes=record_bytes)
        case [2, [*generations]] if all(isinstance(number, int) for number in generations):
            return Drop(generations=tuple(generations))
        case [3, bytes(fingerprint), int(generation), int(shard), bytes(keys), int(bound)]:
            return Delete(
                fingerprint=fingerprint, generation=generation, shard=shard, keys=keys, bound=bound
            )
        case [4, int(names), [*lengths]]:
            return Known(names, tuple((int(number), int(nbytes)) for number, nbytes in lengths))
    raise ValueError(f"no entry of a journal: {values!r}")


def _checked(entry: Entry) -> Entry:
    match entry:
        case Mark():
            numbers: tuple[int, ...] = (entry.slab, entry.record_bytes)
        case Drop():
            numbers = entry.generations
        case Delete():
            numbers = (entry.generation, entry.shard, entry.bound)
        case Known():
            numbers = (entry.names, *(number for item in entry.lengths for number in item))
    if not all(0 <= number < 1 << 64 for number in numbers):
        raise ValueError(f"no number of a journal: {entry!r}")
    return entry


_ENTRY_READERS: Final[dict[int, Callable[[bytes], list[Entry] | None]]] = {
    1: _entries_of_version_1,
    2: _entries,
}
#: The versions of a journal that this build reads.
JOURNAL_VERSIONS: Final = frozenset(_ENTRY_READERS)
