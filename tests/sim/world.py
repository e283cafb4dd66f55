"""A whole kvtier in one thread: the real store, arena, Intake and Outlet, under a seeded scheduler.

Clients are generators that stop between any two steps a real client could stop between: an
announcement, a chunk, a page, a copied piece. The scheduler picks who goes on, moves the clock,
grants slabs late, flips bits in memory and on the wire, and lets clients vanish. What a client gets
is held against an oracle that knows every accepted page.

The same seed gives the same run, step by step (`World.trace` is a digest of it).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

import numpy as np

from kvtier.core.generations import Generations
from kvtier.core.page import (
    Codec,
    DeleteCode,
    GetCode,
    PageMeta,
    PutCode,
    Tier,
)
from kvtier.core.slabs import SlabAllocator
from kvtier.core.store import Store, StoreConfig
from kvtier.errors import ChunkError
from kvtier.packing.checksum import payload_sum
from kvtier.packing.layout import Layout, Role, ScaleRule, Segment
from kvtier.packing.record import HEADER_BYTES
from kvtier.testing.cells import check_page, make_page
from kvtier.tiers.host import HostArena
from kvtier.transfer.intake import Intake
from kvtier.transfer.outlet import Outlet
from kvtier.transfer.place import Place, Verify

SLAB = 64 * 1024
SLABS = 4
Script = Generator[None, None, None]


class WrongByte(AssertionError):
    """A client was given, as a hit, a page that is not the one it asked for."""


def opaque_layout(model: str, size: int) -> Layout:
    segment = Segment(
        name="bytes",
        role=Role.OPAQUE,
        dtype="uint8",
        layers=1,
        heads=1,
        dim=size,
        scale_rule=ScaleRule.NONE,
    )
    return Layout.from_segments(
        [segment], model_id=model, revision="1", page_tokens=1, kv_compute="uint8"
    )


@dataclass(slots=True)
class Space:
    """One shard of one family at its present generation, and what the oracle knows of it."""

    name: str
    place: Place
    versions: dict[bytes, int] = field(default_factory=dict)  # pages that may be found
    damaged: set[bytes] = field(default_factory=set)  # keys of which some copy ever was


class World:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.arena = HostArena(SLAB * SLABS, slab_bytes=SLAB, huge_pages=False, poison=True)
        allocator = SlabAllocator(capacity_bytes=SLAB * SLABS, slab_bytes=SLAB)
        self.store = Store(
            StoreConfig(boot_id=seed + 1, pages_max=64, seed=seed),
            tiers={Tier.HOST: allocator},
            generations=Generations(0, lambda bound: None),
        )
        self.slabs_waiting = list(range(SLABS))
        self.now = 0.0
        self.numbers = 0
        self.version = 0
        self.every_space: list[Space] = []  # bumped ones too: a get may still be reading them
        self.spaces = [
            *self._family("model0", 3000, shards=1),
            *self._family("model1", 3000, shards=2),
            *self._family("model2", 20000, shards=1),
        ]
        self.scripts: list[Script] = []
        self.hits = self.stored = self.corrupt = self.damage_done = 0
        self._digest = hashlib.sha256()

    @property
    def trace(self) -> str:
        return self._digest.hexdigest()

    def run(self, steps: int) -> None:
        """Raises WrongByte or LedgerError, or returns with everything closed and accounted for."""
        try:
            for step in range(steps):
                self._step()
                if step % 8 == 0:
                    self.store.check()
            for script in self.scripts:
                script.close()
            self._settle()
        finally:
            self.arena.close()

    # -- the scheduler ------------------------------------------------------------------------

    def _step(self) -> None:
        rng = self.rng
        if len(self.scripts) < 6:
            maker = rng.choice(
                (self._put, self._put, self._get, self._get, self._get, self._change)
            )
            self.scripts.append(maker(rng.choice(self.spaces)))
        roll = rng.random()
        if roll < 0.01 and self.slabs_waiting:
            self.store.grant_slab(Tier.HOST, self.slabs_waiting.pop())
        elif roll < 0.03:
            self._flip_a_bit_in_memory()
        elif roll < 0.06:
            self.now += rng.random() * 5
            self.store.pins.expire(self.now)
        elif roll < 0.08:
            self.store.sweep(rng.randint(1, 5))
        elif roll < 0.10:
            rng.choice(self.scripts).close()  # the client is gone, in the middle of anything
        script = rng.choice(self.scripts)
        if next(script, self) is self:
            self.scripts.remove(script)

    def _settle(self) -> None:
        self.store.pins.expire(float("inf"))
        while self.store.sweep(100):
            pass
        self.store.check()
        counts = self.store.status()[Tier.HOST]
        assert counts.pinned == 0, f"seed {self.seed}: {counts.pinned} pages still pinned"
        assert counts.filling == 0, f"seed {self.seed}: {counts.filling} slots still being filled"
        assert counts.retiring == 0, f"seed {self.seed}: {counts.retiring} slots never drained"
        cap = counts.capacity_bytes // 20
        assert counts.quarantined_bytes <= cap, f"seed {self.seed}: quarantine over its cap"

    # -- clients ------------------------------------------------------------------------------

    def _put(self, space: Space) -> Script:
        rng, place = self.rng, space.place
        chain = self._keys(space)
        size = place.layout.raw_bytes
        self.version += 1
        version = self.version
        metas, run = [], bytearray()
        for i, key in enumerate(chain):
            page = make_page(size, namespace=space.name, key=key, version=version)
            metas.append(self._meta(place, key, page, chain[i - 1] if i else b""))
            run += page
        broken = self._maybe_break(run, size)
        intake = Intake(
            self.store, self.arena, place, pages_max=64, bytes_max=1 << 20, verify=Verify.ALWAYS
        )
        counted = 0
        try:
            at = 0
            while metas or at < len(run):
                if metas and (at >= self._announced(intake) or rng.random() < 0.5):
                    n = rng.randint(1, len(metas))
                    intake.announce(metas[:n])
                    del metas[:n]
                n = rng.randint(1, max(1, self._announced(intake) - at, place.layout.raw_bytes))
                n = min(n, self._announced(intake) - at)
                if rng.random() < 0.02:
                    with_gap = at + rng.choice((-1, 1, 4096))
                    try:
                        intake.feed(with_gap, memoryview(run)[at : at + n])
                    except ChunkError:
                        return
                    raise WrongByte(f"seed {self.seed}: a chunk at a wrong offset was taken")
                intake.feed(at, memoryview(run)[at : at + n])
                at += n
                counted = self._account(space, chain, intake.codes, counted, version, broken)
                yield
            intake.finish()
        finally:
            intake.close()

    def _account(
        self,
        space: Space,
        chain: list[bytes],
        codes: list[PutCode],
        counted: int,
        version: int,
        broken: set[int],
    ) -> int:
        for i in range(counted, len(codes)):
            self._note(codes[i])
            if i in broken and codes[i] is PutCode.STORED:
                raise WrongByte(f"seed {self.seed}: a page damaged on the wire was stored")
            if codes[i] is PutCode.STORED:
                space.versions[chain[i]] = version
                self.stored += 1
        return len(codes)

    def _get(self, space: Space) -> Script:
        rng, place = self.rng, space.place
        keys = self._keys(space)
        array = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32)
        outlet = Outlet(
            self.store,
            self.arena,
            place,
            array,
            accept=frozenset({Codec.RAW}),
            lossy_ok=False,
            verify=Verify.ALWAYS,
            sample_one_in=1,
        )
        # The leases of all keys are taken with the first page, that is, now.
        expected = dict(space.versions)
        found, _ = self.store.lookup(place.namespace, place.shard, array)
        try:
            for key, was_there, page in zip(keys, found == GetCode.HIT, outlet, strict=True):
                self._note(page.code)
                if page.code is not GetCode.HIT:
                    self._judge_miss(space, key, page.code, was_there=was_there)
                    yield
                    continue
                assert page.header is not None
                assert page.payload is not None
                copy = bytearray()
                while len(copy) < page.header.length:
                    n = rng.randint(1, page.header.length)
                    copy += page.payload[len(copy) : len(copy) + n]
                    yield
                if not place.payload_ok(memoryview(copy), page.header):
                    assert key in space.damaged, f"seed {self.seed}: a sum failed without damage"
                    continue
                self._judge_hit(space, key, copy, expected)
                yield
        finally:
            outlet.close()

    def _change(self, space: Space) -> Script:
        """Pins, deletes, bumps: everything that is one call."""
        keys = self._keys(space)
        array = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 32)
        number = space.place.namespace
        match self.rng.randint(0, 11):
            case 0 | 1 | 2 | 3 | 4 | 5 | 6:
                session = self.rng.randint(1, 3)
                lease, codes = self.store.pins.pin(
                    session,
                    number,
                    space.place.shard,
                    array,
                    deadline=self.now + self.rng.random() * 8,
                )
                self._note(*codes.tolist())
                for _ in range(self.rng.randint(0, 6)):
                    yield
                if self.rng.random() < 0.5:
                    self.store.pins.unpin(session, [lease], now=self.now)
                else:
                    self.store.pins.end_session(session)
            case 7 | 8 | 9 | 10:
                codes = self.store.delete(number, space.place.shard, array)
                self._note(*codes.tolist())
                if DeleteCode.STALE not in codes:
                    for key in keys:
                        space.versions.pop(key, None)
            case _:
                old = [s for s in self.spaces if s.place.namespace == number]
                if not old:
                    return  # bumped by somebody else meanwhile
                self.store.end_namespace(number)
                size = space.place.layout.raw_bytes
                fresh = self._family(space.name.split("/")[0], size, shards=len(old))
                self.spaces = [s for s in self.spaces if s not in old] + fresh
        yield

    # -- judging ------------------------------------------------------------------------------

    def _judge_hit(
        self, space: Space, key: bytes, copy: bytearray, expected: dict[bytes, int]
    ) -> None:
        """The copy must be the version that was there when the get began, or one put since."""
        versions = {expected.get(key), space.versions.get(key)} - {None}
        if not versions:
            raise WrongByte(f"seed {self.seed}: a page that nobody put, or that was deleted")
        if all(
            check_page(copy, namespace=space.name, key=key, version=version)
            for version in versions
            if version is not None
        ):
            raise WrongByte(f"seed {self.seed}: {key.hex()[:8]} holds foreign or torn cells")
        self.hits += 1

    def _judge_miss(self, space: Space, key: bytes, code: GetCode, *, was_there: bool) -> None:
        assert not (was_there and code is GetCode.MISS), f"seed {self.seed}: missed what was there"
        if code is GetCode.CORRUPT:
            assert key in space.damaged, f"seed {self.seed}: CORRUPT without damage"
            self.corrupt += 1
            space.versions.pop(key, None)

    # -- damage -------------------------------------------------------------------------------

    def _flip_a_bit_in_memory(self) -> None:
        rows = self.store.sealed_rows(Tier.HOST).tolist()
        if not rows:
            return
        found = self.store.acquire_row(self.rng.choice(rows))
        assert found is not None
        reading, namespace, shard, key = found
        with reading:
            at = self.rng.randrange(HEADER_BYTES + reading.length)
            self.arena.view(reading.ref.slot, at, 1)[0] ^= 1 << self.rng.randrange(8)
            for space in self.every_space:
                if (space.place.namespace, space.place.shard) == (namespace, shard):
                    space.damaged.add(key)
                    self.damage_done += 1

    def _maybe_break(self, run: bytearray, size: int) -> set[int]:
        if self.rng.random() > 0.1:
            return set()
        at = self.rng.randrange(len(run))
        run[at] ^= 1 << self.rng.randrange(8)
        return {at // size}

    # -- small things -------------------------------------------------------------------------

    def _family(self, name: str, size: int, *, shards: int) -> list[Space]:
        """A family under a new namespace number: one Space for each shard."""
        self.numbers += 1
        layout = opaque_layout(name, size)
        self.store.open_namespace(self.numbers, shards)
        made = []
        for shard in range(shards):
            place = Place(
                namespace=self.numbers,
                shard=shard,
                fingerprint=layout.fingerprint("tenant", b""),
                generation=self.numbers,
                layout=layout,
            )
            made.append(Space(f"{name}/{shard}", place))
        self.every_space += made
        return made

    def _keys(self, space: Space) -> list[bytes]:
        start = self.rng.randrange(4)
        chain = self.rng.randrange(2)
        return [
            hashlib.sha256(f"{space.place.fingerprint.hex()}/{chain}/{n}".encode()).digest()
            for n in range(start, start + self.rng.randint(1, 5))
        ]

    def _meta(self, place: Place, key: bytes, page: bytes, parent: bytes) -> PageMeta:
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

    def _announced(self, intake: Intake) -> int:
        return intake._announced_bytes

    def _note(self, *codes: int) -> None:
        self._digest.update(bytes(codes))


def run_seeds(seeds: Iterator[int] | range, steps: int) -> tuple[int, int, int, int]:
    """Runs each seed; (pages stored, hits checked, bits flipped, pages found corrupt)."""
    stored = hits = flips = corrupt = 0
    for seed in seeds:
        world = World(seed)
        world.run(steps)
        stored += world.stored
        hits += world.hits
        flips += world.damage_done
        corrupt += world.corrupt
    return stored, hits, flips, corrupt
