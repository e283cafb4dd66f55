"""A real arena and store with pages in them, and a Scrubber with a real process, for the scrub's
tests.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import numpy.typing as npt

from kvtier.core.generations import Generations
from kvtier.core.handles import Filling, Reading
from kvtier.core.page import Codec, PageMeta, PageRef, PutCode, Tier
from kvtier.core.quarantine import Why
from kvtier.core.slabs import SlabAllocator
from kvtier.core.store import Store
from kvtier.core.store_config import StoreConfig
from kvtier.daemon.scrub import NvmeFiles, Scrubber, ScrubParts, ScrubReport
from kvtier.packing.checksum import payload_sum
from kvtier.packing.record import RecordHeader, encode_header, record_bytes
from kvtier.testing.daemon_process import stop_process
from kvtier.tiers.host import HostArena
from kvtier.transfer.place import Identity, load

NS = 7
BOOT = 99
SLAB = 1 << 20
SLABS = 4
PAGE = 60 << 10
FAST = 1 << 30
FINGERPRINT = hashlib.sha256(b"family").digest()
IDENTITY = Identity(fingerprint=FINGERPRINT, generation=3, shard=0)


def key_of(n: object) -> bytes:
    return hashlib.sha256(repr(n).encode()).digest()


def record_of(
    ref: PageRef, payload: bytes, key: bytes, *, boot_id: int = BOOT, identity: Identity = IDENTITY
) -> bytes:
    """The record of a page, without padding."""
    names = {"key": key, "fingerprint": identity.fingerprint, "shard": identity.shard}
    names |= {"namespace_generation": identity.generation, "codec": Codec.RAW}
    header = RecordHeader(
        length=len(payload),
        lossy=False,
        payload_sum=payload_sum(payload, length=len(payload), **names),
        generation=ref.generation,
        sequence=ref.generation,
        tier=ref.tier,
        slot=ref.slot,
        boot_id=boot_id,
        created_ms=0,
        **names,
    )
    return encode_header(header) + payload


class Rig:
    """`known` are the namespace numbers that have not ended; `rechecks` counts second readings;
    `segments` are the slabs of an NVMe tier."""

    def __init__(self, seed: int, *, segments: Sequence[int] = ()) -> None:
        self.random = random.Random(seed)
        tiers = {Tier.HOST: SlabAllocator(slab_bytes=SLAB, numbers=range(SLABS))}
        if segments:
            tiers[Tier.NVME] = SlabAllocator(slab_bytes=SLAB, numbers=segments)
        self.store = Store(
            StoreConfig(boot_id=BOOT, pages_max=1024, seed=seed, quarantine_share=0.5),
            tiers=tiers,
            generations=Generations(0, lambda bound: None),
        )
        for tier, slabs in ((Tier.HOST, range(SLABS)), (Tier.NVME, segments)):
            for slab in slabs:
                self.store.room.grant(tier, slab)
        self.store.open_namespace(NS, 1)
        self.known = {NS}
        self.rechecks = 0
        self.refs: dict[object, PageRef] = {}
        self.arena = HostArena(SLAB * SLABS, slab_bytes=SLAB, huge_pages=False, poison=True)

    def reserve(self, n: object, payload: bytes, tier: Tier = Tier.HOST) -> Filling:
        meta = PageMeta(key=key_of(n), length=len(payload), codec=Codec.RAW, payload_sum=bytes(16))
        filling = self.store.reserve(NS, 0, meta, record_bytes(len(payload)), tier=tier)
        assert isinstance(filling, Filling), filling
        return filling

    def put(self, n: object, length: int = PAGE) -> PageRef:
        """One page of random bytes in host memory."""
        payload = self.random.randbytes(length)
        with self.reserve(n, payload) as filling:
            record = record_of(filling.ref, payload, key_of(n))
            self.arena.view(filling.ref.slot, 0, len(record))[:] = record
            assert filling.seal() is PutCode.STORED
        self.refs[n] = filling.ref
        return filling.ref

    def flip(self, ref: PageRef, at: int) -> None:
        """Turns over a seeded bit of the byte `at` after the slot's start."""
        self.arena.view(ref.slot, at, 1)[0] ^= 1 << self.random.randrange(8)

    def delete(self, *names: object) -> None:
        keys = b"".join(map(key_of, names))
        self.store.delete(NS, 0, _rows(keys))

    def present(self, *names: object) -> list[object]:
        codes, _ = self.store.lookup(NS, 0, _rows(b"".join(map(key_of, names))))
        return [name for name, code in zip(names, codes.tolist(), strict=True) if code == 1]

    def pinned(self) -> int:
        return sum(counts.pinned for counts in self.store.status().values())

    async def recheck(self, reading: Reading, identity: Identity, key: bytes) -> bool:
        self.rechecks += 1
        check = partial(load, self.arena, identity, reading, key, check_payload=True)
        return await asyncio.to_thread(check) is not None

    async def condemn(self, reading: Reading, why: Why) -> bool:
        return self.store.condemn(reading.ref)

    def scrubber(self, *, nvme: NvmeFiles | None = None, **options) -> Scrubber:
        """`options` are those of Scrubber, and `recheck`, `condemn`."""
        parts = ScrubParts(
            store=self.store,
            arena=self.arena,
            identity_of=lambda number, shard: IDENTITY if number in self.known else None,
            recheck=options.pop("recheck", self.recheck),
            condemn=options.pop("condemn", self.condemn),
            confirm=options.pop("confirm", None),
            nvme=nvme,
        )
        return Scrubber(parts, **options)

    def settled(self) -> None:
        """No lease is left, and all books agree."""
        assert self.pinned() == 0
        self.store.survey.check()


@contextmanager
def rig(seed: int, *, segments: Sequence[int] = ()) -> Iterator[Rig]:
    made = Rig(seed, segments=segments)
    try:
        yield made
        made.settled()
    finally:
        made.arena.close()


async def frozen_in_a_batch(made: Rig, scrubber: Scrubber) -> asyncio.Task[ScrubReport]:
    """A scrub whose process was stopped (SIGSTOP) and has a batch before it now."""
    pids: list[int] = []

    async def progress(_counts: object) -> None:
        if not pids:
            assert scrubber.process_pid is not None
            pids.append(scrubber.process_pid)
            stop_process(scrubber.process_pid)

    run = asyncio.create_task(scrubber.run(Tier.HOST, bytes_per_second=FAST, on_progress=progress))
    await until(lambda: pids and made.pinned())
    return run


async def until(condition: Callable[[], object], within_s: float = 10.0) -> None:
    for _ in range(int(within_s / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise TimeoutError(f"not so within {within_s:g} s")


def is_gone(pid: int) -> bool:
    """No process of this number, or one that has ended and was not waited for."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] in ("Z", "X")
    except FileNotFoundError:
        return True


def _rows(keys: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(keys, np.uint8).reshape(-1, 32)
