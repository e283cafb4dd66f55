"""A daemon without NVMe (not configured, or no device usable) over a directory that has pages on
it: they wait for the next boot with the tier, and what is deleted meanwhile must not come back.
"""

from __future__ import annotations

from kvtier.core.store import Store
from kvtier.daemon.durability import DirectoryFiles, Durability
from kvtier.daemon.registry import Registry
from kvtier.daemon.state import DaemonDirectory
from kvtier.tiers.nvme_checkpoint import CHECKPOINT, CHECKPOINT_OLD
from kvtier.tiers.nvme_geometry import GEOMETRY_FILE, load_geometry
from kvtier.tiers.nvme_journal import journal_paths
from kvtier.tiers.nvme_lengths import read_lengths

__all__ = ["keep_deletes"]


async def keep_deletes(
    owned: DaemonDirectory, store: Store, registry: Registry
) -> Durability | None:
    """What deletes have to be told to; None when nothing is on NVMe. Raises DirectoryError."""
    directory = owned.path
    geometry = load_geometry(directory)
    journals = journal_paths(directory)
    has_checkpoint = any((directory / name).exists() for name in (CHECKPOINT, CHECKPOINT_OLD))
    if geometry is None or not journals or not has_checkpoint:
        return None
    owned.mind(*GEOMETRY_FILE)
    durability = Durability(
        DirectoryFiles(directory, geometry.directory_id, keep=owned.keep),
        store,
        name_of=registry.name_of,
        segment_bytes=geometry.segment_bytes,
        journal_bytes_max=0,
    )
    # One that is gone must stay a gap, by which the next boot with the tier notices it.
    newest = max(*journals, read_lengths(directory, geometry.directory_id).newest)
    await durability.begin(newest + 1, has_base=True, can_checkpoint=False)
    return durability
