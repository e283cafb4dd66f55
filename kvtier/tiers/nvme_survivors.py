"""The recovery rule on columns: which of the records that are listed or were found are pages.

The rule itself is in nvme_recovery. Here are its steps (a), (b), (c) and (e) over arrays; (d) is
nvme_scan's. Never two pages of one id, never two in one slot. Pure, safe from any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvtier.core.page import KEY_BYTES
from kvtier.packing.header_columns import FLAG_LOSSY, FLAG_PARENT
from kvtier.tiers.base import SLOT_BYTES
from kvtier.tiers.nvme_frames import Delete
from kvtier.tiers.nvme_match import NOWHERE, PageIds, cut_loops, find, newest_of_each
from kvtier.tiers.nvme_scan import RECORD_DTYPE, SlabScan, fits
from kvtier.tiers.nvme_snapshot import FINGERPRINT_BYTES, NO_PAGE, Pages, Snapshot

__all__ = ["Happenings", "Place", "Survivors", "survivors"]

_SHARD_MAX: Final = 0xFFFF


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Happenings:
    """What the journals say, all together: the last record size of each marked slab, the
    generations of all DROPs, the DELETEs. And what a look at whole records has shown: the
    generations of those that are `torn`.
    """

    marks: dict[int, int]
    drops: NDArray[np.uint64]
    deletes: Sequence[Delete]
    torn: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The slabs that exist, and the bytes of one."""

    slabs: frozenset[int]
    segment_bytes: int

    @property
    def units(self) -> int:
        return self.segment_bytes // SLOT_BYTES

    def has_class(self, slab: int, record_bytes: int) -> bool:
        """Whether the slab can hold records of this size."""
        is_size = 0 < record_bytes <= self.segment_bytes and record_bytes % SLOT_BYTES == 0
        return is_size and slab in self.slabs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Survivors:
    """The pages, coldest first: as the checkpoint has them, then those written since, by age.

    The counts are records that are none: `unplaced` entries of the checkpoint whose segment is not
    there, and found ones that are `stale` (a), `dropped` or `deleted` (b), `ended` (c),
    `superseded` or `torn` (e). `listed` and `found` are pages, by where they come from.

    `contested` are places in `pages`: of those there are older copies too, which (e) has left out.
    `unborn` are the (fingerprint, namespace generation) that are not there yet, if the present ones
    are the newest: what is said to be present is older than the pages.
    """

    families: tuple[tuple[bytes, int], ...]
    pages: Pages
    listed: int
    found: int
    unplaced: int
    stale: int
    dropped: int
    deleted: int
    ended: int
    superseded: int
    torn: int
    contested: NDArray[np.int64]
    unborn: tuple[tuple[bytes, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Candidates:
    """Columns of one length. `rank` orders them, coldest first."""

    family: NDArray[np.uint32]
    shard: NDArray[np.uint16]
    key: NDArray[np.uint8]
    generation: NDArray[np.uint64]
    slot: NDArray[np.uint64]
    length: NDArray[np.uint64]
    codec: NDArray[np.uint8]
    lossy: NDArray[np.uint8]
    rank: NDArray[np.uint64]
    is_listed: NDArray[np.bool_]  # taken from the checkpoint without a look
    before: NDArray[np.int64]  # where the key of the page before it is, see _parents

    @property
    def ids(self) -> PageIds:
        return PageIds(self.family, self.shard, self.key)

    def take(self, rows: NDArray[np.int64] | NDArray[np.bool_]) -> _Candidates:
        return _Candidates(**{part.name: getattr(self, part.name)[rows] for part in fields(self)})

    def __add__(self, other: _Candidates) -> _Candidates:
        return _Candidates(
            **{
                part.name: np.concatenate([getattr(self, part.name), getattr(other, part.name)])
                for part in fields(self)
            }
        )


class _Families:
    """(fingerprint, namespace generation) <-> a number of this recovery."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[bytes, int], int] = {}

    def number(self, family: tuple[bytes, int]) -> int:
        return self._numbers.setdefault(family, len(self._numbers))

    def known(self, family: tuple[bytes, int]) -> int | None:
        return self._numbers.get(family)

    def names(self) -> list[tuple[bytes, int]]:
        return list(self._numbers)


def survivors(
    base: Snapshot,
    scans: Sequence[SlabScan],
    happenings: Happenings,
    *,
    place: Place,
    generations: Mapping[bytes, int],
    generation_floor: int,
) -> Survivors:
    """The pages of a tier. `scans` are those of the marked slabs, `generations` the present
    namespace generation of each fingerprint, `generation_floor` the highest that a namespace had
    which was deleted.
    """
    families = _Families()
    listed, unplaced = _listed(base, happenings.marks, families, place)
    records = np.concatenate([np.zeros(0, RECORD_DTYPE), *(scan.records for scan in scans)])
    found, stale = _found(base, records, families)
    candidates = listed + found
    is_dropped = np.isin(candidates.generation, happenings.drops)
    is_deleted = _is_deleted(candidates, happenings.deletes, families)
    names = families.names()
    is_present = np.array([generations.get(name) == number for name, number in names], bool)
    is_ended = ~is_present[candidates.family]
    passed = candidates.take(~(is_dropped | is_deleted | is_ended))
    alive = passed.take(~np.isin(passed.generation, np.array(sorted(happenings.torn), np.uint64)))
    is_newest = _is_newest(alive)
    newest = alive.take(is_newest)
    ordered = newest.take(np.argsort(newest.rank, kind="stable"))
    used, family = np.unique(ordered.family, return_inverse=True)
    parent, absent = _parents(ordered, base.pages, records["parent"])
    return Survivors(
        families=tuple(names[number] for number in used.tolist()),
        pages=Pages(
            family=family.astype(np.uint32),
            shard=ordered.shard,
            key=np.concatenate([ordered.key, absent]),
            generation=ordered.generation,
            slot=ordered.slot,
            length=ordered.length,
            codec=ordered.codec,
            lossy=ordered.lossy,
            parent=parent,
        ),
        listed=int(ordered.is_listed.sum()),
        found=int((~ordered.is_listed).sum()),
        unplaced=unplaced,
        stale=stale,
        dropped=int(is_dropped.sum()),
        deleted=int((is_deleted & ~is_dropped).sum()),
        ended=int((is_ended & ~is_deleted & ~is_dropped).sum()),
        superseded=len(alive.slot) - len(newest.slot),
        torn=len(passed.slot) - len(alive.slot),
        contested=_places(ordered.ids, alive.take(~is_newest).ids),
        unborn=tuple(
            (name, number)
            for name, number in names
            if number > generations.get(name, generation_floor)
        ),
    )


def _listed(
    base: Snapshot, marks: Mapping[int, int], families: _Families, place: Place
) -> tuple[_Candidates, int]:
    """The checkpoint's pages in segments that need no look, and how many have no place."""
    pages = base.pages
    classes = {slab: size for slab, size in base.classes.items() if place.has_class(slab, size)}
    slabs = np.array(sorted(classes), np.uint64)
    sizes = np.array([classes[slab] for slab in sorted(classes)] + [SLOT_BYTES], np.uint64)
    slab, unit = np.divmod(pages.slot, np.uint64(place.units))
    at = np.searchsorted(slabs, slab)
    size = sizes[at]
    has_class = np.append(slabs, np.uint64(0))[at] == slab
    has_class &= at < len(slabs)
    start = unit * np.uint64(SLOT_BYTES)
    is_slot = (start % size == 0) & (start + size <= place.segment_bytes)
    is_placed = has_class & is_slot & fits(pages.length, size)
    is_marked = np.isin(slab, np.array(sorted(marks), np.uint64))
    rows = np.flatnonzero(is_placed & ~is_marked)
    number = np.array([families.number(name) for name in base.families], np.uint32)
    candidates = _Candidates(
        family=number[pages.family[rows]],
        shard=pages.shard[rows],
        key=pages.key[rows],
        generation=pages.generation[rows],
        slot=pages.slot[rows],
        length=pages.length[rows],
        codec=pages.codec[rows],
        lossy=pages.lossy[rows],
        rank=rows.astype(np.uint64),
        is_listed=np.ones(len(rows), bool),
        before=pages.parent[rows].astype(np.int64),
    )
    return candidates, int((~is_placed & ~is_marked).sum())


def _found(base: Snapshot, records: NDArray[Any], families: _Families) -> tuple[_Candidates, int]:
    """What passes (a) of the records found in marked segments, and how many do not."""
    generation, slot = records["sequence"], records["slot"]
    listed_at = _listed_at(base.pages, slot, generation)
    is_listed = listed_at != NOWHERE
    is_new = generation > np.uint64(base.last_generation)
    is_candidate = is_new | is_listed | np.isin(generation, np.array(base.in_flight, np.uint64))
    after = np.uint64(len(base.pages)) + generation
    fingerprints = np.ascontiguousarray(records["fingerprint"]).view(f"V{FINGERPRINT_BYTES}")[:, 0]
    names = zip(fingerprints.tolist(), records["namespace_generation"].tolist(), strict=True)
    candidates = _Candidates(
        family=np.array([families.number(name) for name in names], np.uint32),
        shard=records["shard"].astype(np.uint16),
        key=records["key"],
        generation=generation,
        slot=slot,
        length=records["length"],
        codec=records["codec"].astype(np.uint8),
        lossy=(records["flags"] & FLAG_LOSSY != 0).astype(np.uint8),
        rank=np.where(is_listed, listed_at.astype(np.uint64), after),
        is_listed=np.zeros(len(records), bool),
        before=np.where(
            records["flags"] & FLAG_PARENT != 0,
            len(base.pages.key) + np.arange(len(records)),
            NO_PAGE,
        ),
    )
    return candidates.take(is_candidate), int((~is_candidate).sum())


def _listed_at(
    pages: Pages, slot: NDArray[np.uint64], generation: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """For each record its place in the checkpoint, NOWHERE if it does not list exactly this one."""
    found = np.full(len(slot), NOWHERE, np.int64)
    if not len(pages):
        return found
    order = np.argsort(pages.slot)
    at = order[np.searchsorted(pages.slot, slot, sorter=order).clip(max=len(order) - 1)]
    is_it = (pages.slot[at] == slot) & (pages.generation[at] == generation)
    found[is_it] = at[is_it]
    return found


def _is_deleted(
    candidates: _Candidates, deletes: Sequence[Delete], families: _Families
) -> NDArray[np.bool_]:
    """Whether a DELETE names the page, with a bound that covers the record."""
    family: list[NDArray[np.uint32]] = []
    shard: list[NDArray[np.uint16]] = []
    bound: list[NDArray[np.uint64]] = []
    keys = bytearray()
    for delete in deletes:
        number = families.known((delete.fingerprint, delete.generation))
        if number is not None and delete.shard <= _SHARD_MAX:
            count = len(delete.keys) // KEY_BYTES
            family.append(np.full(count, number, np.uint32))
            shard.append(np.full(count, delete.shard, np.uint16))
            bound.append(np.full(count, delete.bound, np.uint64))
            keys += delete.keys
    is_deleted = np.zeros(len(candidates.slot), bool)
    if not keys:
        return is_deleted
    key = np.frombuffer(bytes(keys), np.uint8).reshape(-1, KEY_BYTES)
    deleted = PageIds(np.concatenate(family), np.concatenate(shard), key)
    highest = np.concatenate(bound)
    rows = np.flatnonzero(newest_of_each(deleted, highest))
    at = find(deleted.take(rows), candidates.ids)
    is_named = at != NOWHERE
    is_deleted[is_named] = highest[rows][at[is_named]] >= candidates.generation[is_named]
    return is_deleted


def _is_newest(candidates: _Candidates) -> NDArray[np.bool_]:
    """One of each id; and should a faulty checkpoint name a slot twice, one of each slot."""
    is_newest = newest_of_each(candidates.ids, candidates.generation)
    rows = np.flatnonzero(is_newest)
    rows = rows[np.lexsort((candidates.generation[rows], candidates.slot[rows]))]
    is_same_slot = candidates.slot[rows[1:]] == candidates.slot[rows[:-1]]
    is_newest[rows[:-1][is_same_slot]] = False
    return is_newest


def _places(ids: PageIds, others: PageIds) -> NDArray[np.int64]:
    """Where those of `ids` are that are among `others` too."""
    found = find(ids, others)
    return np.unique(found[found != NOWHERE])


def _parents(
    pages: _Candidates, listed: Pages, keys_found: NDArray[np.uint8]
) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """For each page the place of the one before it, and the keys of those that are no pages: their
    places are after those of the pages. A chain that bites its tail is no chain.

    `before` counts the checkpoint's keys, then the parents' keys that were found.
    """
    # Most pages are where the checkpoint has them: their links need no search.
    place = np.full(len(listed.key) + len(keys_found) + 1, NO_PAGE, np.int32)
    rows = np.flatnonzero(pages.rank < len(listed))
    place[pages.rank[rows]] = rows
    parent = place[pages.before]
    rows = np.flatnonzero((parent == NO_PAGE) & (pages.before != NO_PAGE))
    is_found = pages.before[rows] >= len(listed.key)
    key = np.empty((len(rows), KEY_BYTES), np.uint8)
    key[is_found] = keys_found[pages.before[rows[is_found]] - len(listed.key)]
    key[~is_found] = listed.key[pages.before[rows[~is_found]]]
    parent[rows] = find(pages.ids, PageIds(pages.family[rows], pages.shard[rows], key))
    is_absent = parent[rows] == NO_PAGE
    cut_loops(parent)
    absent = key[is_absent]
    parent[rows[is_absent]] = len(parent) + np.arange(len(absent))
    return parent, absent
