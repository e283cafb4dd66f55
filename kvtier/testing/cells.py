"""Self-describing pages: every 64 bytes name their owner, so a mix-up is proved and attributed.

    cell, 8 little-endian uint64 words:
    0  mix of words 1 to 7: first, so that even a cut-off cell differs from every other
    1  magic "kvtcell1"
    2  namespace, 16 bytes: its text, zero-padded, if that fits; else a digest of it
    4  key, 16 bytes, in the same way
    6  page number << 32 | cell number
    7  version (a generation, or the round of a test)

The last cell of a page is cut off where the page ends, and then names nobody. The bytes are
arbitrary as numbers: some cells are NaN as bfloat16, so use them where bytes are moved (codec
raw), not where they are converted.

Promise: `check_page` returns [] only for exactly the bytes of `make_page` with the same arguments.
Thread rule: functions without state.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from kvtier.testing.poison import POISON_BYTE
from kvtier.tiers.base import Buffer, flat_bytes

__all__ = ["CELL_BYTES", "CellFault", "CellOwner", "Foreign", "check_page", "make_page"]

CELL_BYTES = 64
_WORDS = CELL_BYTES // 8
_TAG_BYTES = 16
_MAGIC = int.from_bytes(b"kvtcell1", "little")
_ODD = np.uint64(0x9E3779B97F4A7C15)


class CellFault(StrEnum):
    FOREIGN = "of another page"
    MISPLACED = "of this page, at the wrong place"
    TORN = "not a whole cell"
    POISON = "poison: never loaded"
    ZERO = "zero: never written"


@dataclass(frozen=True, slots=True)
class CellOwner:
    """Whose bytes they are, as far as a cell can tell (long names as digests, in hexadecimal)."""

    namespace: str
    key: str
    page_no: int
    version: int

    @classmethod
    def of(cls, *, namespace: str, key: bytes, version: int, page_no: int = 0) -> CellOwner:
        """The owner as `check_page` would name it."""
        return cls(_name(_tag(namespace.encode())), _name(_tag(key)), page_no, version)


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A run of `cells` wrong cells from cell `first` on.

    `owner` is None where the bytes name nobody; `first_found` is the number that the first of them
    has in its owner's page, -1 if none.
    """

    first: int
    cells: int
    fault: CellFault
    owner: CellOwner | None = None
    first_found: int = -1

    def __str__(self) -> str:
        last = self.first + self.cells - 1
        whose = f", {self.owner} from its cell {self.first_found}" if self.owner else ""
        return f"cells {self.first} to {last}: {self.fault}{whose}"


def make_page(length: int, *, namespace: str, key: bytes, version: int, page_no: int = 0) -> bytes:
    """A page of `length` bytes that says in every cell whose it is."""
    cells = np.empty((-(-length // CELL_BYTES), _WORDS), dtype="<u8")
    cells[:, 1] = _MAGIC
    cells[:, 2:4] = np.frombuffer(_tag(namespace.encode()), dtype="<u8")
    cells[:, 4:6] = np.frombuffer(_tag(key), dtype="<u8")
    cells[:, 6] = np.arange(len(cells), dtype=np.uint64) | np.uint64(page_no << 32)
    cells[:, 7] = version
    cells[:, 0] = _mixed(cells)
    return cells.tobytes()[:length]


def check_page(
    buffer: Buffer, *, namespace: str, key: bytes, version: int, page_no: int = 0
) -> list[Foreign]:
    """Compare with `make_page` of the same arguments: every run of wrong cells, [] if equal."""
    found = flat_bytes(buffer)
    expected = make_page(
        found.nbytes, namespace=namespace, key=key, version=version, page_no=page_no
    )
    if found == expected:
        return []
    owner = CellOwner.of(namespace=namespace, key=key, version=version, page_no=page_no)
    # Padded alike, so that a cut-off last cell is compared like the others.
    raw = bytes(found)
    padding = bytes(-len(raw) % CELL_BYTES)
    cells = np.frombuffer(raw + padding, dtype="<u8").reshape(-1, _WORDS)
    right = np.frombuffer(expected + padding, dtype="<u8").reshape(-1, _WORDS)
    wrong = np.flatnonzero((cells != right).any(axis=1)).tolist()
    whole = (cells[:, 1] == _MAGIC) & (cells[:, 0] == _mixed(cells))
    return _runs(
        [
            _judge(cells[at], at, owner)
            if whole[at]
            else _judge_broken(raw[at * CELL_BYTES : (at + 1) * CELL_BYTES], at)
            for at in wrong
        ]
    )


def _judge(cell: NDArray[np.uint64], at: int, expected: CellOwner) -> Foreign:
    """What is to be said of a wrong cell that is whole."""
    place = int(cell[6])
    owner = CellOwner(
        _name(cell[2:4].tobytes()), _name(cell[4:6].tobytes()), place >> 32, int(cell[7])
    )
    fault = CellFault.MISPLACED if owner == expected else CellFault.FOREIGN
    return Foreign(first=at, cells=1, fault=fault, owner=owner, first_found=place & 0xFFFFFFFF)


def _judge_broken(raw: bytes, at: int) -> Foreign:
    blank = {0: CellFault.ZERO, POISON_BYTE: CellFault.POISON}
    fault = blank.get(raw[0], CellFault.TORN) if len(set(raw)) == 1 else CellFault.TORN
    return Foreign(first=at, cells=1, fault=fault)


def _runs(singles: list[Foreign]) -> list[Foreign]:
    """Neighbours with the same fault and owner, and consecutive cells of it, as one."""

    def kind(pair: tuple[int, Foreign]) -> tuple[object, ...]:
        number, cell = pair
        drift = cell.first_found - number if cell.owner else 0
        return (cell.first - number, cell.fault, cell.owner, drift)

    runs = []
    for _, group in groupby(enumerate(singles), key=kind):
        members = [cell for _, cell in group]
        head = members[0]
        runs.append(
            Foreign(
                first=head.first,
                cells=len(members),
                fault=head.fault,
                owner=head.owner,
                first_found=head.first_found,
            )
        )
    return runs


def _mixed(cells: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Word 0 of every row. Each step is invertible: cells that differ in one word never agree."""
    mixed = np.full(len(cells), _ODD, dtype=np.uint64)
    for word in range(1, _WORDS):
        mixed ^= cells[:, word]
        mixed *= _ODD  # wraps, as it should
        mixed ^= mixed >> np.uint64(32)
    return mixed


def _tag(name: bytes) -> bytes:
    if len(name) > _TAG_BYTES:
        return hashlib.blake2b(name, digest_size=_TAG_BYTES).digest()
    return name.ljust(_TAG_BYTES, b"\0")


def _name(tag: bytes) -> str:
    text = tag.rstrip(b"\0").decode("ascii", errors="replace")
    return text if text.isprintable() and "\ufffd" not in text else tag.hex()
