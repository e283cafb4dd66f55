"""What the clients of a simulated daemon do: each is a script that stops between any two steps a
real one could stop between, and can be cancelled at any of them.

They call what the services call, in the services' order, and hold every answer against the oracle.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.core.page import Codec, DeleteCode, GetCode, PageMeta, PutCode, Tier
from kvtier.errors import Busy, ChunkError, DirectoryError, KvtierError, TierIOError
from kvtier.packing.checksum import payload_sum
from kvtier.testing.cells import make_page
from kvtier.transfer.intake import Intake
from kvtier.transfer.mover import Mover
from kvtier.transfer.outlet import Outgoing, Outlet
from kvtier.transfer.place import Place, Verify
from tests.sim.boot import Boot
from tests.sim.local_puts import LocalPuts
from tests.sim.oracle import Space, Window

__all__ = ["Clients", "Script"]

Keys = npt.NDArray[np.uint8]
Script = Callable[[Space], Coroutine[Any, Any, None]]


@dataclass(slots=True)
class _Put:
    """Pages on their way in. `broken` are those damaged on the wire."""

    keys: list[bytes]
    metas: list[PageMeta]
    run: bytearray
    version: int
    broken: set[int]
    counted: int = 0


class Clients:
    """The scripts of one boot. `note` takes every code that a client sees; `background` starts
    what goes on when the client is gone; `bump` ends a family."""

    def __init__(
        self,
        boot: Boot,
        *,
        note: Callable[..., None],
        new_version: Callable[[], int],
        bump: Callable[[Space], object],
    ) -> None:
        self.boot = boot
        self._store = boot.store
        self._oracle = boot.oracle
        self._rng = boot.rng
        self._note = note
        self._new_version = new_version
        self._bump = bump
        self.now = 0.0
        self._local = LocalPuts(boot, note=note, now=lambda: self.now)

    def choose(self) -> Script:
        rng = self._rng
        if self.boot.machine.setting.is_crowd and rng.random() < 0.8:
            return rng.choice((self.put, self.put, *3 * (self.demote,), self.delete))
        nvme: tuple[Script, ...] = ()
        if self.boot.nvme is not None:
            nvme = (self.demote, self.prefetch, self.get, self.get, self.scrub)
        puts: tuple[Script, ...] = (self.put, self.put, self.put_local)
        return rng.choice((*puts, self.get, self.get, self.get, self.change, *nvme))

    # -- puts ------------------------------------------------------------------------------------

    async def put(self, space: Space) -> None:
        put = self._new_put(space)
        intake = Intake(
            self._store,
            self.boot.arena,
            space.place,
            pages_max=64,
            bytes_max=1 << 20,
            verify=Verify.ALWAYS,
        )
        try:
            if await self._feed(space, intake, put):
                intake.finish()
                await self._make_durable(space, intake)
        finally:
            intake.close()

    async def put_local(self, space: Space) -> None:
        put = self._new_put(space)
        if not put.broken:  # nothing is on a wire
            await self._local.put(space, put)

    async def _feed(self, space: Space, intake: Intake, put: _Put) -> bool:
        """False: the stream broke a rule."""
        rng, run, at = self._rng, put.run, 0
        while put.metas or at < len(run):
            announced = intake._announced_bytes
            if put.metas and (at >= announced or rng.random() < 0.5):
                n = rng.randint(1, len(put.metas))
                intake.announce(put.metas[:n])
                del put.metas[:n]
                announced = intake._announced_bytes
            n = min(rng.randint(1, max(1, announced - at, space.size)), announced - at)
            if rng.random() < 0.02:
                with_gap = at + rng.choice((-1, 1, 4096))
                try:
                    intake.feed(with_gap, memoryview(run)[at : at + n])
                except ChunkError:
                    return False
                raise self._oracle.wrong("a chunk at a wrong offset was taken")
            intake.feed(at, memoryview(run)[at : at + n])
            at += n
            self._account(space, intake.codes, put)
            await self.boot.scheduler.pause()
        return True

    def _account(self, space: Space, codes: list[PutCode], put: _Put) -> None:
        for i in range(put.counted, len(codes)):
            self._note(codes[i])
            if codes[i] is PutCode.STORED:
                if i in put.broken:
                    raise self._oracle.wrong("a page damaged on the wire was stored")
                self._oracle.stored(space, put.keys[i], put.version)
        put.counted = len(codes)

    async def _make_durable(self, space: Space, intake: Intake) -> None:
        nvme = self.boot.nvme
        stored = zip(intake.keys, intake.codes, strict=True)
        keys = [key for key, code in stored if code.is_stored]
        if nvme is None or not keys:
            return
        scope = space.place.namespace, space.place.shard
        if self._rng.random() < 0.4:
            nvme.tiering.stored(scope, keys)
            return
        is_durable = await nvme.tiering.make_durable(scope, _array(keys))
        self._note(*is_durable.tolist())
        for key, durable in zip(keys, is_durable.tolist(), strict=True):
            if durable:
                self._oracle.durable(space, key)

    def _new_put(self, space: Space) -> _Put:
        keys, version = self._keys(space), self._new_version()
        metas, run = [], bytearray()
        for i, key in enumerate(keys):
            page = make_page(space.size, namespace=space.title, key=key, version=version)
            metas.append(_meta(space.place, key, page, keys[i - 1] if i else b""))
            run += page
        broken = set()
        if self._rng.random() < 0.1:
            at = self._rng.randrange(len(run))
            run[at] ^= 1 << self._rng.randrange(8)
            broken = {at // space.size}
        return _Put(keys, metas, run, version, broken)

    # -- gets ------------------------------------------------------------------------------------

    async def get(self, space: Space) -> None:
        keys = self._keys(space)
        array, place = _array(keys), space.place
        outlet = Outlet(
            self._store,
            self.boot.arena,
            place,
            array,
            accept=frozenset({Codec.RAW}),
            lossy_ok=False,
            verify=Verify.ALWAYS,
            sample_one_in=1,
            mover=self.boot.nvme.mover if self.boot.nvme else None,
        )
        windows = dict(outlet._windows())
        try:
            pages = aiter(outlet)
            for i, key in enumerate(keys):
                if i in windows:  # its leases are taken with its first page, that is, now
                    part = slice(i, windows[i])
                    found, _ = self._store.lookup(place.namespace, place.shard, array[part])
                    was_there = (found == GetCode.HIT).tolist()
                    window = self._oracle.window(space, keys[part], was_there)
                page = await anext(pages)
                self._note(page.code)
                if page.code is GetCode.HIT:
                    await self._receive(space, key, page, window)
                else:
                    self._oracle.judge_miss(space, key, page.code, window)
                await self.boot.scheduler.pause()
        finally:
            await outlet.close()

    async def _receive(self, space: Space, key: bytes, page: Outgoing, window: Window) -> None:
        """Copies the page piece by piece, and checks the copy, as a client does."""
        assert page.header is not None
        assert page.payload is not None
        assert page.tier is not None
        copy = bytearray()
        while len(copy) < page.header.length:
            n = self._rng.randint(1, page.header.length)
            copy += page.payload[len(copy) : len(copy) + n]
            await self.boot.scheduler.pause()
        if space.place.payload_ok(memoryview(copy), page.header):
            self._oracle.judge_hit(space, key, copy, window, page.tier)
        else:
            self._oracle.judge_damage(space, key, window)

    # -- what changes pages or where they are ----------------------------------------------------

    async def change(self, space: Space) -> None:
        """Pins, deletes, bumps."""
        match self._rng.randint(0, 11):
            case 0 | 1 | 2 | 3 | 4 | 5 | 6:
                await self.pin(space)
            case 7 | 8 | 9 | 10:
                await self.delete(space)
            case _:
                self._bump(space)

    async def pin(self, space: Space) -> None:
        rng, pins = self._rng, self._store.pins
        session = rng.randint(1, 3)
        lease, codes = pins.pin(
            session,
            space.place.namespace,
            space.place.shard,
            _array(self._keys(space)),
            deadline=self.now + rng.random() * 8,
        )
        self._note(*codes.tolist())
        for _ in range(rng.randint(0, 6)):
            await self.boot.scheduler.pause()
        if rng.random() < 0.5:
            pins.unpin(session, [lease], now=self.now)
        else:
            pins.end_session(session)

    async def delete(self, space: Space) -> None:
        """In slices, tail first, and answered when it is journalled."""
        keys, place = self._keys(space), space.place
        if self._rng.random() < 0.5:
            space, keys = self._on_their_way(space, keys)
            place = space.place
        nvme, entries = self.boot.nvme, []
        doomed: dict[bytes, set[int]] = {}
        slice_keys = self._rng.choice((2, 8))
        for end in range(len(keys), 0, -slice_keys):
            part = keys[max(0, end - slice_keys) : end]
            codes = self._store.delete(place.namespace, place.shard, _array(part))
            if nvme is not None:
                entries.append(nvme.durability.doom(place.namespace, place.shard, _array(part)))
            self._note(*codes.tolist())
            if DeleteCode.STALE not in codes:
                doomed |= self._oracle.deleting(space, part)
            # The loop breathes here: with many slices for long enough that anything can happen.
            await self.boot.scheduler.pause()
        if nvme is not None:
            try:
                await nvme.durability.journal(entries)
            except DirectoryError:
                return  # nobody was told that they are gone
        self._oracle.deleted(space, doomed)

    async def demote(self, space: Space) -> None:
        assert self.boot.nvme is not None
        scope = space.place.namespace, space.place.shard
        self._note(*self.boot.nvme.tiering.demote(scope, _array(self._keys(space))).tolist())

    async def prefetch(self, space: Space) -> None:
        assert self.boot.nvme is not None
        scope = space.place.namespace, space.place.shard
        self._note(*self.boot.nvme.tiering.prefetch(scope, _array(self._keys(space))).tolist())

    async def scrub(self, space: Space) -> None:
        """Reads a page on NVMe where it lies, twice if it looks bad, and condemns it then."""
        assert self.boot.nvme is not None
        rows = self._store.survey.sealed_rows(Tier.NVME).tolist()
        held = self._store.survey.acquire_row(self._rng.choice(rows)) if rows else None
        if held is None:
            return
        reading, namespace, shard, key = held
        with reading:
            identity = self.boot.registry.identity_of(namespace, shard)
            if identity is None:
                return
            mover: Mover = self.boot.nvme.mover
            judged = self._oracle.space_of(namespace, shard)
            was_hurt = key in judged.hurt
            try:
                for _ in range(2):
                    if await mover.is_whole(reading, identity, key):
                        return
            except (Busy, TierIOError, TimeoutError):
                return
            if not (was_hurt or key in judged.hurt):
                raise self._oracle.broken(f"{key.hex()[:8]} on NVMe is damaged without a fault")
            await mover.condemn(reading)

    async def bump(self, space: Space) -> bool:
        """Ends the family's generation; whether that was answered."""
        registry, number = self.boot.registry, space.place.namespace
        spaces = [s for s in self._oracle.every if s.place.namespace == number]
        family = registry.family_of(number)
        if family is None:
            return False
        self._oracle.ending(spaces)
        fingerprint = family.identity.fingerprint
        try:
            if self._rng.random() < 0.2:
                await registry.delete(fingerprint)
            else:
                await registry.bump(
                    fingerprint,
                    expected=family.generation,
                    weights_revision="",
                    token=self._rng.randbytes(16),
                )
        except KvtierError:
            if registry.family_of(number) is not None:  # taken back, or another bump is under way
                self._oracle.not_ended(spaces)
            return False
        self._oracle.ended(spaces)
        return True

    def _on_their_way(self, space: Space, keys: list[bytes]) -> tuple[Space, list[bytes]]:
        """A page that is being copied now; what was given when there is none."""
        table, rows = self._store._table, list(self._store._moves._sources)
        if not rows:
            return space, keys
        row = self._rng.choice(rows)
        space = self._oracle.space_of(table.namespace[row], table.shard[row])
        return space, [table.key(row)]

    def _keys(self, space: Space) -> list[bytes]:
        starts, chains, most = 4, 3, 5
        if self.boot.machine.setting.is_crowd:
            starts, chains, most = 1, 1, 2
        start = self._rng.randrange(starts)
        chain = self._rng.randrange(chains)
        family = space.place.fingerprint.hex()
        return [
            hashlib.sha256(f"{family}/{chain}/{n}".encode()).digest()
            for n in range(start, start + self._rng.randint(1, most))
        ]


def _array(keys: list[bytes]) -> Keys:
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32)


def _meta(place: Place, key: bytes, page: bytes, parent: bytes) -> PageMeta:
    made = payload_sum(
        page,
        key=key,
        fingerprint=place.fingerprint,
        namespace_generation=place.generation,
        shard=place.shard,
        codec=Codec.RAW,
        length=len(page),
    )
    return PageMeta(key=key, length=len(page), codec=Codec.RAW, payload_sum=made, parent=parent)
