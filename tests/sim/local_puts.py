"""Puts by shared memory: a client that writes into slots granted ahead, and seals them; one that
is lost goes on writing for a while."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvtier.core.page import PageMeta, PageRef, PutCode
from kvtier.core.page_columns import PageColumns
from kvtier.packing.record import HEADER_BYTES, encode_header, record_bytes
from tests.sim.boot import Boot
from tests.sim.oracle import Space

__all__ = ["LocalPuts"]


class _Put(Protocol):
    keys: list[bytes]
    metas: list[PageMeta]
    run: bytearray
    version: int


class LocalPuts:
    """Of one boot. `note` takes every code that a client sees, `now` is the time of leases."""

    def __init__(self, boot: Boot, *, note: Callable[..., None], now: Callable[[], float]) -> None:
        self._boot = boot
        self._grants = boot.store.grants
        self._note = note
        self._now = now

    async def put(self, space: Space, put: _Put) -> None:
        """`put.version` is the holder: no two puts share one."""
        rng, holder = self._boot.rng, put.version
        written, at = list[PageRef](), 0
        try:
            while at < len(put.keys):
                count = rng.randint(1, len(put.keys) - at)
                deadline = self._now() + rng.random() * 8
                size = record_bytes(space.size)
                written = self._grants.take(holder, size, count, deadline=deadline)
                if not written:
                    return
                for i, ref in enumerate(written, at):
                    await self._write(ref, put.run[i * space.size : (i + 1) * space.size])
                self._seal(space, put, written, at)
                at += len(written)
                written = []
                await self._boot.scheduler.pause()
        finally:
            self._grants.end(holder)
            await self._write_on(holder, written, space.size)

    async def _write(self, ref: PageRef, page: bytearray) -> None:
        """In two pieces: anything can happen in between."""
        view = self._boot.arena.view(ref.slot, HEADER_BYTES, record_bytes(len(page)) - HEADER_BYTES)
        half = self._boot.rng.randrange(len(page))
        view[:half] = page[:half]
        await self._boot.scheduler.pause()
        view[half:] = page[half:] + bytes(len(view) - len(page))

    async def _write_on(self, holder: int, refs: Sequence[PageRef], size: int) -> None:
        """Nobody has told the process that its connection is gone."""
        try:
            for ref in refs:
                await self._boot.scheduler.pause()
                self._boot.arena.view(ref.slot, HEADER_BYTES, size)[:] = bytes([0xBD]) * size
        finally:
            self._grants.settle(holder)

    def _seal(self, space: Space, put: _Put, written: Sequence[PageRef], at: int) -> None:
        place = space.place
        metas = put.metas[at : at + len(written)]
        generations = [ref.generation for ref in written]
        live = self._grants.refs(put.version, generations)
        for ref, meta in zip(live, metas, strict=True):
            if ref is not None:
                header = encode_header(place.header(meta, ref))
                self._boot.arena.view(ref.slot, 0, HEADER_BYTES)[:] = header
        codes = self._grants.seal_many(
            put.version, place.namespace, place.shard, generations, PageColumns.of(metas)
        ).tolist()
        self._note(*codes)
        stored = [m.key for m, code in zip(metas, codes, strict=True) if code == PutCode.STORED]
        for key in stored:
            self._boot.oracle.stored(space, key, put.version)
        self._boot.oracle.counts.stored_local += len(stored)
        if self._boot.nvme is not None and stored:
            self._boot.nvme.tiering.stored((place.namespace, place.shard), stored)
