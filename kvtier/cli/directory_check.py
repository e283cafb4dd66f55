"""The work of `kvtier fsck`: every file of a daemon directory and its devices, read and compared.

What is live is what a start would bring back, by the same code; then every header of every segment
is held against that. Nothing is changed, but for the lock that keeps daemons away. One thread.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtier.core.namespaces import Family, Namespaces
from kvtier.daemon.state import FORMAT_VERSION, open_directory
from kvtier.errors import CorruptRecord, DirectoryError, InvalidConfigValue, TierIOError
from kvtier.packing.checksum import verify_payload
from kvtier.packing.record import HEADER_BYTES, decode_header
from kvtier.tiers.base import SLOT_BYTES
from kvtier.tiers.nvme_base import without_geometry
from kvtier.tiers.nvme_checkpoint import (
    CHECKPOINT,
    CHECKPOINT_OLD,
    CheckpointFile,
    CheckpointState,
    read_checkpoint,
)
from kvtier.tiers.nvme_geometry import Geometry, load_geometry, split_slab
from kvtier.tiers.nvme_journal import JournalContents, journal_paths, read_journal
from kvtier.tiers.nvme_lengths import JournalLengths, read_lengths
from kvtier.tiers.nvme_paths import with_paths
from kvtier.tiers.nvme_reader import DeviceLook, SegmentReader, look_at_device
from kvtier.tiers.nvme_recovery import Recovered, recover
from kvtier.tiers.nvme_scan import SlabScan, scan_slab
from kvtier.tiers.sealed_file import DISCARD, LOST_STATE, TEMPORARY_SUFFIX, read_sealed

__all__ = ["DeviceFindings", "DirectoryFindings", "NamespaceFindings", "check_directory"]

_SEALED = {"format": b"format", "generations": b"gens", "namespaces": b"names"}
#: So many problems of a device are named; the counts are of all.
_NAMED_MAX = 50
_ANY_NUMBER = 1 << 62


@dataclass(slots=True, kw_only=True)
class DeviceFindings:
    """Of one device. `pages` are live: their header is where it must be. `stale` are records of
    pages that are none any more. `corrupt` is of payloads, if they were read.
    """

    look: DeviceLook
    pages: int = 0
    payload_bytes: int = 0
    stale: int = 0
    bad_headers: int = 0
    corrupt: int = 0
    unreadable: int = 0  # segments and records
    problems: list[str] = field(default_factory=list)

    def name(self, problem: str) -> None:
        if len(self.problems) < _NAMED_MAX:
            self.problems.append(problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceFindings:
    fingerprint: bytes
    tenant: str
    model_id: str
    generation: int
    pages: int
    payload_bytes: int


@dataclass(slots=True, kw_only=True)
class DirectoryFindings:
    """Everything that was found. `damage` has a line a matter, `notes` what is worth knowing and
    right; without a tier there are neither devices nor checkpoints.
    """

    path: Path
    geometry: Geometry | None = None
    payloads: bool = False
    devices: list[DeviceFindings] = field(default_factory=list)
    namespaces: list[NamespaceFindings] = field(default_factory=list)
    checkpoints: list[CheckpointFile] = field(default_factory=list)
    journals: list[JournalContents] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)
    #: Of the damage, that with which no daemon starts that is configured to use these devices.
    refusals: list[str] = field(default_factory=list)


def check_directory(path: Path, *, payloads: bool) -> DirectoryFindings:
    """Checks the daemon directory `path`; with `payloads` also every byte of every live page.

    Raises InvalidConfigValue when it is none, DirectoryError when it is in use or cannot be read.
    """
    if not os.path.lexists(path / "format"):
        raise InvalidConfigValue(
            f"{path} is not a daemon directory: it has no file `format`",
            remedy="name the directory that daemon.directory of the daemon's configuration names",
        )
    findings = DirectoryFindings(path=path, payloads=payloads)
    version = read_sealed(path / "format", _SEALED["format"])
    if version != FORMAT_VERSION.to_bytes(4, "little") and load_geometry(path) is None:
        findings.notes.append("a directory of another version, without an NVMe tier")
        return findings
    for name, kind in _SEALED.items():
        read_sealed(path / name, kind)
    _note_leftovers(findings)
    with open_directory(path, read_only=True) as directory:
        findings.geometry = load_geometry(path)
        if findings.geometry is None:
            refusal = without_geometry(path)
            if refusal is None:
                findings.notes.append("there is no NVMe tier")
            else:
                findings.damage.append(str(refusal))
                findings.refusals.append(f"{refusal}; remedy: {refusal.remedy}")
            return findings
        namespaces = _namespaces(path, directory.load_namespaces())
        bound = directory.generation_bound
        _check_tier(findings, findings.geometry, namespaces, generation_bound=bound)
    return findings


def _namespaces(path: Path, state: dict[str, Any]) -> Namespaces:
    namespaces = Namespaces(namespaces_max=_ANY_NUMBER)
    try:
        if state:
            namespaces.load_state(state)
    except (KeyError, TypeError, ValueError) as error:
        raise DirectoryError(
            f"the namespaces in {path} make no sense: {error}",
            remedy=LOST_STATE,
        ) from error
    return namespaces


def _note_leftovers(findings: DirectoryFindings) -> None:
    for item in sorted(findings.path.glob(f"*{TEMPORARY_SUFFIX}")):
        if item.is_dir() and not item.is_symlink():
            words = f"{item} is a directory in the place of a file"
            findings.damage.append(words)
            findings.refusals.append(f"{words}; remedy: Remove it, and start again.")
        else:
            findings.notes.append(f"{item.name} is left of a write that never ended")


def _check_tier(
    findings: DirectoryFindings,
    geometry: Geometry,
    namespaces: Namespaces,
    *,
    generation_bound: int,
) -> None:
    families = namespaces.families()
    # As a start does: two directories whose names were swapped are the devices they were.
    geometry = with_paths(geometry, [path for _, path in geometry.devices])
    looks = [look_at_device(geometry, number, path) for number, path in geometry.devices]
    findings.devices = [DeviceFindings(look=look) for look in looks]
    reader = SegmentReader(geometry, looks)
    try:
        recovered = recover(
            findings.path,
            directory_id=geometry.directory_id,
            tier=reader,
            slabs=reader.slabs(),
            segment_bytes=geometry.segment_bytes,
            generations={f.identity.fingerprint: f.generation for f in families},
            generation_floor=namespaces.generation_floor,
            generation_bound=generation_bound,
            names=namespaces.last_number,
            noted={look.path: look.noted for look in looks if not look.problem},
            is_expected=lambda slab: _is_expected(looks, slab),
            present=[look.number for look in looks if not look.problem],
            threads=1,
        )
        device_of = {device.look.number: device for device in findings.devices}
        is_whole = np.zeros(len(recovered.pages), bool)
        for slab in reader.slabs():
            if slab in recovered.classes:
                device = device_of[split_slab(slab)[0]]
                check = _SlabCheck(reader, geometry, recovered, slab, device)
                is_whole[check.run(payloads=findings.payloads)] = True
        for slab in sorted(recovered.unread):
            number, local = split_slab(slab)
            device_of[number].unreadable += 1
            device_of[number].name(f"segment {local}: it cannot be read; a start tries again")
    finally:
        reader.close()
    _count_namespaces(findings, recovered, is_whole, families)
    _read_journals(findings, geometry)
    _sum_up(findings, recovered, read_lengths(findings.path, geometry.directory_id))


def _is_expected(looks: Sequence[DeviceLook], slab: int) -> bool:
    """Whether a segment is named by nothing else when it is not there."""
    number, local = split_slab(slab)
    return any(
        look.number == number and not look.problem and local not in look.rejected_segments
        for look in looks
    )


class _SlabCheck:
    """One slab: its headers against what a start would bring back."""

    def __init__(
        self,
        reader: SegmentReader,
        geometry: Geometry,
        recovered: Recovered,
        slab: int,
        device: DeviceFindings,
    ) -> None:
        self._reader = reader
        self._geometry = geometry
        self._pages = recovered.pages
        self._record_bytes = recovered.classes[slab]
        self._slab = slab
        self._device = device
        units = np.uint64(geometry.segment_bytes // SLOT_BYTES)
        self._rows = np.flatnonzero(recovered.pages.slot // units == np.uint64(slab))

    def run(self, *, payloads: bool) -> NDArray[np.int64]:
        """The pages of the slab that are whole, as far as was looked."""
        device, local = self._device, split_slab(self._slab)[1]
        try:
            scan = scan_slab(
                self._reader,
                self._slab,
                record_bytes=self._record_bytes,
                segment_bytes=self._geometry.segment_bytes,
            )
        except TierIOError as error:
            device.unreadable += 1
            device.name(f"segment {local}: {error}")
            return np.zeros(0, np.int64)
        is_there = self._is_there(scan)
        missing = self._pages.slot[self._rows[~is_there]]
        bad = np.union1d(np.union1d(scan.damaged, scan.misplaced), missing)
        for slot in bad.tolist():
            device.name(f"segment {local}: slot {slot} has a bad header")
        device.bad_headers += len(bad)
        rows = self._rows[is_there]
        device.stale += len(scan.records) - len(rows)
        if payloads:
            rows = rows[[self._has_its_payload(slot) for slot in self._pages.slot[rows].tolist()]]
        device.pages += len(rows)
        device.payload_bytes += int(self._pages.length[rows].sum())
        return rows

    def _is_there(self, scan: SlabScan) -> NDArray[np.bool_]:
        """For each page of the slab whether its slot has its header."""
        if not len(scan.records):
            return np.zeros(len(self._rows), bool)
        slots = scan.records["slot"]  # rising: a scan goes through the slab
        wanted = self._pages.slot[self._rows]
        found = scan.records[np.searchsorted(slots, wanted).clip(max=len(slots) - 1)]
        is_there: NDArray[np.bool_] = (
            (found["slot"] == wanted)
            & (found["sequence"] == self._pages.generation[self._rows])
            & (found["length"] == self._pages.length[self._rows])
            & (found["key"] == self._pages.key[self._rows]).all(axis=1)
        )
        return is_there

    def _has_its_payload(self, slot: int) -> bool:
        device = self._device
        try:
            header_block = bytearray(HEADER_BYTES)
            self._reader.read(slot, 0, header_block)
            header = decode_header(header_block)
            payload = bytearray(header.length)
            self._reader.read(slot, HEADER_BYTES, payload)
        except (CorruptRecord, TierIOError) as error:
            device.unreadable += 1
            device.name(f"slot {slot}: {error}")
            return False
        is_right = verify_payload(
            payload,
            header.payload_sum,
            key=header.key,
            fingerprint=header.fingerprint,
            namespace_generation=header.namespace_generation,
            shard=header.shard,
            codec=header.codec,
            length=header.length,
        )
        if not is_right:
            device.corrupt += 1
            device.name(f"slot {slot}: the payload fails its sum (key {header.key.hex()})")
        return is_right


def _count_namespaces(
    findings: DirectoryFindings,
    recovered: Recovered,
    is_whole: NDArray[np.bool_],
    families: Sequence[Family],
) -> None:
    identities = {family.identity.fingerprint: family.identity for family in families}
    for number, (fingerprint, generation) in enumerate(recovered.families):
        of_it = is_whole & (recovered.pages.family == number)
        identity = identities[fingerprint]  # a start leaves out what is not registered
        findings.namespaces.append(
            NamespaceFindings(
                fingerprint=fingerprint,
                tenant=identity.tenant,
                model_id=identity.model_id,
                generation=generation,
                pages=int(of_it.sum()),
                payload_bytes=int(recovered.pages.length[of_it].sum()),
            )
        )


def _read_journals(findings: DirectoryFindings, geometry: Geometry) -> None:
    for name in (CHECKPOINT, CHECKPOINT_OLD):
        path = findings.path / name
        try:
            found = read_checkpoint(path, geometry.directory_id)
        except DirectoryError as error:  # of the older one, which no start reads that has the newer
            words = f"{str(error).removeprefix(f'{path} ')}; remedy: {error.remedy}"
            found = CheckpointFile(path=path, state=CheckpointState.BAD, reason=words)
        findings.checkpoints.append(found)
    for path in journal_paths(findings.path).values():
        try:
            findings.journals.append(read_journal(path, geometry.directory_id))
        except DirectoryError as error:
            findings.damage.append(str(error))
            if isinstance(error.__cause__, OSError):  # a start syncs every one of them
                findings.refusals.append(f"{error}; remedy: {error.remedy}")


def _waiting(findings: DirectoryFindings, recovered: Recovered) -> list[str]:
    places = {device.look.number: device.look.path for device in findings.devices}
    return [
        f"about {pages} pages wait for device {device} ({places.get(device, 'of no known path')}):"
        " they come back with it"
        for device, pages in sorted(recovered.waits.items())
    ]


def _sum_up(findings: DirectoryFindings, recovered: Recovered, lengths: JournalLengths) -> None:
    """Everything that is wrong, a line each."""
    damage = findings.damage
    for file in findings.checkpoints:
        if file.state is CheckpointState.BAD:
            damage.append(f"{file.path.name}: {file.reason}")
    for journal in findings.journals:
        if journal.bad_frames:
            damage.append(f"{journal.path.name}: {journal.bad_frames} damaged frames")
        if journal.torn_bytes:
            words = f"{journal.path.name}: a torn tail of {journal.torn_bytes} bytes"
            # With a note of the length, `cut` below tells what was lost: this is an entry that
            # nobody was told of, as a crash leaves one.
            is_known = journal.number in lengths.of
            (findings.notes if is_known else damage).append(words)
    damage += [*recovered.report.cut, *recovered.report.gone]
    damage += recovered.report.forgotten
    findings.notes += _waiting(findings, recovered)
    if (refusal := recovered.refusal) is not None:
        damage.append(str(refusal))
        findings.refusals.append(f"{refusal}; remedy: {refusal.remedy}")
    if recovered.report.is_lost:
        damage.append(f"no page would come back: {recovered.report.why}")
    if recovered.report.unplaced:
        damage.append(f"{recovered.report.unplaced} pages lie in segments that are not there")
    own = Counter(device.look.own_number for device in findings.devices)
    for number, paths in own.items():
        if number is not None and paths > 1:
            words = f"{paths} paths are device {number}: one is a copy"
            findings.refusals.append(f"{words}; remedy: take it out of nvme.paths")
    if findings.devices and all(number is None for number in own):
        known = [device.look.remedy for device in findings.devices if device.look.remedy]
        remedy = f"check and mount them, give the daemon's user the right to them, or {DISCARD}"
        findings.refusals.append(f"no device can be used; remedy: {(known or [remedy])[0]}")
    newest, old = findings.checkpoints
    if newest.state is CheckpointState.MISSING and old.state is CheckpointState.GOOD:
        findings.notes.append("a checkpoint was being replaced; the one before it is used")
    for device in findings.devices:
        look = device.look
        damage += [look.problem] if look.problem else []
        if look.is_refused:
            findings.refusals.append(f"{look.problem}; remedy: {look.remedy}")
        damage += [f"{look.path}: {what}" for what in (*look.rejected, *device.problems)]
        unnamed = device.bad_headers + device.corrupt + device.unreadable - len(device.problems)
        if unnamed > 0:
            damage.append(f"{look.path}: {unnamed} more of the same kinds")
        for kind, names in (("foreign", look.foreign), ("left of a write", look.leftovers)):
            findings.notes += [f"{look.path}: {name} ({kind})" for name in names]
