"""Questions about all chains at once, answered by pointer doubling: as many vector steps as the
longest chain has binary digits, however long it is.

`parent` is the table's column: row + 1 of the page before, 0 at the head. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

__all__ = ["chain_heat", "rows_after"]


def _jumps(parent: npt.NDArray[np.int32]) -> Iterator[npt.NDArray[np.int64]]:
    """For k = 0, 1, ...: row + 1 -> row + 1 of the page 2**k before it, 0 where there is none."""
    jump = np.concatenate([np.zeros(1, np.int64), parent.astype(np.int64)])
    # links.py makes no rings; if there were one, it would not end.
    for _ in range(len(jump).bit_length()):
        if not bool(jump.any()):
            return
        yield jump
        jump = jump[jump]


def chain_heat(
    parent: npt.NDArray[np.int32], heat: npt.NDArray[np.uint64]
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """(for each row the highest heat of it and of every page after it, pages before it)."""
    hottest = np.concatenate([np.zeros(1, np.uint64), heat])
    depth = np.concatenate([np.zeros(1, np.int64), (parent != 0).astype(np.int64)])
    for jump in _jumps(parent):
        after = np.flatnonzero(jump)
        np.maximum.at(hottest, jump[after], hottest[after].copy())
        depth += depth[jump]
    return hottest[1:], depth[1:]


def rows_after(parent: npt.NDArray[np.int32], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """`rows` and every page after one of them."""
    marked = np.zeros(len(parent) + 1, bool)
    marked[rows + 1] = True
    for jump in _jumps(parent):
        marked |= marked[jump]
    return np.flatnonzero(marked[1:])
