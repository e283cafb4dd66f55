"""The registry of namespaces: memory, disk and store change together, or not at all."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from pathlib import Path

import numpy as np
import pytest

from kvtier.core.generations import Generations
from kvtier.core.namespaces import FamilyIdentity, ShardIdentity
from kvtier.core.page import GetCode, Tier
from kvtier.core.slabs import SlabAllocator
from kvtier.core.store import Store
from kvtier.core.store_config import StoreConfig
from kvtier.daemon.registry import Registry
from kvtier.daemon.state import open_directory
from kvtier.errors import DirectoryError, GenerationConflict, UnknownNamespace
from kvtier.tiers.sealed_file import write_sealed

SHARD = ShardIdentity(index=0, layers=(0, 1), heads=(0, 1))
KEYS = np.zeros((1, 32), np.uint8)


def identity(name: str = "a") -> FamilyIdentity:
    return FamilyIdentity(
        fingerprint=hashlib.sha256(name.encode()).digest(),
        tenant="t",
        model_id="m",
        weights_revision="1",
        shard_count=1,
    )


class FaultyDirectory:
    """Passes on to a directory; saving can be made to fail, or to wait."""

    def __init__(self, directory) -> None:
        self._directory = directory
        self.path = directory.path
        self.fails = False
        self.go = threading.Event()
        self.go.set()
        self.saving = threading.Event()

    def load_namespaces(self):
        return self._directory.load_namespaces()

    def save_namespaces(self, state) -> None:
        self.saving.set()
        assert self.go.wait(10)
        if self.fails:
            raise DirectoryError("the disk is full", remedy="make room")
        self._directory.save_namespaces(state)


@pytest.fixture
def directory(tmp_path: Path):
    with open_directory(tmp_path / "state") as found:
        yield FaultyDirectory(found)


def new_store() -> Store:
    return Store(
        StoreConfig(boot_id=1, pages_max=16, seed=1),
        tiers={Tier.HOST: SlabAllocator(slab_bytes=1 << 20, numbers=range(1))},
        generations=Generations(0, lambda bound: None),
    )


def is_stale(store: Store, number: int) -> bool:
    return int(store.lookup(number, 0, KEYS)[0][0]) == GetCode.STALE


async def bump(registry: Registry, name: str = "a", expected: int = 1, token: bytes = b"t"):
    return await registry.bump(
        identity(name).fingerprint, expected=expected, weights_revision="", token=token
    )


def test_what_was_answered_is_there_after_a_restart(directory):
    async def first() -> None:
        registry = Registry(directory, new_store(), namespaces_max=9)
        family, is_new = await registry.open(identity(), SHARD)
        assert (is_new, family.generation) == (True, 1)
        assert await registry.open(identity(), SHARD) == (family, False)
        assert await bump(registry) == (2, True)
        assert await bump(registry) == (2, False), "the same token again"
        await registry.open(identity("b"), SHARD)
        assert await registry.delete(identity("b").fingerprint) == 0

    asyncio.run(first())
    store = new_store()
    registry = Registry(directory, store, namespaces_max=9)
    assert [f.generation for f in registry.families()] == [2]
    family = registry.families()[0]
    assert not is_stale(store, family.number)
    assert registry.fingerprint_of(family.number) == identity().fingerprint
    assert asyncio.run(bump(registry)) == (2, False), "the token is durable"
    with pytest.raises(GenerationConflict):
        asyncio.run(bump(registry, token=b"other"))


def test_a_change_that_cannot_be_saved_is_taken_back(directory):
    store = new_store()

    async def scenario() -> None:
        registry = Registry(directory, store, namespaces_max=9)
        family, _ = await registry.open(identity(), SHARD)
        number = family.number
        directory.fails = True
        with pytest.raises(DirectoryError):
            await registry.open(identity("b"), SHARD)
        with pytest.raises(DirectoryError):
            await bump(registry)
        with pytest.raises(DirectoryError):
            await registry.delete(identity().fingerprint)
        assert [f.generation for f in registry.families()] == [1]
        assert not is_stale(store, number)
        directory.fails = False
        assert await bump(registry) == (2, True)
        assert is_stale(store, number)
        _, is_new = await registry.open(identity("b"), SHARD)
        assert is_new

    asyncio.run(scenario())


def test_a_caller_that_goes_away_leaves_nothing_half_done(directory):
    """Cancelled while the disk writes: the bump is made whole all the same."""
    store = new_store()

    async def scenario() -> None:
        registry = Registry(directory, store, namespaces_max=9)
        family, _ = await registry.open(identity(), SHARD)
        number = family.number
        directory.go.clear()
        directory.saving.clear()
        caller = asyncio.create_task(bump(registry))
        await asyncio.to_thread(directory.saving.wait, 10)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert not is_stale(store, number), "not before it is durable"
        directory.go.set()
        await registry.settle()
        assert is_stale(store, number)
        assert [f.generation for f in registry.families()] == [2]

    asyncio.run(scenario())
    assert Registry(directory, new_store(), namespaces_max=9).families()[0].generation == 2


def test_changes_come_one_at_a_time(directory):
    async def scenario() -> None:
        registry = Registry(directory, new_store(), namespaces_max=9)
        await registry.open(identity(), SHARD)
        tokens = [bytes([i]) for i in range(8)]
        found = await asyncio.gather(
            *(bump(registry, token=token) for token in tokens), return_exceptions=True
        )
        won = [item for item in found if not isinstance(item, GenerationConflict)]
        assert won == [(2, True)]

    asyncio.run(scenario())


def test_unknown_namespaces(directory):
    registry = Registry(directory, new_store(), namespaces_max=9)
    with pytest.raises(UnknownNamespace):
        asyncio.run(bump(registry))
    with pytest.raises(UnknownNamespace):
        asyncio.run(registry.delete(bytes(32)))
    assert registry.fingerprint_of(77) == b""


def test_a_registry_that_makes_no_sense_is_loud(tmp_path):
    path = tmp_path / "state"
    with open_directory(path) as directory:
        directory.save_namespaces({"families": 3, "last_number": 1, "generation_floor": 0})
        with pytest.raises(DirectoryError, match="make no sense"):
            Registry(directory, new_store(), namespaces_max=9)
    write_sealed(path / "namespaces", b"names", b"\xc1")
    with pytest.raises(DirectoryError, match="cannot be read"):
        open_directory(path)


def test_a_name_may_be_asked_for_by_another_thread(directory) -> None:
    """While a change is being saved; the change may end between any two steps."""
    registry = Registry(directory, new_store(), namespaces_max=9)
    family, _ = asyncio.run(registry.open(identity(), SHARD))

    class Vanishing(dict):
        """What is found there is gone at the next look."""

        def __contains__(self, key: object) -> bool:
            return self.pop(key, None) is not None

    registry._ending = Vanishing({family.number: (b"ending", 3)})
    assert registry.name_of(family.number) == (b"ending", 3)
