"""A daemon without NVMe (not configured, or no device usable) over a directory that has pages on
it: they wait for the next boot with the tier, and what is deleted meanwhile must not come back.

A directory that is older than its own files stops this start too: it would journal deletes that
cover too little, and give numbers again. Deletes are kept as long as journals may be; then the
pages are given up, which needs no journal. Event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from kvtier.config import NvmeConfig
from kvtier.config.kinds import rounded_size_text
from kvtier.core.store import Store
from kvtier.daemon.directory_files import DirectoryFiles
from kvtier.daemon.durability import KEPT_JOURNALS, Durability
from kvtier.daemon.registry import Registry
from kvtier.daemon.state import DaemonDirectory
from kvtier.errors import DirectoryError
from kvtier.tiers.io_pool import IoClass, IoPool
from kvtier.tiers.nvme_base import files_left, without_geometry
from kvtier.tiers.nvme_directory import DeviceIdentity, read_identity
from kvtier.tiers.nvme_frames import Delete
from kvtier.tiers.nvme_geometry import GEOMETRY_FILE, Geometry, journal_bytes_max, load_geometry
from kvtier.tiers.nvme_lengths import read_lengths
from kvtier.tiers.nvme_noted import Noted
from kvtier.tiers.nvme_reader import SegmentReader
from kvtier.tiers.nvme_recovery import Recovered, recover

__all__ = ["KeptDeletes", "keep_deletes"]

log = logging.getLogger(__name__)

#: What a device may take to say what it knows.
_LOOK_S = 2.0
#: What an entry of the journal takes that says how far the registry is.
_KNOWN_BYTES = 128


class KeptDeletes(Durability):
    """Journals deletes, and gives the pages up when the journals, with all that is written into
    them over any number of boots, take more than `kept_bytes_max`."""

    def __init__(
        self,
        files: DirectoryFiles,
        store: Store,
        registry: Registry,
        *,
        segment_bytes: int,
        kept_bytes_max: int,
    ) -> None:
        super().__init__(
            files,
            store,
            name_of=registry.name_of,
            segment_bytes=segment_bytes,
            journal_bytes_max=kept_bytes_max,
        )
        self._own_files = files
        self._kept_bytes_max = kept_bytes_max
        self._giving_up = asyncio.Lock()
        self._is_over = False

    @property
    def problem(self) -> str:
        if self._is_over:
            size = rounded_size_text(self._kept_bytes_max)
            return (
                f"nvme: what was deleted without the tier filled {size} of journals: the pages on"
                " NVMe were given up, and are misses when the tier is back"
            )
        return super().problem

    async def begin(self, number: int, *, has_base: bool, can_checkpoint: bool = True) -> None:
        await super().begin(number, has_base=has_base, can_checkpoint=can_checkpoint)
        await self._make_room(0)  # each boot leaves a journal

    async def journal(self, deletes: Sequence[Delete | None]) -> None:
        await self._make_room(sum(len(delete.keys) for delete in deletes if delete is not None))
        if not self._is_over:
            await super().journal(deletes)

    async def know(self, names: int) -> None:
        with suppress(DirectoryError):  # the next one tries again; nothing is written before that
            await self._make_room(_KNOWN_BYTES)
            await super().know(names)

    async def _make_room(self, nbytes: int) -> None:
        """Gives the pages up where so much more is too much. Raises DirectoryError."""
        if self._is_too_much(nbytes):
            async with self._giving_up:
                if self._is_too_much(nbytes):
                    await self._give_up()

    def _is_too_much(self, nbytes: int) -> bool:
        kept_bytes = self.journal_bytes + self._older_bytes
        return not self._is_over and nbytes + kept_bytes > self._kept_bytes_max

    async def _give_up(self) -> None:
        """Without checkpoints no page comes back, deleted or not; only then journals can go."""
        log.error("nvme.pages_given_up", extra={"journals_bytes_max": self._kept_bytes_max})
        await self._own_files.remove_checkpoints()
        self._is_over = True
        await self.close()  # with what others had begun to write
        await self._own_files.remove_journals()


async def keep_deletes(
    owned: DaemonDirectory, store: Store, registry: Registry, config: NvmeConfig
) -> Durability | None:
    """What deletes have to be told to; None when nothing is on NVMe. Raises DirectoryError."""
    directory = owned.path
    geometry = load_geometry(directory)
    if geometry is None and (refusal := without_geometry(directory)) is not None:
        raise refusal
    if geometry is None or not files_left(directory):
        return None
    noted = await _noted(geometry)
    recovered = await asyncio.to_thread(_recovered, directory, geometry, noted, store, registry)
    if recovered.refusal is not None:
        raise recovered.refusal
    owned.mind(*GEOMETRY_FILE)
    durability = KeptDeletes(
        DirectoryFiles(
            directory,
            geometry.directory_id,
            keep=owned.keep,
            names=lambda: registry.last_number,
        ),
        store,
        registry,
        segment_bytes=geometry.segment_bytes,
        kept_bytes_max=(KEPT_JOURNALS + 1) * journal_bytes_max(config.bytes),
    )
    # One that is gone must stay a gap, by which the next boot with the tier notices it.
    newest = read_lengths(directory, geometry.directory_id).newest
    number = max(recovered.next_number, newest + 1)
    await durability.begin(number, has_base=True, can_checkpoint=False)
    return durability


async def _noted(geometry: Geometry) -> dict[Path, Noted]:
    """What those of the devices know that can be read, of which none is used in this boot."""
    devices = list(geometry.devices)
    looks = await asyncio.gather(*(_identity(number, path) for number, path in devices))
    return {
        path: identity.noted
        for (_, path), identity in zip(devices, looks, strict=True)
        if identity is not None and identity.directory_id == geometry.directory_id
    }


async def _identity(number: int, path: Path) -> DeviceIdentity | None:
    """None where it cannot be read: a boot without the device is for this too."""
    pool = IoPool(threads=1, name=f"kvtier-look{number}", queue_max=1)
    try:
        return await pool.submit(IoClass.GET, partial(read_identity, path)).wait(_LOOK_S)
    except (DirectoryError, OSError, TimeoutError):
        return None
    finally:
        pool.close(0)


def _recovered(
    directory: Path,
    geometry: Geometry,
    noted: Mapping[Path, Noted],
    store: Store,
    registry: Registry,
) -> Recovered:
    """What the files of the directory say while no device is there. A thread."""
    return recover(
        directory,
        directory_id=geometry.directory_id,
        tier=SegmentReader(geometry, ()),
        slabs=(),
        segment_bytes=geometry.segment_bytes,
        generations={f.identity.fingerprint: f.generation for f in registry.families()},
        generation_floor=registry.generation_floor,
        generation_bound=store.snapshots.last_generation,
        names=registry.last_number,
        noted=noted,
        present=(),
    )
