"""What makers say of many pages at once, as columns: PageMeta without an object for each page.

A value; nobody changes the columns after it was made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvtier.core.page import KEY_BYTES, SUM_BYTES, PageMeta

__all__ = ["PageColumns", "cut", "once_each", "rows_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageColumns:
    """Of n pages what the store has to know; the fields are those of PageMeta."""

    keys: Sequence[bytes]
    parents: Sequence[bytes]
    lengths: Sequence[int]
    codecs: Sequence[int]
    lossy: Sequence[bool]
    payload_sums: Sequence[bytes]
    origin_sums: Sequence[bytes]
    ttls_ms: Sequence[int]

    @classmethod
    def of(cls, metas: Sequence[PageMeta]) -> Self:
        return cls(
            keys=[meta.key for meta in metas],
            parents=[meta.parent for meta in metas],
            lengths=[meta.length for meta in metas],
            codecs=[meta.codec for meta in metas],
            lossy=[meta.lossy for meta in metas],
            payload_sums=[meta.payload_sum for meta in metas],
            origin_sums=[meta.origin_sum for meta in metas],
            ttls_ms=[meta.ttl_ms for meta in metas],
        )

    def __len__(self) -> int:
        return len(self.keys)

    def check(self) -> None:
        """Raises ValueError for keys and sums of lengths that no column has."""
        for name, column, widths in (
            ("key", self.keys, {KEY_BYTES}),
            ("parent", self.parents, {0, KEY_BYTES}),
            ("payload_sum", self.payload_sums, {SUM_BYTES}),
            ("origin_sum", self.origin_sums, {SUM_BYTES}),
        ):
            if others := set(map(len, column)) - widths:
                raise ValueError(f"a {name} of {others.pop()} bytes does not fit")

    def part(self, begin: int, end: int) -> PageColumns:
        """Those from `begin` to before `end`; this very object when they are all."""
        if begin == 0 and end == len(self):
            return self
        return self._each(lambda column: column[begin:end])

    def take(self, which: Sequence[int]) -> PageColumns:
        """Those with these indices, which rise; this very object when they are all."""
        if len(which) == len(self):
            return self
        return self._each(lambda column: [column[at] for at in which])

    def _each(self, choose: Callable[[Sequence[Any]], Sequence[Any]]) -> PageColumns:
        return PageColumns(
            keys=choose(self.keys),
            parents=choose(self.parents),
            lengths=choose(self.lengths),
            codecs=choose(self.codecs),
            lossy=choose(self.lossy),
            payload_sums=choose(self.payload_sums),
            origin_sums=choose(self.origin_sums),
            ttls_ms=choose(self.ttls_ms),
        )


def once_each(which: list[int], keys: Sequence[bytes]) -> Iterator[list[int]]:
    """These indices in stretches, in none of which a page comes twice."""
    if len({keys[at] for at in which}) == len(which):
        yield which
        return
    begin, seen = 0, set[bytes]()
    for i, at in enumerate(which):
        if keys[at] in seen:
            yield which[begin:i]
            begin = i
            seen.clear()
        seen.add(keys[at])
    yield which[begin:]


def rows_of(values: Sequence[bytes], width: int) -> npt.NDArray[np.uint8]:
    """Values of `width` bytes as rows, shape (n, width)."""
    return np.frombuffer(b"".join(values), np.uint8).reshape(-1, width)


def cut(column: bytes, width: int) -> list[bytes]:
    """The values of `width` bytes that lie one after the other in `column`. ValueError for a column
    that is no multiple of it: what comes from outside is measured before (of frames by
    transfer.local.frames.decode).
    """
    # As numbers without a meaning: those that end with zeros keep them.
    values: list[bytes] = np.frombuffer(column, np.dtype((np.void, width))).tolist()
    return values
