"""Real files of a Durability, and what a recovery makes of them."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
from durability_rig import (
    DIRECTORY_ID,
    NAME,
    NS,
    SEGMENT,
    make_durability,
    make_store,
)

from kvtier.core.page import Tier
from kvtier.core.store import Store
from kvtier.daemon.durability import DirectoryFiles, Durability
from kvtier.testing.memory_tier import MemoryTier
from kvtier.tiers.nvme_frames import JOURNAL_HEAD_BYTES
from kvtier.tiers.nvme_journal import journal_paths
from kvtier.tiers.nvme_recovery import Recovered, recover
from tests.faults.kinds_rig import key_of, rows

#: The one device of `make_store`, and one that nothing is known of.
HERE, ELSEWHERE = 0, 3
JOURNAL_BYTES = 64 << 10


def recovered_from(directory: Path, *, present: list[int] | None = None) -> Recovered:
    return recover(
        directory,
        directory_id=DIRECTORY_ID,
        tier=MemoryTier(16 * SEGMENT),
        slabs=[0] if present is None or HERE in present else [],
        segment_bytes=SEGMENT,
        generations=dict([NAME]),
        generation_floor=0,
        present=present,
        threads=1,
    )


def names_in(recovered: Recovered, names: list[str]) -> list[str]:
    """Those of these pages that are back."""
    there = {bytes(key) for key in recovered.pages.key[: len(recovered.pages)]}
    return [name for name in names if key_of(name) in there]


def on(directory: Path, store: Store | None = None, **kinds: int) -> Durability:
    kinds.setdefault("journal_bytes_max", JOURNAL_BYTES)
    return make_durability(store or make_store(), DirectoryFiles(directory, DIRECTORY_ID), **kinds)


async def begun(directory: Path, **kinds: int) -> tuple[Store, Durability]:
    """Of a new store, in a directory without anything."""
    store = make_store()
    durability = on(directory, store, **kinds)
    await durability.begin(1, has_base=False)
    return store, durability


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(20):
            await work()

    asyncio.run(within())


def damage(path: Path) -> None:
    """In the first frame of a journal, in the table of a checkpoint."""
    content = bytearray(path.read_bytes())
    content[JOURNAL_HEAD_BYTES + 40] ^= 1
    path.write_bytes(content)


@contextmanager
def refused(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, *, times: int = 100
) -> Iterator[None]:
    """So many of these calls find no room."""
    original, calls = getattr(module, name), iter(range(times))

    async def refuse(*arguments: object) -> None:
        if next(calls, None) is not None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        await original(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(module, name, refuse)
        yield


async def delete(store: Store, durability: Durability, names: list[str], others: int = 0) -> None:
    """These pages, in one call with so many that are not there."""
    keys = rows([key_of(name) for name in [*names, *range(others)]])
    store.delete(NS, 0, keys)
    await durability.journal([durability.doom(NS, 0, keys)])


def lose(store: Store, durability: Durability) -> None:
    """The device goes, with its pages."""
    lost = store.room.close(Tier.NVME, [0])
    durability.wait_for({HERE: len(lost)})
    while store.room.clear(lost, 100):
        pass


def journals_bytes(directory: Path) -> int:
    return sum(-(-p.stat().st_size // 4096) * 4096 for p in journal_paths(directory).values())
