"""Whole columns of page ids compared with each other: the newest of each page, and who is where.

Ids are sorted by a mix of their words, with factors drawn anew for every call, so that no choice of
keys makes it slow; what has the same mix is compared in full, so that no accident makes it wrong.
Pure but for that, safe from any thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["NOWHERE", "PageIds", "cut_loops", "find", "newest_of_each"]

#: What `find` answers for an id that is not there.
NOWHERE = -1


@dataclass(frozen=True, slots=True, eq=False)
class PageIds:
    """Columns of one length n: which pages, whatever the copy."""

    family: NDArray[np.uint32]
    shard: NDArray[np.uint16]
    key: NDArray[np.uint8]  # (n, 32)

    def __len__(self) -> int:
        return len(self.family)

    def take(self, rows: NDArray[np.int64]) -> PageIds:
        return PageIds(self.family[rows], self.shard[rows], self.key[rows])

    def words(self) -> NDArray[np.uint64]:
        """(n, 5): all of an id."""
        words = np.empty((len(self), 5), np.uint64)
        words[:, 0] = (self.family.astype(np.uint64) << np.uint64(16)) | self.shard
        words[:, 1:] = np.ascontiguousarray(self.key).view(np.uint64)
        return words


def newest_of_each(ids: PageIds, generation: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """True for the row with the highest generation of its page; of equal ones, for one."""
    words = ids.words()
    mixed = _mixed(words, _factors())
    order = np.argsort(mixed)
    is_alike = mixed[order][1:] == mixed[order][:-1]
    is_newest = np.ones(len(ids), bool)
    if not is_alike.any():
        return is_newest
    # Only these can be two copies of one page.
    rows = order[np.append(is_alike, False) | np.append(False, is_alike)]
    rows = rows[np.lexsort((generation[rows], *words[rows].T))]
    is_same_page = (words[rows[1:]] == words[rows[:-1]]).all(axis=1)
    is_newest[rows[:-1][is_same_page]] = False
    return is_newest


def find(ids: PageIds, wanted: PageIds) -> NDArray[np.int64]:
    """For each of `wanted` its place in `ids`, or NOWHERE. No two of `ids` may be equal."""
    found = np.full(len(wanted), NOWHERE, np.int64)
    if not len(wanted):
        return found
    factors = _factors()
    words, wanted_words = ids.words(), wanted.words()
    mixed = _mixed(words, factors)
    order = np.argsort(mixed)
    mixed = mixed[order]
    wanted_mixed = _mixed(wanted_words, factors)
    at = np.searchsorted(mixed, wanted_mixed)
    open_rows = np.flatnonzero(at < len(mixed))
    while len(open_rows):
        open_rows = open_rows[mixed[at[open_rows]] == wanted_mixed[open_rows]]
        candidates = order[at[open_rows]]
        is_it = (words[candidates] == wanted_words[open_rows]).all(axis=1)
        found[open_rows[is_it]] = candidates[is_it]
        open_rows = open_rows[~is_it]
        at[open_rows] += 1
        open_rows = open_rows[at[open_rows] < len(mixed)]
    return found


def cut_loops(parent: NDArray[np.int32]) -> int:
    """Sets the parent of every page whose chain never ends to -1, in place; how many there were."""
    count = len(parent)
    # One place more, for what comes before the head of a chain; it points to itself.
    jump = np.append(np.where(parent < 0, count, parent).astype(np.int64), count)
    for _ in range(count.bit_length() + 1):
        if (jump == count).all():
            return 0
        jump = jump[jump]
    endless = np.flatnonzero(jump[:-1] != count)
    parent[endless] = -1
    return len(endless)


def _factors() -> NDArray[np.uint64]:
    drawn = np.random.default_rng().integers(0, 1 << 63, 5, dtype=np.uint64)
    return drawn * np.uint64(2) + np.uint64(1)


def _mixed(words: NDArray[np.uint64], factors: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mixed = np.zeros(len(words), np.uint64)
    for column, factor in enumerate(factors):
        mixed = (mixed ^ words[:, column]) * factor
        mixed ^= mixed >> np.uint64(31)
    return mixed
