"""What is on NVMe at a start: the newest whole checkpoint, the journals since, and a look into the
segments that were written since.

A record with sequence s is a page if, and only if,

    (a) s is above the checkpoint's last generation, or the checkpoint lists this slot with s, or s
        was in flight when it was taken;
    (b) no DROP names s, and no DELETE names its page with a bound of s or more;
    (c) its namespace generation is the present one of its family;
    (d) its header passes its sum, names this slot and this tier, and its length fits the record
        size of the slab;
    (e) of the records of its page that pass (a) to (d) it is the one with the highest sequence, or
        those above it are not whole: a process or a machine that ends in the middle of a copy must
        not take the copy away that is there already.

Segments with a MARK are read: there the checkpoint counts only as the list for (a). What it lists
in other segments is taken as it is; a reader of such a page checks the header as of every page.
Payloads are read only where (e) has to decide between two records.

Nothing is written or removed. What cannot be trusted not to bring back deleted pages (no whole
checkpoint, a journal missing) gives no page at all and says so; a file that cannot be read is an
error. Synchronous; call it outside of an event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from kvtier.errors import DirectoryError, TierIOError
from kvtier.tiers.base import TierDevice
from kvtier.tiers.nvme_base import Base, Chosen, choose
from kvtier.tiers.nvme_geometry import split_slab
from kvtier.tiers.nvme_journal import Delete, Drop, JournalContents, Known, Mark
from kvtier.tiers.nvme_lengths import LENGTHS, JournalLengths
from kvtier.tiers.nvme_noted import Evidence, Noted, refusal
from kvtier.tiers.nvme_recovery_report import RecoveryReport
from kvtier.tiers.nvme_scan import SlabScan, is_whole, scan_slab
from kvtier.tiers.nvme_segment import segment_name
from kvtier.tiers.nvme_snapshot import Pages, Snapshot
from kvtier.tiers.nvme_survivors import Happenings, Place, Survivors, survivors

__all__ = ["Base", "Recovered", "RecoveryReport", "recover"]

#: Above every number of a directory.
_ANY = 1 << 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recovered:
    """What a start goes on from.

    Every page lies in a slab of `classes` (slab -> record bytes) at a slot of it; no two have one
    id or one slot; parents make no loops. No generation up to `last_generation` may be used again.
    `base_number` is that of the checkpoint that was used, None for none; `next_number` is free for
    the next journal and checkpoint. `waits` are the devices that are not there, with about how many
    pages each has: a later checkpoint has to say that it lacks them. So it is with those whose
    segments could not be read, which are `unread`: their places must not be used meanwhile.
    """

    classes: dict[int, int]
    families: tuple[tuple[bytes, int], ...]
    pages: Pages
    last_generation: int
    base_number: int | None
    next_number: int
    report: RecoveryReport
    waits: dict[int, int] = field(default_factory=dict)
    unread: frozenset[int] = frozenset()
    #: How many pages the checkpoint lists in each segment that is not there, of devices that are.
    unplaced: dict[int, int] = field(default_factory=dict)
    #: Why no daemon may start with it.
    refusal: DirectoryError | None = None


def recover(
    directory: Path,
    *,
    directory_id: bytes,
    tier: TierDevice,
    slabs: Collection[int],
    segment_bytes: int,
    generations: Mapping[bytes, int],
    generation_floor: int,
    generation_bound: int = _ANY,
    names: int = _ANY,
    noted: Mapping[Path, Noted] | None = None,
    is_expected: Callable[[int], bool] = lambda slab: True,
    present: Collection[int] | None = None,
    unreadable: Collection[int] = (),
    threads: int = 4,
) -> Recovered:
    """The pages on `tier`, whose segments are `slabs`.

    `generations` is the present namespace generation of each fingerprint, `generation_floor` the
    highest of those that were deleted, `threads` how many segments are read at a time. How far the
    directory has got is said by `generation_bound`, below which all generations are, and `names`,
    the number given last to a namespace; how far it had, by what each device has `noted`. A segment
    that cannot be read is skipped and named in the report, as is one that is known and not there,
    if `is_expected` says that nobody gave it up. `present` are the numbers of the devices that are
    there, with segments or without; None: all. `unreadable` are slabs of them that are not among
    `slabs` because reading them failed, which may pass.

    Raises DirectoryError: checkpoint or journal cannot be read, are of a version that this build
    does not know, or of another directory.
    """
    chosen = choose(directory, directory_id, present)
    reached = Noted(journal=chosen.newest, generation=generation_bound, names=names)
    on_devices = noted or {}
    next_number = max([chosen.next_number - 1, *(n.journal for n in on_devices.values())]) + 1
    if chosen.file is None or chosen.file.snapshot is None or chosen.why:
        why_not = refusal(reached, Evidence(has_base=False, on_devices=on_devices))
        return _nothing(chosen, next_number, why_not)
    base = chosen.file.snapshot
    happenings = _happenings(chosen.journals)
    place = Place(slabs=frozenset(slabs), segment_bytes=segment_bytes)
    unplaced = _unplaced(base, place, present)
    known = happenings.marks.keys() | base.classes.keys()
    missing = filter(is_expected, sorted(known - place.slabs))
    gone = tuple(_gone_words(slab, unplaced.get(slab, 0)) for slab in missing)
    scans, skipped, failed = _scan(tier, happenings.marks, place, threads)
    unread = failed | {slab for slab in unreadable if unplaced.get(slab)}
    rule = partial(
        survivors, place=place, generations=generations, generation_floor=generation_floor
    )
    found = _found(tier, lambda happened: rule(base, scans, happened), happenings, threads)
    last_generation = _last_generation(chosen, base, happenings, scans)
    evidence = _evidence(last_generation, chosen.journals, found, on_devices)
    return Recovered(
        classes=_classes(base, happenings.marks, place, but=unread),
        families=found.families,
        pages=found.pages,
        last_generation=last_generation,
        base_number=chosen.file.number,
        next_number=next_number,
        report=_report(chosen, found, scans, skipped, gone),
        unplaced=unplaced,
        waits=_waits(chosen, happenings, present, place) | _counts(base, place, unread),
        unread=unread,
        refusal=refusal(reached, evidence),
    )


def _found(
    tier: TierDevice,
    rule: Callable[[Happenings], Survivors],
    happenings: Happenings,
    threads: int,
) -> Survivors:
    """By the rule, with what is not whole taken for torn: until no page has to make way."""
    while True:
        found = rule(happenings)
        torn = _torn(tier, found, threads)
        if not torn:
            return found
        happenings = replace(happenings, torn=happenings.torn | torn)


def _listed_in(base: Snapshot, place: Place) -> dict[int, int]:
    """Pages that the checkpoint lists in each segment."""
    slabs, counts = np.unique(base.pages.slot // np.uint64(place.units), return_counts=True)
    return dict(zip(slabs.tolist(), counts.tolist(), strict=True))


def _unplaced(base: Snapshot, place: Place, present: Collection[int] | None) -> dict[int, int]:
    """Those in segments that are not there, though their device is."""
    return {
        slab: pages
        for slab, pages in _listed_in(base, place).items()
        if slab not in place.slabs and (present is None or split_slab(slab)[0] in present)
    }


def _waits(
    chosen: Chosen, happenings: Happenings, present: Collection[int] | None, place: Place
) -> dict[int, int]:
    """The devices that are not there and have pages, with those that the checkpoint lists."""
    if present is None or chosen.file is None or chosen.file.snapshot is None:
        return {}
    base = chosen.file.snapshot
    listed = _counts(base, place, happenings.marks.keys() | base.classes.keys())
    waits = listed | chosen.waits
    return {device: pages for device, pages in waits.items() if device not in present}


def _counts(base: Snapshot, place: Place, slabs: Collection[int]) -> dict[int, int]:
    """The devices of these slabs, and how many pages the checkpoint lists in them."""
    listed = _listed_in(base, place)
    counts: Counter[int] = Counter()
    for slab in slabs:
        counts[split_slab(slab)[0]] += listed.get(slab, 0)
    return dict(counts)


def _evidence(
    last_generation: int,
    journals: Sequence[JournalContents],
    found: Survivors,
    on_devices: Mapping[Path, Noted],
) -> Evidence:
    entries = [entry for journal in journals for entry in journal.entries]
    return Evidence(
        has_base=True,
        generation=last_generation,
        names=max((entry.names for entry in entries if isinstance(entry, Known)), default=0),
        unborn=found.unborn,
        on_devices=on_devices,
    )


def _report(
    chosen: Chosen,
    found: Survivors,
    scans: Sequence[SlabScan],
    skipped: tuple[str, ...],
    gone: tuple[str, ...],
) -> RecoveryReport:
    return RecoveryReport(
        base=chosen.base,
        bad_checkpoints=chosen.bad_words,
        is_lost=False,
        why="",
        **_journal_counts(chosen.journals, chosen.lengths),
        cut=_cut(chosen.journals, chosen.lengths),
        **_scan_counts(scans),
        **_page_counts(found),
        skipped=skipped,
        gone=gone,
        segments_gone=len(gone),
        forgotten=chosen.forgotten,
    )


def _nothing(chosen: Chosen, next_number: int, why_not: DirectoryError | None) -> Recovered:
    why, bad = chosen.why, chosen.bad_words
    report = RecoveryReport(base=Base.NONE, bad_checkpoints=bad, is_lost=bool(why), why=why)
    return Recovered(
        classes={},
        families=(),
        pages=Pages.empty(),
        last_generation=0,
        base_number=None,
        next_number=next_number,
        report=report,
        refusal=why_not,
    )


def _happenings(journals: Sequence[JournalContents]) -> Happenings:
    marks: dict[int, int] = {}
    drops: list[int] = []
    deletes: list[Delete] = []
    for journal in journals:
        for entry in journal.entries:
            match entry:
                case Mark():
                    marks[entry.slab] = entry.record_bytes
                case Drop():
                    drops += entry.generations
                case Delete():
                    deletes.append(entry)
                case Known():
                    pass  # what it knows of journals has been heard
    return Happenings(marks=marks, drops=np.array(drops, np.uint64), deletes=deletes)


def _scan(
    tier: TierDevice, marks: Mapping[int, int], place: Place, threads: int
) -> tuple[list[SlabScan], tuple[str, ...], frozenset[int]]:
    """What lies in the marked slabs; why some were left out; which of these failed to be read."""
    failed: set[int] = set()

    def look(slab: int) -> SlabScan | str:
        size = marks[slab]
        if not place.has_class(slab, size):
            return f"slab {slab}: it cannot hold records of {size} bytes"
        try:
            return scan_slab(tier, slab, record_bytes=size, segment_bytes=place.segment_bytes)
        except TierIOError as error:
            failed.add(slab)
            return f"slab {slab}: {error}"

    wanted = sorted(place.slabs & marks.keys())
    with ThreadPoolExecutor(max(1, threads), "kvtier-recovery") as pool:
        results = list(pool.map(look, wanted))
    scans = [result for result in results if isinstance(result, SlabScan)]
    skipped = tuple(result for result in results if isinstance(result, str))
    return scans, skipped, frozenset(failed)


def _gone_words(slab: int, pages: int) -> str:
    device, local = split_slab(slab)
    name = f"{segment_name(local)} of device {device}"
    count = f" ({pages} were listed there)" if pages else ""
    return f"{name} is not there any more: its pages are misses{count}"


def _torn(tier: TierDevice, found: Survivors, threads: int) -> frozenset[int]:
    """The generations of pages that have to make way for an older copy: they are not whole."""

    def look(row: int) -> bool:
        slot, length = int(found.pages.slot[row]), int(found.pages.length[row])
        try:
            return is_whole(tier, slot, length=length, generation=generations[row])
        except TierIOError:
            return False  # there is another that may be read

    generations = found.pages.generation.tolist()
    rows = found.contested.tolist()
    with ThreadPoolExecutor(max(1, threads), "kvtier-recovery") as pool:
        results = list(pool.map(look, rows))
    return frozenset(
        generations[row] for row, whole in zip(rows, results, strict=True) if not whole
    )


def _classes(
    base: Snapshot, marks: Mapping[int, int], place: Place, *, but: Collection[int]
) -> dict[int, int]:
    return {
        slab: size
        for slab, size in sorted((base.classes | dict(marks)).items())
        if place.has_class(slab, size) and slab not in but
    }


def _last_generation(
    chosen: Chosen, base: Snapshot, happenings: Happenings, scans: Sequence[SlabScan]
) -> int:
    """The highest generation of which anything tells."""
    return max(
        chosen.last_generation,
        base.last_generation,
        int(happenings.drops.max(initial=0)),
        max((delete.bound for delete in happenings.deletes), default=0),
        max((int(scan.records["sequence"].max(initial=0)) for scan in scans), default=0),
    )


def _journal_counts(journals: Sequence[JournalContents], lengths: JournalLengths) -> dict[str, int]:
    return {
        "journals": len(journals),
        "entries": sum(not isinstance(e, Known) for journal in journals for e in journal.entries),
        "bad_frames": sum(journal.bad_frames for journal in journals),
        "torn_bytes": sum(journal.torn_bytes for journal in journals),
        "cut_bytes": sum(lengths.lost_bytes(j.number, j.good_bytes) for j in journals),
    }


def _cut(journals: Sequence[JournalContents], lengths: JournalLengths) -> tuple[str, ...]:
    """What is missing at the end of journals, and cannot be what a crash left: a crash loses only
    what nobody was told of."""
    said = []
    if lengths.problem:
        said.append(f"{LENGTHS}: {lengths.problem}: whether a journal was cut short is not known")
    for journal in journals:
        lost = lengths.lost_bytes(journal.number, journal.good_bytes)
        if lost:
            said.append(
                f"{journal.path.name} was cut short or damaged at its end: {lost} bytes of entries"
                " that were acknowledged are gone; what they deleted can be back"
            )
    return tuple(said)


def _scan_counts(scans: Sequence[SlabScan]) -> dict[str, int]:
    return {
        "segments_scanned": len(scans),
        "slots": sum(scan.slots for scan in scans),
        "damaged": sum(len(scan.damaged) for scan in scans),
        "misplaced": sum(len(scan.misplaced) for scan in scans),
    }


def _page_counts(found: Survivors) -> dict[str, int]:
    return {
        "listed": found.listed,
        "found": found.found,
        "unplaced": found.unplaced,
        "stale": found.stale,
        "dropped": found.dropped,
        "deleted": found.deleted,
        "ended": found.ended,
        "superseded": found.superseded,
        "torn": found.torn,
    }
