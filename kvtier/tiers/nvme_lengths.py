"""How long each journal was when its last entry was acknowledged: so that a file that was removed
or cut short afterwards is noticed.

    file `journals` of the daemon directory, 512 bytes, overwritten in place (little-endian)
         0    8 magic 89 4b 56 54 4a 4c 4e 0a ("\\x89KVTJLN\\n")
         8    4 version       u32, 1
        12    4 count         u32, at most 29
        16   16 directory id
        32    - count times number u64, acknowledged bytes u64; numbers rise, the last is the newest
       504    8 sum           xxh3-64 of bytes 0 to 503

Promise: it never names more than what survives a power cut, for a length is written after the sync
of the journal that it is of. It is synced itself only when a journal is made: after a power cut it
may name less, so a cut that comes with one may go unseen; after a kill it is exact. A directory
without it (of an older version) says nothing. One sector, so a power cut does not tear it; what it
has no room for is said by the journals themselves, each of those before it (nvme_frames.Known).

Thread rule: any thread.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import xxhash

from kvtier.tiers.nvme_state import DIRECTORY_ID_BYTES, read_file
from kvtier.tiers.plain_file import open_plain

__all__ = [
    "LENGTHS",
    "LENGTHS_MAGIC",
    "JournalLengths",
    "LengthNote",
    "parse_lengths",
    "read_lengths",
]

LENGTHS: Final = "journals"

LENGTHS_MAGIC: Final = b"\x89KVTJLN\n"
_VERSION: Final = 1
_HEAD: Final = struct.Struct("<8sII16s")
_ITEM: Final = struct.Struct("<QQ")
_SUM: Final = struct.Struct("<Q")
_BYTES: Final = 512
_COUNT_MAX: Final = (_BYTES - _HEAD.size - _SUM.size) // _ITEM.size


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalLengths:
    """Acknowledged bytes by number. `problem`: why the file says nothing although it is there."""

    of: dict[int, int] = field(default_factory=dict)
    problem: str = ""

    @property
    def newest(self) -> int:
        """The number of the newest journal; 0 if none is known."""
        return max(self.of, default=0)

    def with_more(self, lengths: Iterable[tuple[int, int]]) -> JournalLengths:
        """And what others know."""
        of = dict(self.of)
        for number, nbytes in lengths:
            of[number] = max(nbytes, of.get(number, 0))
        return replace(self, of=of)

    def lost_bytes(self, number: int, good_bytes: int) -> int:
        """How much of what was acknowledged is not among the first `good_bytes` of a journal."""
        return max(0, self.of.get(number, 0) - good_bytes)


def read_lengths(directory: Path, directory_id: bytes) -> JournalLengths:
    """What is noted in a daemon directory. Raises DirectoryError when it cannot be read."""
    blob = read_file(directory / LENGTHS)
    return JournalLengths() if blob is None else parse_lengths(blob, directory_id)


def parse_lengths(blob: bytes, directory_id: bytes | None = None) -> JournalLengths:
    """What the file says; without an id, of whichever daemon directory it is."""
    if len(blob) != _BYTES:
        return JournalLengths(problem=f"{len(blob)} bytes, not {_BYTES}")
    magic, version, count, owner = _HEAD.unpack_from(blob)
    if magic != LENGTHS_MAGIC or _SUM.unpack_from(blob, _BYTES - _SUM.size)[0] != _sum(blob):
        return JournalLengths(problem="its checksum does not match")
    if version != _VERSION or count > _COUNT_MAX:
        return JournalLengths(problem=f"it has version {version}, this build reads {_VERSION}")
    if directory_id not in (None, owner):
        return JournalLengths()  # of a life before: its journals are none of these
    items = blob[_HEAD.size : _HEAD.size + count * _ITEM.size]
    return JournalLengths(of=dict(_ITEM.iter_unpack(items)))


class LengthNote:
    """The writer; one a directory."""

    def __init__(self, directory: Path, directory_id: bytes) -> None:
        assert len(directory_id) == DIRECTORY_ID_BYTES, directory_id
        self.path = directory / LENGTHS
        self._directory_id = directory_id
        self._lock = threading.Lock()
        self._of: dict[int, int] | None = None  # not read yet

    def before(self, number: int) -> tuple[tuple[int, int], ...]:
        """The last two journals before this one, and their lengths: entries can still be on their
        way to the last, and nothing comes to the other any more. Raises DirectoryError."""
        with self._lock:
            return tuple(sorted(self._below(number).items())[-2:])

    def begin(self, number: int, nbytes: int) -> None:
        """Durably notes a new journal, which is the newest now. Raises OSError, DirectoryError."""
        with self._lock:
            kept = sorted(self._below(number).items())[1 - _COUNT_MAX :]
            self._write(dict(kept) | {number: nbytes}, sync=True)

    def drop(self, number: int) -> None:
        """Durably forgets this journal and whatever came after it, which are to be removed: a
        start would miss them. Raises OSError, DirectoryError; they have to stay then."""
        with self._lock:
            self._write(self._below(number), sync=True)

    def note(self, number: int, nbytes: int) -> None:
        """The first `nbytes` of the journal are durable now. Where that cannot be noted (there is
        no descriptor left, say) the file names less, and what is durable stays so.
        """
        with self._lock:
            assert self._of is not None, "begin comes first"
            if self._of.get(number, nbytes) < nbytes:
                self._of[number] = nbytes
                with suppress(OSError):
                    self._write(self._of, sync=False)

    def keep(self) -> None:
        """Writes the file again if somebody took it away or cut it. Raises OSError."""
        with self._lock:
            if self._of is None:
                return
            try:
                if self.path.stat().st_size == _BYTES:
                    return
            except FileNotFoundError:
                pass
            self._write(self._of, sync=True)

    def _below(self, number: int) -> dict[int, int]:
        """Higher ones are of a life before, whose files were all taken away."""
        if self._of is None:
            self._of = read_lengths(self.path.parent, self._directory_id).of
        return {known: length for known, length in self._of.items() if known < number}

    def _write(self, of: dict[int, int], *, sync: bool) -> None:
        """What is known from then on; where it fails what was known before is, and the file may
        say either."""
        items = sorted(of.items())
        assert len(items) <= _COUNT_MAX, items
        blob = _HEAD.pack(LENGTHS_MAGIC, _VERSION, len(items), self._directory_id)
        blob += b"".join(_ITEM.pack(*item) for item in items)
        blob += bytes(_BYTES - _SUM.size - len(blob))
        fd = open_plain(self.path, os.O_WRONLY | os.O_CREAT)
        try:
            os.pwrite(fd, blob + _SUM.pack(_sum(blob)), 0)
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)
        self._of = of


def _sum(blob: bytes) -> int:
    return xxhash.xxh3_64_intdigest(blob[: _BYTES - _SUM.size])
