"""What is known of the pages on NVMe at one moment: the content of a checkpoint, and of a start.

Pages are columns, so that a hundred thousand of them cost one array a field and no objects. A value
here is never changed by this package; its arrays may be views of a file's bytes and read-only.
Pure, safe from any thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier.core.page import KEY_BYTES

__all__ = [
    "FINGERPRINT_BYTES",
    "NO_PAGE",
    "PAGE_COLUMNS",
    "Pages",
    "Snapshot",
]

FINGERPRINT_BYTES: Final = 32
#: In the column `parent`: no page before is known.
NO_PAGE: Final = -1

#: (name, numpy type of an element, elements of one), in the order of the file.
PAGE_COLUMNS: Final[tuple[tuple[str, str, int], ...]] = (
    ("family", "<u4", 1),
    ("shard", "<u2", 1),
    ("key", "u1", KEY_BYTES),
    ("generation", "<u8", 1),
    ("slot", "<u8", 1),
    ("length", "<u8", 1),
    ("codec", "u1", 1),
    ("lossy", "u1", 1),
    ("parent", "<i4", 1),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pages:
    """Columns of one length n, the coldest page first.

    `key` is longer: after the keys of the pages come those of pages that are not there, and that
    some of these come after. `family` and `parent` are places: in the families beside it, and in
    `key` (or NO_PAGE). `length` is payload bytes, `slot` in units of 4096 bytes.
    """

    family: NDArray[np.uint32]
    shard: NDArray[np.uint16]
    key: NDArray[np.uint8]  # (n or more, 32)
    generation: NDArray[np.uint64]
    slot: NDArray[np.uint64]
    length: NDArray[np.uint64]
    codec: NDArray[np.uint8]
    lossy: NDArray[np.uint8]
    parent: NDArray[np.int32]

    def __post_init__(self) -> None:
        assert self.key.shape[1:] == (KEY_BYTES,), self.key.shape
        for name, column in self.columns():
            assert len(column) == len(self) or (name == "key" and self.absent > 0), name

    def __len__(self) -> int:
        return len(self.slot)

    @property
    def absent(self) -> int:
        """How many keys are of pages that are not there."""
        return len(self.key) - len(self)

    def columns(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """(name, column), in the order of PAGE_COLUMNS."""
        for name, _, _ in PAGE_COLUMNS:
            yield name, getattr(self, name)

    def take(self, rows: NDArray[np.int64]) -> Pages:
        """The pages at `rows`, in that order; what they come after and is not taken is absent."""
        before = np.unique(self.parent[rows])
        absent = np.setdiff1d(before[before != NO_PAGE], rows)
        return self._with(rows, absent)

    def with_absent_max(self, keys: int) -> Pages:
        """Without the keys of absent pages but those that the hottest pages come after, of which so
        many; without the links to the others."""
        if self.absent <= keys:
            return self
        wanted = self.parent[self.parent >= len(self)][::-1]
        _, at = np.unique(wanted, return_index=True)
        return self._with(np.arange(len(self)), wanted[np.sort(at)[:keys]])

    def _with(self, rows: NDArray[np.int64], absent: NDArray[np.signedinteger[Any]]) -> Pages:
        # One place more than keys: the last is where NO_PAGE points.
        place = np.full(len(self.key) + 1, NO_PAGE, np.int32)
        kept = np.concatenate([rows, absent.astype(np.int64)])
        place[kept] = np.arange(len(kept), dtype=np.int32)
        taken = {name: column[rows] for name, column in self.columns()}
        taken["parent"] = place[taken["parent"]]
        taken["key"] = self.key[kept]
        return Pages(**taken)

    @classmethod
    def empty(cls) -> Pages:
        columns = {name: np.zeros(0, kind) for name, kind, _ in PAGE_COLUMNS}
        return cls(**(columns | {"key": np.zeros((0, KEY_BYTES), np.uint8)}))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Snapshot:
    """The tier at one moment: every generation handed out later is above `last_generation`.

    `classes` gives the record size in bytes of each slab that has one, `families` the pairs
    (fingerprint, namespace generation) that `pages.family` counts, `in_flight` the generations
    whose record was being written then and may still become a page (not those whose page was
    deleted before that moment).

    `waits`: devices that were not there then (or came back empty), and about how many pages each
    has that are not in `pages`: they are in the checkpoint before it and the journals from that on.
    """

    last_generation: int
    classes: dict[int, int]
    families: tuple[tuple[bytes, int], ...]
    pages: Pages
    in_flight: tuple[int, ...]
    waits: dict[int, int] = field(default_factory=dict)

    @classmethod
    def empty(cls) -> Snapshot:
        return cls(last_generation=0, classes={}, families=(), pages=Pages.empty(), in_flight=())
