"""Copies pages between host memory and NVMe, one page a call, each as one Movement.

    demote   host -> NVMe: checks the record in the arena, packs it if the tier wants that, writes
             header and payload at once, publishes
    promote  NVMe -> host: reads the record into an arena slot, checks it there, writes its new
             header, publishes; the copy on NVMe stays

Nothing is published that was not verified, and nothing whose source was deleted, condemned or
bumped meanwhile. A page that fails is read a second time before it is condemned. Bytes move on the
threads of `Lower`; everything else is the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from kvtier.core.handles import Filling, Reading
from kvtier.core.movement import Movement
from kvtier.core.page import NO_SUM, Codec, PageMeta, PutCode, Tier
from kvtier.core.store import Store
from kvtier.errors import Busy, CorruptPage, DirectoryError, NonFinite, TierIOError
from kvtier.packing.record import HEADER_BYTES, encode_header, record_bytes
from kvtier.packing.transcode import transcode
from kvtier.tiers.crash_points import crash_point
from kvtier.tiers.direct_file import aligned_buffer
from kvtier.tiers.host import HostArena
from kvtier.tiers.io_pool import IoClass, IoJob
from kvtier.transfer.bounced import Bounced
from kvtier.transfer.lower import Lower, MoveCode, Subject
from kvtier.transfer.place import Copy, Identity, Why, check, failed, load
from kvtier.transfer.turns import Turns

__all__ = ["Lower", "MoveCode", "Mover", "Subject"]

#: Memory for pages that are served from NVMe while the arena has no room for them.
_BOUNCE_BYTES_MAX = 64 << 20


class Mover:
    def __init__(self, store: Store, arena: HostArena, lower: Lower, *, codec: Codec) -> None:
        self._store = store
        self._arena = arena
        self._lower = lower
        self._codec = codec
        self._promotions: dict[tuple[int, int, bytes], asyncio.Task[MoveCode]] = {}
        self._going_down = Turns()
        self.bounced_bytes = 0
        self.too_long_bytes = 0  # the longest record that no segment can hold
        self.demotions: Counter[MoveCode] = Counter()
        self.promotions: Counter[MoveCode] = Counter()
        self.bytes_written = self.bytes_read = 0

    # -- down ------------------------------------------------------------------------------------

    async def demote(self, source: Reading, page: Subject, io_class: IoClass) -> MoveCode:
        """Copies a page of host memory to NVMe. Takes over `source` and releases it.

        One copy of a page at a time: of two begun at once one is written for nothing, and is in the
        way of the other when the process ends before it is whole.
        """
        code = MoveCode.IO_ERROR
        try:
            async with self._going_down.of(page.name):
                code = await self._demote(source, page, io_class)
        except Busy:
            code = MoveCode.BUSY
        except DirectoryError:
            pass  # the journal is what failed, and says so itself
        finally:
            source.release()
            self.demotions[code] += 1
        return code

    async def _demote(self, source: Reading, page: Subject, io_class: IoClass) -> MoveCode:
        copy = load(self._arena, page.identity, source, page.key, check_payload=False)
        if copy is None:
            return await self._condemn_if_bad_in_memory(source, page)
        packed = await self._packed(source, page, copy)
        if isinstance(packed, MoveCode):
            return packed
        meta = packed[0]
        size = record_bytes(meta.length)
        if size > self._lower.segment_bytes:
            self.too_long_bytes = max(self.too_long_bytes, size)
            return MoveCode.REFUSED
        if not self._store.room.has_free(Tier.NVME, size):
            await self._lower.grow(size)
        target = self._store.reserve(
            page.namespace, page.shard, meta, size, tier=Tier.NVME, source=source
        )
        if not isinstance(target, Filling):
            return MoveCode.of_refusal(target)
        movement = Movement(source, target)
        try:
            return await self._write_down(movement, page, copy, packed, io_class)
        finally:
            if not movement.is_over:  # it has not begun, or what was raised was not expected
                movement.fail()

    async def _write_down(
        self,
        movement: Movement,
        page: Subject,
        copy: Copy,
        packed: tuple[PageMeta, memoryview | None],
        io_class: IoClass,
    ) -> MoveCode:
        """Writes the record of `copy`, with the payload as it is or as it was packed."""
        meta, private = packed
        source, target = movement.source, movement.target
        size = record_bytes(meta.length)
        block = aligned_buffer(HEADER_BYTES if private is None else size)
        block[:HEADER_BYTES] = encode_header(copy.header.of_copy(target.ref, meta))
        if private is None:
            payload = self._arena.view(source.ref.slot, HEADER_BYTES, size - HEADER_BYTES)
            parts = [block, payload]
        else:
            block[HEADER_BYTES : HEADER_BYTES + meta.length] = private
            parts = [block]

        def write() -> bool:
            if private is None and not page.identity.payload_ok(copy.payload, copy.header):
                return False
            crash_point("demote.before_write")
            self._lower.tier.write(target.ref.slot, parts)
            crash_point("demote.written")
            return True

        with source.again() as held:  # the movement lets go of its own
            outcome = await self._carry_out(movement, size, write, io_class)
            if outcome is MoveCode.CORRUPT:
                return await self._condemn_if_bad_in_memory(held, page)
            return outcome

    async def _carry_out(
        self, movement: Movement, size: int, write: Callable[[], bool], io_class: IoClass
    ) -> MoveCode:
        """Writes and publishes; the movement has ended when this returns, or has not begun."""
        slot, generation = movement.target.ref.slot, movement.target.ref.generation
        await self._lower.prepare(slot, size)
        job = self._lower.submit(io_class, slot, write)
        try:
            is_whole = await job.wait(self._lower.timeout_s)
        except TimeoutError as error:
            self._strand(movement, job)
            self._lower.report(slot, error)
            await self._lower.forget(generation)
            return MoveCode.TIMEOUT
        except TierIOError as error:
            movement.fail()
            self._lower.report(slot, error)
            await self._lower.forget(generation)
            return MoveCode.IO_ERROR
        except asyncio.CancelledError:
            self._strand(movement, job)
            raise
        self._lower.report(slot, None)
        if not is_whole:
            movement.fail()
            return MoveCode.CORRUPT
        self.bytes_written += size
        movement.copied()
        movement.verified()
        code = movement.publish()
        crash_point("demote.sealed")
        if code in (PutCode.STORED, PutCode.EXISTS):
            return MoveCode.DONE
        await self._lower.forget(generation)
        return MoveCode.GONE

    async def _packed(
        self, source: Reading, page: Subject, copy: Copy
    ) -> tuple[PageMeta, memoryview | None] | MoveCode:
        """What will lie on NVMe: (meta, None: the payload as it is; else packed bytes)."""
        meta, layout = copy.header.meta, page.layout
        is_wanted = self._codec is Codec.FP8 and meta.codec is Codec.RAW
        if not is_wanted or layout is None or not layout.fp8_bytes:
            return meta, None
        try:
            made = await asyncio.to_thread(
                transcode,
                layout,
                copy.payload,
                meta,
                Codec.FP8,
                fingerprint=page.identity.fingerprint,
                namespace_generation=page.identity.generation,
            )
        except CorruptPage:
            return await self._condemn_if_bad_in_memory(source, page)
        except NonFinite:
            return MoveCode.REFUSED
        return made.meta, made.payload.data

    async def _condemn_if_bad_in_memory(self, source: Reading, page: Subject) -> MoveCode:
        """Looks once more; one bad reading need not be the page's fault."""
        with source.again() as again:
            whole = await asyncio.to_thread(
                load, self._arena, page.identity, again, page.key, check_payload=True
            )
            if whole is None and self._store.condemn(again.ref, failed(Why.COPY)):
                return MoveCode.CORRUPT
        return MoveCode.GONE

    # -- up --------------------------------------------------------------------------------------

    async def promote(self, source: Reading, page: Subject, io_class: IoClass) -> MoveCode:
        """Copies a page of NVMe to host memory. Takes over `source` and releases it.

        Those who ask for a page that is on its way up wait for the same movement; it goes on when
        a caller is cancelled.
        """
        under_way = self._promotions.get(page.name)
        if under_way is None:
            under_way = asyncio.create_task(self._promote(source, page, io_class))
            self._promotions[page.name] = under_way
            under_way.add_done_callback(lambda task: self._promoted(page, task))
        else:
            source.release()
        return await asyncio.shield(under_way)

    def _promoted(self, page: Subject, task: asyncio.Task[MoveCode]) -> None:
        del self._promotions[page.name]
        if not task.cancelled() and task.exception() is None:
            self.promotions[task.result()] += 1

    async def _promote(self, source: Reading, page: Subject, io_class: IoClass) -> MoveCode:
        size = record_bytes(source.length)
        known = PageMeta(
            key=page.key,
            length=source.length,
            codec=source.codec,
            payload_sum=NO_SUM,
            lossy=source.lossy,
        )
        movement: Movement | None = None
        try:
            target = self._store.reserve(page.namespace, page.shard, known, size, source=source)
            if not isinstance(target, Filling):
                return MoveCode.of_refusal(target)
            movement = Movement(source, target)
            into = self._arena.view(target.ref.slot, 0, size)
            copy = await self._read(movement, page, into, io_class)
            if isinstance(copy, MoveCode):
                return copy
            target.meta = copy.header.meta
            into[:HEADER_BYTES] = encode_header(copy.header.of_copy(target.ref, target.meta))
            self.bytes_read += size
            movement.copied()
            movement.verified()
            code = movement.publish()
            crash_point("promote.sealed")
            return MoveCode.DONE if code.is_stored else MoveCode.GONE
        except Busy:
            return self._not_read(source.ref.slot)
        finally:
            if movement is not None and not movement.is_over:
                movement.fail()  # something that nobody expected was raised
            source.release()

    async def _read(
        self, movement: Movement, page: Subject, into: memoryview, io_class: IoClass
    ) -> Copy | MoveCode:
        """The checked record in its new slot; else the movement has failed."""
        source = movement.source
        slot = source.ref.slot

        def read() -> Copy | None:
            return self._read_checked(source, page, into)

        try:
            job = self._lower.submit(io_class, slot, read)
        except Busy:
            movement.fail()
            raise
        try:
            copy = await job.wait(self._lower.timeout_s)
        except TimeoutError as error:
            self._strand(movement, job)
            self._lower.report(slot, error)
            return MoveCode.TIMEOUT
        except TierIOError as error:
            movement.fail()
            self._lower.report(slot, error)
            return MoveCode.IO_ERROR
        except asyncio.CancelledError:
            self._strand(movement, job)
            raise
        self._lower.report(slot, None)
        if copy is not None:
            return copy
        with source.again() as again:
            movement.fail()
            return await self.condemn(again)

    def _read_checked(self, source: Reading, page: Subject, into: memoryview) -> Copy | None:
        """The record if it is whole, at the first or second try. A thread of `Lower`."""
        for _ in range(2):
            self._lower.tier.read(source.ref.slot, 0, into)
            crash_point("promote.read")
            copy = check(into, page.identity, source, page.key, check_payload=True)
            if copy is not None:
                return copy
        return None

    async def condemn(self, source: Reading, why: Why = Why.READ) -> MoveCode:
        """A copy on NVMe that failed twice: out of sight, also after a restart."""
        is_ours = self._store.condemn(source.ref, failed(why))
        await self._lower.forget(source.ref.generation)
        return MoveCode.CORRUPT if is_ours else MoveCode.GONE

    async def is_whole(self, source: Reading, identity: Identity, key: bytes) -> bool:
        """Whether the record on NVMe passes when it is read now. Raises TierIOError, Busy,
        TimeoutError."""
        size, held = record_bytes(source.length), source.again()

        def read() -> bool:
            into = aligned_buffer(size)
            self._lower.tier.read(held.ref.slot, 0, into)
            return check(into, identity, held, key, check_payload=True) is not None

        try:
            job = self._lower.submit(IoClass.SCRUB, source.ref.slot, read)
        except Busy:
            held.release()
            raise
        job.add_done(held.release)
        return await job.wait(self._lower.timeout_s)

    async def read_through(self, source: Reading, page: Subject) -> Bounced | MoveCode:
        """The record in memory of its own, for a page that the arena has no room for.

        BUSY when there is too much of that. The caller keeps `source` and releases the result.
        """
        size = record_bytes(source.length)
        if self.bounced_bytes + size > _BOUNCE_BYTES_MAX:
            return MoveCode.BUSY
        slot = source.ref.slot
        held = source.again()

        def read() -> Copy | None:
            return self._read_checked(held, page, aligned_buffer(size))

        try:
            job = self._lower.submit(IoClass.GET, slot, read)
        except Busy:
            held.release()
            return self._not_read(slot)
        bounced = Bounced(self._count_bounced, size)
        job.add_done(held.release)
        try:
            copy = await job.wait(self._lower.timeout_s)
        except TimeoutError as error:
            job.add_done(bounced.release)
            self._lower.report(slot, error)
            return MoveCode.TIMEOUT
        except TierIOError as error:
            bounced.release()
            self._lower.report(slot, error)
            return MoveCode.IO_ERROR
        except asyncio.CancelledError:
            job.add_done(bounced.release)
            raise
        self._lower.report(slot, None)
        if copy is not None:
            self.bytes_read += size
            bounced.copy = copy
            return bounced
        bounced.release()
        return await self.condemn(source)

    def _not_read(self, slot: int) -> MoveCode:
        return MoveCode.BUSY if self._lower.serves(slot) else MoveCode.GONE

    def _count_bounced(self, nbytes: int) -> None:
        self.bounced_bytes += nbytes

    # -- both ------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Returns when no promotion is under way."""
        if self._promotions:
            await asyncio.wait(list(self._promotions.values()))

    def _strand(self, movement: Movement, job: IoJob[Any]) -> None:
        """Gives up a movement whose bytes may still be moving."""
        if job.cancel():
            movement.fail()
            return
        movement.strand()
        held, target = movement.source.again(), movement.target.ref

        def ended() -> None:
            self._store.settle_orphan(target)
            held.release()

        job.add_done(ended)
