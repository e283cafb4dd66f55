"""A store and what is journalled of it, without a daemon; files are in memory or real ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from kvtier.core.generations import Generations
from kvtier.core.handles import Filling, Reading
from kvtier.core.page import NO_SUM, Codec, PageMeta, PutCode, Tier
from kvtier.core.slabs import SlabAllocator
from kvtier.core.store import Store
from kvtier.core.store_config import StoreConfig
from kvtier.daemon.durability import Durability
from kvtier.errors import DirectoryError
from kvtier.tiers.nvme_journal import Delete, Entry
from kvtier.tiers.nvme_snapshot import Snapshot
from kvtier.tiers.nvme_state import padded
from tests.faults.kinds_rig import key_of, rows

NS = 1
NAME = (bytes(range(32)), 7)
DIRECTORY_ID = b"0123456789abcdef"
SEGMENT = 1 << 20
SMALL, LARGE = 8 << 10, 64 << 10


@dataclass
class MemoryJournal:
    """What others do while entries are being written, and while it is being closed, once each."""

    number: int
    entries: list[Entry] = field(default_factory=list)
    while_written: Callable[[], Awaitable[None]] | None = None
    while_closed: Callable[[], Awaitable[None]] | None = None
    size_bytes: int = 64
    failed: bool = False

    async def append(self, entries: Sequence[Entry], *, sync: bool) -> None:
        assert sync
        self.entries += entries
        self.size_bytes += 64 + sum(len(e.keys) for e in entries if isinstance(e, Delete))
        meanwhile, self.while_written = self.while_written, None
        await (meanwhile or _nothing)()

    async def close(self) -> None:
        meanwhile, self.while_closed = self.while_closed, None
        await (meanwhile or _nothing)()


async def _nothing() -> None:
    await asyncio.sleep(0)


class MemoryFiles:
    """StateFiles that keep everything."""

    def __init__(self) -> None:
        self.journals: list[MemoryJournal] = []
        self.snapshots: list[Snapshot] = []
        #: What others do while the first entries of a journal that is made now are written.
        self.while_written: Callable[[], Awaitable[None]] | None = None

    async def create_journal(self, number: int) -> MemoryJournal:
        self.journals.append(MemoryJournal(number, while_written=self.while_written))
        return self.journals[-1]

    async def write_checkpoint(self, snapshot: Snapshot, number: int) -> int:
        await asyncio.sleep(0)
        self.snapshots.append(snapshot)
        return 1

    async def remove_old(self) -> None:
        await asyncio.sleep(0)

    async def older_bytes(self) -> int:
        return sum(padded(journal.size_bytes, 4096) for journal in self.journals[:-1])

    async def amiss(self) -> DirectoryError | None:
        return None


def make_store(*, spent: int = 0) -> Store:
    """Two slabs in host memory, one on NVMe. Generations up to `spent` are of boots before."""
    tiers = {
        Tier.HOST: SlabAllocator(slab_bytes=SEGMENT, numbers=range(2)),
        Tier.NVME: SlabAllocator(slab_bytes=SEGMENT, numbers=range(1)),
    }
    store = Store(
        StoreConfig(boot_id=1, pages_max=256, seed=1),
        tiers=tiers,
        generations=Generations(spent, lambda bound: None),
    )
    store.open_namespace(NS, 1)
    for tier, slab in ((Tier.HOST, 0), (Tier.HOST, 1), (Tier.NVME, 0)):
        store.room.grant(tier, slab)
    return store


def make_durability(store: Store, files, *, journal_bytes_max: int = 1 << 20) -> Durability:
    return Durability(
        files,
        store,
        name_of=lambda number: NAME if number == NS else None,
        segment_bytes=SEGMENT,
        journal_bytes_max=journal_bytes_max,
    )


def begin_down(store: Store, name: object, record_bytes: int) -> tuple[Reading, Filling]:
    """A page in host memory, and its copy on NVMe, which is being made."""
    meta = PageMeta(
        key=key_of(name), length=record_bytes - 4096, codec=Codec.RAW, payload_sum=NO_SUM
    )
    filling = store.reserve(NS, 0, meta, record_bytes)
    assert isinstance(filling, Filling)
    assert filling.seal() is PutCode.STORED
    (source,) = store.acquire(NS, 0, rows([meta.key]))
    assert isinstance(source, Reading)
    target = store.reserve(NS, 0, meta, record_bytes, tier=Tier.NVME, source=source)
    assert isinstance(target, Filling)
    return source, target


def put_down(store: Store, name: object, record_bytes: int = SMALL) -> int:
    """A page that is on NVMe too; the generation of the copy there."""
    source, target = begin_down(store, name, record_bytes)
    assert target.seal() is PutCode.STORED
    source.release()
    return target.ref.generation
