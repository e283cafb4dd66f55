"""A small NVMe tier for the tests of recovery: real files, records in a MemoryTier, and a model
that knows what must and what must not come back.

It keeps to the order that a daemon keeps to: mark before the first write to a segment, journal
before a delete or drop is told, journal n before the snapshot of checkpoint n.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvtier.core.page import Codec, Tier
from kvtier.packing.checksum import payload_sum
from kvtier.packing.record import RecordHeader, encode_header, record_bytes
from kvtier.testing.memory_tier import MemoryTier
from kvtier.tiers.nvme_checkpoint import encode_checkpoint
from kvtier.tiers.nvme_frames import encode_frame, encode_head, frame_seed
from kvtier.tiers.nvme_journal import Delete, Drop, Mark
from kvtier.tiers.nvme_recovery import Recovered, recover
from kvtier.tiers.nvme_snapshot import Pages, Snapshot

DIRECTORY_ID = bytes(range(16))
SEGMENT_BYTES = 64 << 10
UNITS = SEGMENT_BYTES // 4096
#: Two devices of three segments.
SLABS = (0, 1, 2, 1 << 20, (1 << 20) + 1, (1 << 20) + 2)
SIZES = (8192, 12288, 16384, 32768)
FAMILIES = (b"a" * 32, b"b" * 32)

Id = tuple[bytes, int, bytes]  # fingerprint, shard, key


def key_of(number: int) -> bytes:
    return number.to_bytes(4, "little") * 8


@dataclass(slots=True)
class Copy:
    """A reserved slot. `generation` is that of the allocation, `of` that of the namespace."""

    id: Id
    of: int
    generation: int
    slot: int
    length: int
    parent: bytes = b""
    is_doomed: bool = False  # its page was deleted or its namespace ended while it was written


@dataclass
class World:
    directory: Path
    rng: random.Random
    generations: dict[bytes, int] = field(default_factory=lambda: dict.fromkeys(FAMILIES, 1))
    tier: MemoryTier = field(default_factory=lambda: MemoryTier(1 << 40))

    def __post_init__(self) -> None:
        self.last = 0
        self.classes: dict[int, int] = {}
        self.live: dict[Id, Copy] = {}
        self.filling: list[Copy] = []
        self.written: dict[int, Copy] = {}  # generation -> what a record of it says
        self.gone: set[int] = set()  # generations that must never come back
        self.cut: set[int] = set()  # generations whose chain had no beginning at some restart
        #: (journal, its size when that was durable, generations that are gone since)
        self.forgotten: list[tuple[int, int, set[int]]] = []
        self.number = 0
        self.base = 0  # number of the newest checkpoint
        self.frames = 0
        self.marks: dict[int, int] = {}
        self.checkpoint()

    # -- files -----------------------------------------------------------------------------------

    @property
    def journal(self) -> Path:
        return self.directory / f"journal-{self.number:010d}"

    def append(self, *entries) -> None:
        seed = frame_seed(DIRECTORY_ID, self.number)
        with self.journal.open("ab") as file:
            file.write(encode_frame(entries, frame=self.frames, seed=seed))
        self.frames += 1

    def checkpoint(self) -> None:
        self.number += 1
        self.frames = 0
        self.marks = {}
        self.journal.write_bytes(encode_head(DIRECTORY_ID, self.number))
        slabs = {copy.slot // UNITS for copy in self.filling}
        for slab in sorted(slabs):
            self.mark(slab)
        self.write_checkpoint(self.snapshot())

    def write_checkpoint(self, snapshot: Snapshot) -> None:
        newest = self.directory / "checkpoint"
        if newest.exists():
            newest.replace(self.directory / "checkpoint.old")
        parts = encode_checkpoint(snapshot, number=self.number, directory_id=DIRECTORY_ID)
        newest.write_bytes(b"".join(parts))
        for path in self.directory.glob("journal-*"):
            if int(path.name[-10:]) < self.base:
                path.unlink()
        self.base = self.number

    def snapshot(self) -> Snapshot:
        copies = list(self.live.values())
        families = sorted({(copy.id[0], copy.of) for copy in copies})
        place = {copy.id: row for row, copy in enumerate(copies)}
        ids = [(*copy.id[:2], copy.parent) for copy in copies if copy.parent]
        absent = list(dict.fromkeys(id_[2] for id_ in ids if id_ not in place))

        def parent_of(copy: Copy) -> int:
            at = place.get((*copy.id[:2], copy.parent), -1)
            return len(copies) + absent.index(copy.parent) if at < 0 and copy.parent else at

        return Snapshot(
            last_generation=self.last,
            classes=dict(self.classes),
            families=tuple(families),
            pages=Pages(
                family=np.array([families.index((c.id[0], c.of)) for c in copies], np.uint32),
                shard=np.array([copy.id[1] for copy in copies], np.uint16),
                key=np.frombuffer(
                    b"".join([*(c.id[2] for c in copies), *absent]), np.uint8
                ).reshape(-1, 32),
                generation=np.array([copy.generation for copy in copies], np.uint64),
                slot=np.array([copy.slot for copy in copies], np.uint64),
                length=np.array([copy.length for copy in copies], np.uint64),
                codec=np.full(len(copies), Codec.RAW, np.uint8),
                lossy=np.zeros(len(copies), np.uint8),
                parent=np.array([parent_of(copy) for copy in copies], np.int32),
            ),
            in_flight=tuple(copy.generation for copy in self.filling if not copy.is_doomed),
        )

    # -- what happens to pages -------------------------------------------------------------------

    def mark(self, slab: int) -> None:
        if self.marks.get(slab) != self.classes[slab]:
            self.append(Mark(slab, self.classes[slab]))
            self.marks[slab] = self.classes[slab]

    def used(self) -> set[int]:
        return {copy.slot for copy in [*self.live.values(), *self.filling]}

    def free_slot(self, size: int) -> int | None:
        """Of a slab of the class, else of an unbound or empty one, else where a page gives way."""
        used = self.used()
        order = list(SLABS)
        self.rng.shuffle(order)
        for slab in order:
            if self.classes.get(slab) == size:
                free = [slot for slot in slots_of(slab, size) if slot not in used]
                if free:
                    return self.rng.choice(free)
        empty = [slab for slab in order if not any(slot // UNITS == slab for slot in used)]
        if empty:
            self.classes[empty[0]] = size
            return self.rng.choice(slots_of(empty[0], size))
        for id_, copy in list(self.live.items()):
            if self.classes[copy.slot // UNITS] == size:
                del self.live[id_]  # evicted: nothing is journalled
                return copy.slot
        return None

    def begin(self, id_: Id, size: int, parent: bytes = b"") -> Copy | None:
        slot = self.free_slot(size)
        if slot is None:
            return None
        self.last += 1
        length = size - 4096 - self.rng.randrange(4096)
        copy = Copy(id_, self.generations[id_[0]], self.last, slot, length, parent)
        self.filling.append(copy)
        self.mark(slot // UNITS)
        return copy

    def finish(self, copy: Copy, *, seal: bool = True) -> None:
        self.tier.write(copy.slot, record_of(copy))
        self.written[copy.generation] = copy
        self.filling.remove(copy)
        if copy.is_doomed or not seal:
            return
        held = self.live.get(copy.id)
        if held is None or held.generation < copy.generation:
            self.live[copy.id] = copy

    def put(self, id_: Id, size: int, parent: bytes = b"") -> Copy | None:
        copy = self.begin(id_, size, parent)
        if copy is not None:
            self.finish(copy)
        return copy

    def evict(self, id_: Id) -> None:
        del self.live[id_]

    def delete(self, ids: list[Id]) -> None:
        """Of one family and shard."""
        (fingerprint, shard), *_ = {id_[:2] for id_ in ids}
        for copy in self.filling:
            copy.is_doomed |= copy.id in ids
        for id_ in ids:
            self.live.pop(id_, None)
        keys = b"".join(id_[2] for id_ in ids)
        self.append(Delete(fingerprint, self.generations[fingerprint], shard, keys, self.last))
        copies = [*self.written.values(), *self.filling]
        self.forget({copy.generation for copy in copies if copy.id in ids})

    def condemn(self, id_: Id) -> None:
        copy = self.live.pop(id_)
        self.append(Drop((copy.generation,)))
        self.forget({copy.generation})

    def forget(self, generations: set[int]) -> None:
        self.gone |= generations
        self.forgotten.append((self.number, self.journal.stat().st_size, generations))

    def bump(self, fingerprint: bytes) -> None:
        self.generations[fingerprint] += 1
        self.live = {id_: copy for id_, copy in self.live.items() if id_[0] != fingerprint}
        for copy in self.filling:
            copy.is_doomed |= copy.id[0] == fingerprint

    # -- a restart -------------------------------------------------------------------------------

    def recover(self, **changes) -> Recovered:
        fields = {
            "directory_id": DIRECTORY_ID,
            "tier": self.tier,
            "slabs": SLABS,
            "segment_bytes": SEGMENT_BYTES,
            "generations": self.generations,
            "generation_floor": 0,
            "threads": 1,
        }
        return recover(self.directory, **(fields | changes))

    def restart(self, recovered: Recovered) -> None:
        """Goes on from there, as a daemon does."""
        self.live = {copy.id: copy for copy in copies_of(recovered)}
        self.filling = []
        self.classes = dict(recovered.classes)
        self.last = max(self.last, recovered.last_generation)
        self.number = recovered.next_number
        self.frames = 0
        self.marks = {}
        self.journal.write_bytes(encode_head(DIRECTORY_ID, self.number))


def slots_of(slab: int, size: int) -> list[int]:
    return [slab * UNITS + at * size // 4096 for at in range(SEGMENT_BYTES // size)]


def payload_of(copy: Copy) -> bytes:
    return random.Random(copy.generation).randbytes(copy.length)


def record_of(copy: Copy) -> list[bytes]:
    payload = payload_of(copy)
    fingerprint, shard, key = copy.id
    identity = {
        "fingerprint": fingerprint,
        "namespace_generation": copy.of,
        "shard": shard,
        "key": key,
        "codec": Codec.RAW,
        "length": copy.length,
    }
    header = RecordHeader(
        **identity,
        lossy=False,
        payload_sum=payload_sum(payload, **identity),
        generation=copy.generation,
        sequence=copy.generation,
        tier=Tier.NVME,
        slot=copy.slot,
        parent=copy.parent,
        boot_id=7,
        created_ms=0,
    )
    padding = bytes(record_bytes(copy.length) - 4096 - copy.length)
    return [encode_header(header), payload, padding]


def copies_of(recovered: Recovered) -> list[Copy]:
    """Its pages, coldest first; raises unless every column makes sense."""
    pages = recovered.pages
    copies = []
    for row in range(len(pages)):
        fingerprint, of = recovered.families[pages.family[row]]
        parent = int(pages.parent[row])
        assert -1 <= parent < len(pages.key)
        assert parent != row
        assert pages.codec[row] == Codec.RAW
        assert pages.lossy[row] == 0
        copies.append(
            Copy(
                (fingerprint, int(pages.shard[row]), bytes(pages.key[row])),
                of,
                int(pages.generation[row]),
                int(pages.slot[row]),
                int(pages.length[row]),
                bytes(pages.key[parent]) if parent >= 0 else b"",
            )
        )
    return copies


def check_sound(world: World, recovered: Recovered) -> dict[Id, Copy]:
    """What holds whatever was damaged: no id or slot twice, nothing of an ended namespace, every
    page one that was written here as it says. Returns the pages by id.
    """
    copies = copies_of(recovered)
    found = {copy.id: copy for copy in copies}
    assert len(found) == len(copies), "an id twice"
    assert len({copy.slot for copy in copies}) == len(copies), "a slot twice"
    for copy in copies:
        assert world.generations[copy.id[0]] == copy.of, "a page of an ended namespace"
        written = world.written[copy.generation]
        assert (written.id, written.of, written.slot) == (copy.id, copy.of, copy.slot)
        assert written.length == copy.length
        if copy.parent != written.parent:
            assert not copy.parent
            assert copy.generation in world.cut or is_in_ring(world, found, copy)
            world.cut.add(copy.generation)
        size = recovered.classes[copy.slot // UNITS]
        assert copy.slot % UNITS * 4096 % size == 0
        assert copy.length + 4096 <= size
    assert len(recovered.families) == len({copy.id[0] for copy in copies})
    assert recovered.last_generation <= world.last
    return found


def is_in_ring(world: World, found: dict[Id, Copy], copy: Copy) -> bool:
    """Whether the chain before the page has no beginning."""
    seen = set()
    id_ = copy.id
    while id_ in found and id_ not in seen:
        seen.add(id_)
        id_ = (*id_[:2], world.written[found[id_].generation].parent)
    return id_ in seen


def check_exact(world: World, recovered: Recovered) -> dict[Id, Copy]:
    """After a crash without damage: nothing that must not, and everything that must, is there."""
    found = check_sound(world, recovered)
    back = {copy.generation for copy in found.values()} & world.gone
    assert not back, f"deleted or dropped, and back: {back}"
    for id_, copy in world.live.items():
        assert id_ in found, f"lost: {copy}"
        # A record that was written whole and never sealed may be the newer one of its page.
        assert found[id_].generation >= copy.generation
        if found[id_].generation == copy.generation:
            assert found[id_].slot == copy.slot
        else:
            assert world.written[found[id_].generation].id == id_
    return found


def page(number: int, *, family: int = 0, shard: int = 0):
    return FAMILIES[family], shard, key_of(number)


def full_world(directory: Path, seed: int = 3) -> World:
    """Two checkpoints with pages before, between and after, nothing deleted in the last journal."""
    world = World(directory, random.Random(seed))
    for number in range(4):
        world.put(page(number), 8192)
    world.delete([page(3)])
    world.checkpoint()
    for number in range(4, 8):
        world.put(page(number), 12288)
    world.condemn(page(7))
    world.checkpoint()
    for number in range(8, 11):
        world.put(page(number), 16384)
    return world


def flipped(path: Path, at: int, bit: int) -> None:
    blob = bytearray(path.read_bytes())
    blob[at] ^= 1 << bit
    path.write_bytes(blob)


def resize(path: Path, size: str) -> None:
    blob = path.read_bytes()
    sizes = {"0": 0, "1": 1, "half": len(blob) // 2, "size-1": len(blob) - 1}
    path.write_bytes(blob + b"\x5a" if size == "size+1" else blob[: sizes[size]])
