"""Moves page bytes between a stream and the host tier, and verifies them on the way.

Completion is one value a page, made once, by the code that verified the bytes: copy -> verify ->
publish (seal) -> count. An Intake takes the run of bytes of one Put, an Outlet gives the pages of
one Get. Neither blocks, and neither is shared between threads; both must be closed, which gives
back every slot and lease they hold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kvtier.core.handles import Filling, Reading
from kvtier.core.page import KEY_BYTES, Codec, GetCode, PageMeta, PageRef, PutCode, Tier
from kvtier.core.store import Store
from kvtier.errors import ChunkError, CorruptRecord, KeyLengthError, LimitExceeded, NonFinite
from kvtier.packing.checksum import verify_payload
from kvtier.packing.fp8_check import check_payload
from kvtier.packing.layout import Layout
from kvtier.packing.record import (
    HEADER_BYTES,
    RecordHeader,
    decode_header,
    encode_header,
    record_bytes,
)
from kvtier.tiers.host import HostArena

__all__ = ["Intake", "Outgoing", "Outlet", "Place", "Verify"]

#: An Outlet holds leases on so many bytes ahead at most, so that a slow reader cannot pin the
#: arena.
_WINDOW_BYTES = 64 << 20
_WINDOW_PAGES = 1024


class Verify(IntEnum):
    """Whether payload sums are checked when a page leaves host memory (on the way in they always
    are)."""

    ALWAYS = 1
    SAMPLED = 2
    OFF = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One shard of one namespace, as a handle names it."""

    namespace: int
    shard: int
    fingerprint: bytes
    generation: int
    layout: Layout

    def payload_ok(self, payload: memoryview, meta: PageMeta | RecordHeader) -> bool:
        return verify_payload(
            payload,
            meta.payload_sum,
            key=meta.key,
            fingerprint=self.fingerprint,
            namespace_generation=self.generation,
            shard=self.shard,
            codec=meta.codec,
            length=meta.length,
        )

    def made(self, header: RecordHeader) -> bool:
        """The record belongs to this shard of this namespace generation."""
        return (header.fingerprint, header.namespace_generation, header.shard) == (
            self.fingerprint,
            self.generation,
            self.shard,
        )


class Intake:
    """The pages of one Put, in the order they were announced.

    A page that breaks a rule gets its code and its bytes are passed over; a stream that breaks a
    rule raises ChunkError (or KeyLengthError, LimitExceeded) and what was not sealed by then is
    given back by `close`.
    """

    def __init__(
        self, store: Store, arena: HostArena, place: Place, *, pages_max: int, bytes_max: int
    ) -> None:
        self._store = store
        self._arena = arena
        self._place = place
        self._lengths = {Codec.RAW: place.layout.raw_bytes, Codec.FP8: place.layout.fp8_bytes}
        self._pages_max = pages_max
        self._bytes_max = bytes_max
        self._waiting: deque[PageMeta] = deque()
        self._announced_pages = 0
        self._announced_bytes = 0
        self._received = 0
        self._page: _Incoming | None = None
        self.codes: list[PutCode] = []
        self.refs: list[PageRef | None] = []

    def announce(self, metas: Sequence[PageMeta]) -> None:
        """The next pages of the run. Raises KeyLengthError or LimitExceeded, then none of them
        counts."""
        pages = self._announced_pages + len(metas)
        total = self._announced_bytes + sum(meta.length for meta in metas)
        if pages > self._pages_max or total > self._bytes_max:
            raise LimitExceeded(
                f"the put announces {pages} pages of {total} bytes;"
                f" one call takes {self._pages_max} pages and {self._bytes_max} bytes",
                remedy="send the pages in several puts",
            )
        for i, meta in enumerate(metas, self._announced_pages):
            if len(meta.key) != KEY_BYTES or len(meta.parent) not in (0, KEY_BYTES):
                raise KeyLengthError(
                    f"page {i}: key of {len(meta.key)} bytes, parent of {len(meta.parent)}",
                    remedy=f"a key is {KEY_BYTES} bytes; a parent is {KEY_BYTES} bytes or absent",
                )
        self._waiting.extend(metas)
        self._announced_pages, self._announced_bytes = pages, total
        self._skip_empty()

    def feed(self, offset: int, data: memoryview) -> None:
        """The next bytes of the run. Raises ChunkError when they are not the next, or nobody
        announced them."""
        if not len(data):
            return
        if offset != self._received:
            raise ChunkError(
                f"chunk at offset {offset}, expected {self._received}",
                remedy="send the run of bytes in order and without gaps",
            )
        if self._received + len(data) > self._announced_bytes:
            raise ChunkError(
                f"{self._received + len(data)} bytes sent, {self._announced_bytes} announced",
                remedy="announce every page before its first byte",
            )
        self._received += len(data)
        while len(data):
            page = self._page or self._next_page()
            data = data[page.take(data) :]
            if page.missing == 0:
                self._complete(page)
                self._skip_empty()

    def finish(self) -> None:
        """The stream has ended. Raises ChunkError when announced bytes are missing."""
        if self._received != self._announced_bytes:
            raise ChunkError(
                f"the stream ended after {self._received} of {self._announced_bytes} bytes",
                remedy="send every byte that was announced; pages received whole are stored",
            )

    def close(self) -> None:
        """Gives back what was not sealed."""
        if self._page is not None and self._page.filling is not None:
            self._page.filling.abandon()
        self._page = None
        self._waiting.clear()

    def _skip_empty(self) -> None:
        """A zero-length page has no byte that would complete it."""
        while self._page is None and self._waiting and self._waiting[0].length == 0:
            self._complete(self._next_page())

    def _next_page(self) -> _Incoming:
        meta = self._waiting.popleft()
        self._page = page = _Incoming(meta)
        if not meta.length or meta.length != self._lengths[meta.codec]:
            page.code = PutCode.REFUSED
            return page
        outcome = self._store.reserve(
            self._place.namespace, self._place.shard, meta, record_bytes(meta.length)
        )
        if isinstance(outcome, PutCode):
            page.code = outcome
        else:
            page.filling = outcome
            page.target = self._arena.view(outcome.ref.slot, HEADER_BYTES, meta.length)
        return page

    def _complete(self, page: _Incoming) -> None:
        self._page = None
        filling, ref = page.filling, None
        if filling is not None and page.target is not None:
            with filling:
                page.code = self._check(page.meta, page.target)
                if page.code is PutCode.STORED:
                    header = self._header(page.meta, filling.ref)
                    self._arena.view(filling.ref.slot, 0, HEADER_BYTES)[:] = encode_header(header)
                    page.code = filling.seal()
            if page.code is PutCode.STORED:
                ref = filling.ref
        self.codes.append(page.code)
        self.refs.append(ref)

    def _check(self, meta: PageMeta, payload: memoryview) -> PutCode:
        if not self._place.payload_ok(payload, meta):
            return PutCode.REFUSED
        if meta.codec is Codec.FP8:
            try:
                check_payload(self._place.layout, payload)
            except NonFinite:
                return PutCode.NONFINITE
        return PutCode.STORED

    def _header(self, meta: PageMeta, ref: PageRef) -> RecordHeader:
        return RecordHeader(
            fingerprint=self._place.fingerprint,
            namespace_generation=self._place.generation,
            shard=self._place.shard,
            key=meta.key,
            length=meta.length,
            codec=meta.codec,
            lossy=meta.lossy,
            payload_sum=meta.payload_sum,
            origin_sum=meta.origin_sum,
            generation=ref.generation,
            # One counter numbers allocations, so it orders the copies of a key too.
            sequence=ref.generation,
            tier=ref.tier,
            slot=ref.slot,
            parent=meta.parent,
            depth=meta.depth,
            session=meta.session,
            ttl_ms=meta.ttl_ms,
            priority=meta.priority,
            boot_id=ref.boot_id,
            created_ms=0,
        )


class _Incoming:
    """One page on its way in. Without a target its bytes are counted and dropped."""

    __slots__ = ("at", "code", "filling", "meta", "target")

    def __init__(self, meta: PageMeta) -> None:
        self.meta = meta
        self.at = 0
        self.code = PutCode.STORED
        self.filling: Filling | None = None
        self.target: memoryview | None = None

    @property
    def missing(self) -> int:
        return self.meta.length - self.at

    def take(self, data: memoryview) -> int:
        n = min(self.missing, len(data))
        if self.target is not None:
            self.target[self.at : self.at + n] = data[:n]
        self.at += n
        return n


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One page of a Get. With HIT, `payload` is a view of the arena that is good until the next
    page."""

    code: GetCode
    header: RecordHeader | None = None
    payload: memoryview | None = None
    tier: Tier | None = None


class Outlet:
    """The pages of one Get, in key order. Iterate, then `close` (also when not iterated to the
    end)."""

    def __init__(
        self,
        store: Store,
        arena: HostArena,
        place: Place,
        keys: npt.NDArray[np.uint8],
        *,
        accept: frozenset[Codec],
        lossy_ok: bool,
        verify: Verify,
        sample_one_in: int,
    ) -> None:
        self._store = store
        self._arena = arena
        self._place = place
        self._keys = keys
        self._accept = accept
        self._lossy_ok = lossy_ok
        self._verify = verify
        self._sample_one_in = sample_one_in
        self._held: deque[Reading | GetCode] = deque()
        self._current: Reading | None = None
        self.corrupt = 0

    def __iter__(self) -> Iterator[Outgoing]:
        window = max(1, min(_WINDOW_PAGES, _WINDOW_BYTES // self._place.layout.raw_bytes))
        for start in range(0, len(self._keys), window):
            keys = self._keys[start : start + window]
            self._held.extend(self._store.acquire(self._place.namespace, self._place.shard, keys))
            for key in keys:
                yield self._serve(self._held.popleft(), key.tobytes())
                self._let_go()

    def close(self) -> None:
        """Ends every lease that is still held."""
        self._let_go()
        for reading in self._held:
            if isinstance(reading, Reading):
                reading.release()
        self._held.clear()

    def _let_go(self) -> None:
        if self._current is not None:
            self._current.release()
            self._current = None

    def _serve(self, reading: Reading | GetCode, key: bytes) -> Outgoing:
        """The first copy that is whole and acceptable, from the best tier down.

        CORRUPT when there was a bad one and no good one.
        """
        seen_corrupt = False
        while isinstance(reading, Reading):
            self._current = reading
            if reading.codec in self._accept and (self._lossy_ok or not reading.lossy):
                header, payload = self._load(reading, key)
                if header is not None:
                    return Outgoing(GetCode.HIT, header, payload, reading.ref.tier)
                seen_corrupt = True
                self.corrupt += 1
                self._store.condemn(reading.ref)
            ref = reading.ref
            self._let_go()
            reading = self._store.acquire_next(ref, self._place.namespace, self._place.shard, key)
        return Outgoing(GetCode.CORRUPT if seen_corrupt else reading)

    def _load(self, reading: Reading, key: bytes) -> tuple[RecordHeader | None, memoryview | None]:
        """Header and payload of a copy if both are what the index says they are."""
        try:
            header = decode_header(self._arena.view(reading.ref.slot, 0, HEADER_BYTES))
        except CorruptRecord:
            return None, None
        if header.ref != reading.ref or header.key != key or not self._place.made(header):
            return None, None
        if (header.length, header.codec) != (reading.length, reading.codec):
            return None, None
        payload = self._arena.view(reading.ref.slot, HEADER_BYTES, header.length)
        if self._is_checked(reading) and not self._place.payload_ok(payload, header):
            return None, None
        return header, payload

    def _is_checked(self, reading: Reading) -> bool:
        if self._verify is Verify.ALWAYS:
            return True
        if self._verify is Verify.OFF:
            return False
        return reading.ref.generation % self._sample_one_in == 0
