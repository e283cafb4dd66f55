"""Compiled loops over the arrays of core/policy's use_order.py: its steps, for many rows a call.

Each does to places, entries, counts and columns what the methods of UseOrder and LruTailFirst of
that name do row by row; tests hold them to that. Numbers that change are in `marks`, by the names
below. Importing this compiles it, and needs numba (extra `fast`). One thread.
"""

from __future__ import annotations

from typing import Any, Final

from kvtier.packing.jit_numba import compiled, part

__all__ = ["BITS", "MARKS", "append", "bring_over", "evict", "touch"]

#: Of `marks`: where the first row that waits is not before; of the newer part its first place, its
#: `begin`, `end` and how many wait in it; of the older one its first place, `begin` and how many
#: wait; entries looked at; use_order's BLOCK_BITS, which is told because numba's cache would not
#: notice another one.
_FRONT, _FIRST, _BEGIN, _END, _WAITING, _OLD_FIRST, _OLD_BEGIN, _OLD_WAITING, _LOOKED = range(9)
BITS: Final = 9
MARKS: Final = 10


@part
def _write(
    place: int, entry: int, marks: Any, newer: Any, counts: Any, older: Any, old_counts: Any
) -> None:
    if place >= marks[_FIRST]:
        at = place - marks[_FIRST]
        change = (entry > 0) - (newer[at] > 0)
        newer[at] = entry
        counts[at >> marks[BITS]] += change
        marks[_WAITING] += change
    else:
        at = place - marks[_OLD_FIRST]
        change = (entry > 0) - (older[at] > 0)
        older[at] = entry
        old_counts[at >> marks[BITS]] += change
        marks[_OLD_WAITING] += change


@compiled(
    "void(i8[::1], i8, u8[::1], i8[::1], u8[::1], i8[::1], i4[::1], i8[::1], i4[::1], i8[::1])"
)
def touch(
    rows: Any, stamp: int, stamps: Any, place: Any, queued: Any, marks: Any, newer: Any,
    counts: Any, older: Any, old_counts: Any,
) -> None:  # fmt: skip
    """`rows` from the head of a chain to its tail, which gets the lowest of the stamps."""
    begin, last = marks[_END], len(rows) - 1
    for number in range(len(rows)):
        stamps[rows[number]] = stamp + last - number
    for number in range(last, -1, -1):
        row = rows[number]
        if place[row] >= begin or not place[row]:
            continue  # named twice, or not of this order
        _write(place[row], 0, marks, newer, counts, older, old_counts)
        entry = row + 1 if queued[row] else -row - 1
        _write(marks[_END], entry, marks, newer, counts, older, old_counts)
        place[row] = marks[_END]
        marks[_END] += 1


@compiled("void(i8[::1], i8, u8[::1], i4[::1], i8[::1], u8[::1], i8[::1], i4[::1], i8[::1])")
def append(
    rows: Any, stamp: int, stamps: Any, children: Any, place: Any, queued: Any, marks: Any,
    newer: Any, counts: Any,
) -> None:  # fmt: skip
    """Rows that are not of this order arrive at its end."""
    for number in range(len(rows)):
        row = rows[number]
        stamps[row] = stamp + number
        waits = children[row] == 0
        at = marks[_END] - marks[_FIRST]
        newer[at] = row + 1 if waits else -row - 1
        counts[at >> marks[BITS]] += waits
        marks[_WAITING] += waits
        place[row] = marks[_END]
        queued[row] = waits
        marks[_END] += 1


@part
def _first_waiting(entries: Any, counts: Any, at: int, bits: int) -> int:
    """Where the first row that waits is, from here on; there is one."""
    while entries[at] <= 0:
        at += 1
        if not at & ((1 << bits) - 1):
            while not counts[at >> bits]:
                at += 1 << bits
    return at


@compiled(
    "i8(i8[::1], i4[::1], i4[::1], i4[::1], i8[::1], u8[::1], i8[::1], i4[::1], i8[::1], i4[::1],"
    " i8[::1])"
)
def evict(
    gone: Any, children: Any, leases: Any, parents: Any, place: Any, queued: Any, marks: Any,
    newer: Any, counts: Any, older: Any, old_counts: Any,
) -> int:  # fmt: skip
    """Fills `gone` with rows that leave, in the order in which they were used; how many there are.

    The page before one that leaves loses its child at once, so that it may be the next.
    """
    found = 0
    while found < len(gone):
        if marks[_OLD_WAITING]:
            first, begin = marks[_OLD_FIRST], marks[_OLD_BEGIN]
            at = _first_waiting(older, old_counts, max(marks[_FRONT], begin) - first, marks[BITS])
            row = older[at] - 1
        elif marks[_WAITING]:
            first, begin = marks[_FIRST], marks[_BEGIN]
            at = _first_waiting(newer, counts, max(marks[_FRONT], begin) - first, marks[BITS])
            row = newer[at] - 1
        else:
            break
        marks[_LOOKED] += 1 + max(0, first + at - marks[_FRONT])
        marks[_FRONT] = first + at
        queued[row] = 0
        if children[row] or leases[row]:  # it waits for `ready`
            _write(first + at, -row - 1, marks, newer, counts, older, old_counts)
            continue
        _write(first + at, 0, marks, newer, counts, older, old_counts)
        place[row] = 0
        gone[found] = row
        found += 1
        before = parents[row] - 1
        if before >= 0:
            parents[row] = 0
            children[before] -= 1
            is_kept = children[before] or leases[before] or queued[before]
            if not is_kept and place[before]:
                queued[before] = 1
                _write(place[before], before + 1, marks, newer, counts, older, old_counts)
                marks[_FRONT] = min(marks[_FRONT], place[before])
    return found


@compiled("UniTuple(i8, 2)(i8, i8, i4[::1], i8[::1], i4[::1], i8[::1], i8, i8, i8[::1], i8)")
def bring_over(
    begin: int, end: int, older: Any, old_counts: Any, newer: Any, counts: Any, to: int,
    first: int, place: Any, bits: int,
) -> tuple[int, int]:  # fmt: skip
    """Entries `begin` to before `end` of the older part come to the newer one, whose first place is
    `first`, before its entry `to`: (how many were no holes, how many of them wait)."""
    moved = waiting = 0
    for at in range(end - 1, begin - 1, -1):
        entry = older[at]
        if not entry:
            continue
        older[at] = 0
        moved += 1
        to -= 1
        newer[to] = entry
        place[abs(entry) - 1] = first + to
        if entry > 0:
            waiting += 1
            old_counts[at >> bits] -= 1
            counts[to >> bits] += 1
    return moved, waiting
