"""The namespaces of the daemon: core's registry, kept durable and in step with the store.

Order of a change: registry in memory, then on disk, then the store, then the answer. A change that
cannot be made durable is taken back and raises DirectoryError. Changes come one at a time, and each
is made whole even when its caller goes away meanwhile. Event loop's thread; the disk's work is done
on another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from kvtier.core.namespaces import Family, FamilyIdentity, Namespaces, ShardIdentity
from kvtier.core.store import Store
from kvtier.daemon.state import DaemonDirectory
from kvtier.errors import DirectoryError
from kvtier.packing.layout import Layout
from kvtier.tiers.crash_points import crash_point
from kvtier.tiers.sealed_file import LOST_STATE
from kvtier.transfer.mover import Subject
from kvtier.transfer.place import Identity

__all__ = ["Registry"]

T = TypeVar("T")


class Registry:
    def __init__(self, directory: DaemonDirectory, store: Store, *, namespaces_max: int) -> None:
        self._directory = directory
        self._store = store
        self._namespaces_max = namespaces_max
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Task[Any]] = set()
        #: Every number of this boot, ended ones too: events name them.
        self._fingerprints: dict[int, bytes] = {}
        self._layouts: dict[tuple[int, int], Layout] = {}
        #: Numbers whose end is being made durable: until it is, they count.
        self._ending: dict[int, tuple[bytes, int]] = {}
        state = directory.load_namespaces()
        self._namespaces = self._loaded(state) if state else self._empty()
        #: Given last to a namespace, and durable: see Namespaces.
        self.last_number = self._namespaces.last_number
        #: Is told that number when something has ended: a file of before must not pass for newest.
        self.on_ended: Callable[[int], Awaitable[None]] | None = None
        for family in self._namespaces.families():
            self._register(family)

    def __len__(self) -> int:
        return len(self._namespaces)

    def families(self) -> list[Family]:
        return self._namespaces.families()

    @property
    def generation_floor(self) -> int:
        """See Namespaces."""
        return self._namespaces.generation_floor

    def family_of(self, number: int) -> Family | None:
        """The family whose present number this is; None once it was bumped or deleted."""
        return self._namespaces.current(number)

    def name_of(self, number: int) -> tuple[bytes, int] | None:
        """(fingerprint, generation) behind a present number; None once it was bumped or deleted.

        Any thread.
        """
        # One look: the event loop may take it out between two.
        if (ending := self._ending.get(number)) is not None:
            return ending
        family = self._namespaces.current(number)
        return None if family is None else (family.identity.fingerprint, family.generation)

    def identity_of(self, number: int, shard: int) -> Identity | None:
        """What the records of a shard say; None once the number was bumped or deleted."""
        name = self.name_of(number)
        return (
            None if name is None else Identity(fingerprint=name[0], generation=name[1], shard=shard)
        )

    def subject_of(self, number: int, shard: int, key: bytes) -> Subject | None:
        """A page as the mover has to know it; None once the number was bumped or deleted."""
        identity = self.identity_of(number, shard)
        if identity is None:
            return None
        layout = self._layouts.get((number, shard))
        return Subject(namespace=number, key=key, identity=identity, layout=layout)

    def remember_layout(self, number: int, layout: Layout) -> None:
        """Somebody has opened this shard: its pages can be packed from now on."""
        self._layouts[number, layout.shard.index] = layout

    def fingerprint_of(self, number: int) -> bytes:
        """The family that has, or had in this boot, this namespace number; b"" for none."""
        return self._fingerprints.get(number, b"")

    def past_numbers(self) -> set[int]:
        """The numbers that were bumped or deleted in this boot."""
        return {number for number in self._fingerprints if self.name_of(number) is None}

    async def open(self, identity: FamilyIdentity, shard: ShardIdentity) -> tuple[Family, bool]:
        """(family, whether it is new). Raises NamespaceMismatch, LimitExceeded, DirectoryError."""
        return await self._whole(self._open(identity, shard))

    async def bump(
        self, fingerprint: bytes, *, expected: int, weights_revision: str, token: bytes
    ) -> tuple[int, bool]:
        """(the generation that this token gave, whether it was given now).

        Raises UnknownNamespace, GenerationConflict, DirectoryError.
        """
        return await self._whole(
            self._bump(fingerprint, expected, weights_revision=weights_revision, token=token)
        )

    async def delete(self, fingerprint: bytes) -> int:
        """Forgets a namespace; how many pages it had. Raises UnknownNamespace, DirectoryError."""
        return await self._whole(self._delete(fingerprint))

    async def settle(self) -> None:
        """Returns when no change is being made."""
        if self._changes:
            await asyncio.wait(self._changes)

    async def _whole(self, change: Coroutine[Any, Any, T]) -> T:
        # A caller that is cancelled half-way must not leave memory, disk and store apart.
        task = asyncio.ensure_future(change)
        self._changes.add(task)
        task.add_done_callback(self._changed)
        return await asyncio.shield(task)

    def _changed(self, task: asyncio.Task[Any]) -> None:
        self._changes.discard(task)
        if not task.cancelled():
            task.exception()  # the caller that would have heard of it may be gone

    async def _open(self, identity: FamilyIdentity, shard: ShardIdentity) -> tuple[Family, bool]:
        async with self._changing:
            is_new = self._namespaces.is_new(identity.fingerprint)
            before = self._namespaces.to_state()
            known = set() if is_new else set(self._namespaces.get(identity.fingerprint).shards)
            family = self._namespaces.open(identity, shard)
            if is_new or shard.index not in known:
                await self._save(before)
            if is_new:
                self._register(family)
            return family, is_new

    async def _bump(
        self, fingerprint: bytes, expected: int, *, weights_revision: str, token: bytes
    ) -> tuple[int, bool]:
        async with self._changing:
            before = self._namespaces.to_state()
            with self._counting_until_saved(fingerprint):
                family, ended = self._namespaces.bump(
                    fingerprint, expected=expected, weights_revision=weights_revision, token=token
                )
                if ended is None:
                    return family.tokens[token], False
                await self._save(before)
            self._end(ended)
            self._register(family)
            await self._tell_ended()
            return family.generation, True

    async def _delete(self, fingerprint: bytes) -> int:
        async with self._changing:
            before = self._namespaces.to_state()
            with self._counting_until_saved(fingerprint):
                number = self._namespaces.delete(fingerprint)
                await self._save(before)
            pages = self._store.survey.pages_by_namespace().get(number, 0)
            self._end(number)
            await self._tell_ended()
            return pages

    async def _tell_ended(self) -> None:
        if self.on_ended is not None:
            await self.on_ended(self.last_number)

    @contextmanager
    def _counting_until_saved(self, fingerprint: bytes) -> Iterator[None]:
        """What is journalled or checkpointed meanwhile is of the namespace as it was: the change
        can still be taken back."""
        family = self._namespaces.get(fingerprint)
        number = family.number
        self._ending[number] = fingerprint, family.generation
        try:
            yield
        finally:
            del self._ending[number]

    async def _save(self, before: dict[str, Any]) -> None:
        state = self._namespaces.to_state()
        try:
            await asyncio.to_thread(self._directory.save_namespaces, state)
            crash_point("bump.saved")
        except DirectoryError:
            self._namespaces = self._loaded(before)
            raise
        self.last_number = self._namespaces.last_number

    def _register(self, family: Family) -> None:
        self._fingerprints[family.number] = family.identity.fingerprint
        self._store.open_namespace(
            family.number, family.identity.shard_count, generation=family.generation
        )

    def _end(self, number: int) -> None:
        self._store.end_namespace(number)
        for name in [name for name in self._layouts if name[0] == number]:
            del self._layouts[name]

    def _empty(self) -> Namespaces:
        return Namespaces(namespaces_max=self._namespaces_max)

    def _loaded(self, state: dict[str, Any]) -> Namespaces:
        namespaces = self._empty()
        try:
            namespaces.load_state(state)
        except (KeyError, TypeError, ValueError) as error:
            raise DirectoryError(
                f"the namespaces in {self._directory.path} make no sense: {error}",
                remedy=LOST_STATE,
            ) from error
        return namespaces
