"""Compiled loops of fast_cache.py. Importing this needs numba; any thread."""

from __future__ import annotations

from typing import Any

from kvtier.packing.jit_numba import compiled

__all__ = ["join", "leave"]


@compiled("void(i8[::1], i4[::1], i4[::1], i4[::1], i4[::1], i4[::1], u1[::1], b1[::1])")
def leave(
    rows: Any, block_of: Any, parent_of: Any, row_of: Any, after: Any, blocks: Any, uses: Any,
    used: Any,
) -> None:  # fmt: skip
    """Rows have left: writes their blocks to `blocks`, and to `used` which were used."""
    for at in range(len(rows)):
        row = rows[at]
        block = block_of[row]
        blocks[at] = block
        used[at] = uses[row] > 0
        row_of[block] = -1
        if parent_of[block] >= 0:
            after[parent_of[block]] -= 1


@compiled(
    "i8(i4[::1], i8[::1], i4[::1], i4[::1], i4[::1], i4[::1], u1[::1], u8[::1], i4[::1], i4[::1],"
    " i8[::1])"
)
def join(
    path: Any, rows: Any, block_of: Any, parent_of: Any, row_of: Any, after: Any, uses: Any,
    queued: Any, children: Any, parents: Any, kept: Any,
) -> int:  # fmt: skip
    """Blocks of `path`, none of which is here, get these rows, and are linked to the blocks before
    them. Writes to `kept` the rows that have got their first block after them: n. The result is n,
    or -1 - n if a block has blocks after it that are here already."""
    found = 0
    is_late = False
    for at in range(len(path)):
        before = parent_of[path[at]]
        is_late |= after[path[at]] > 0
        if before >= 0 and row_of[before] >= 0:
            row = row_of[before]
            if not children[row]:
                kept[found] = row
                found += 1
            children[row] += 1
    for at in range(len(path)):
        row_of[path[at]] = rows[at]
        block_of[rows[at]] = path[at]
        uses[rows[at]] = 0
        queued[rows[at]] = 0
    for at in range(len(path)):
        before = parent_of[path[at]]
        parents[rows[at]] = 0
        if before >= 0:
            after[before] += 1
            parents[rows[at]] = row_of[before] + 1
    for at in range(len(path)):
        children[rows[at]] = after[path[at]]
    return -1 - found if is_late else found
