"""The pages of one Put: bytes of a stream into verified, sealed pages of the host tier.

Completion is one value a page, made once, by the code that verified the bytes: copy -> verify ->
publish (seal) -> count. An Intake does not block and belongs to one call; it must be closed, which
gives back every slot it holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from kvtier.core.handles import Filling, Reading
from kvtier.core.page import KEY_BYTES, NO_SUM, Codec, PageMeta, PageRef, PutCode
from kvtier.core.store import Store
from kvtier.errors import ChunkError, KeyLengthError, LimitExceeded, NonFinite
from kvtier.packing.fp8_check import check_payload
from kvtier.packing.record import HEADER_BYTES, encode_header, record_bytes
from kvtier.tiers.crash_points import crash_point
from kvtier.tiers.host import HostArena
from kvtier.transfer.place import Place, Verify, Why, failed, load

__all__ = ["Intake"]


class Intake:
    """The pages of one Put, in the order they were announced.

    A page that breaks a rule gets its code and its bytes are passed over; a stream that breaks a
    rule raises ChunkError (or KeyLengthError, LimitExceeded) and what was not sealed by then is
    given back by `close`.
    """

    def __init__(
        self,
        store: Store,
        arena: HostArena,
        place: Place,
        *,
        pages_max: int,
        bytes_max: int,
        verify: Verify,
    ) -> None:
        self._store = store
        self._arena = arena
        self._place = place
        self._lengths = {Codec.RAW: place.layout.raw_bytes, Codec.FP8: place.layout.fp8_bytes}
        self._verify = verify
        self._pages_max = pages_max
        self._bytes_max = bytes_max
        self._waiting: deque[PageMeta] = deque()
        self._announced_pages = 0
        self._announced_bytes = 0
        self._received = 0
        self._page: _Incoming | None = None
        self.codes: list[PutCode] = []
        self.refs: list[PageRef | None] = []
        self.keys: list[bytes] = []  # of the pages that have their code

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
        if not self._obeys_rules(meta):
            page.code = PutCode.REFUSED
            return page
        outcome = self._reserve(meta)
        if outcome is PutCode.EXISTS and self._drop_if_corrupt(meta.key):
            outcome = self._reserve(meta)
        if isinstance(outcome, PutCode):
            page.code = outcome
        else:
            page.filling = outcome
            page.target = self._arena.view(outcome.ref.slot, HEADER_BYTES, meta.length)
            # What follows the payload in its slot is of an earlier page, and goes to NVMe with it.
            end = HEADER_BYTES + meta.length
            padding = record_bytes(meta.length) - end
            self._arena.view(outcome.ref.slot, end, padding)[:] = bytes(padding)
        return page

    def _obeys_rules(self, meta: PageMeta) -> bool:
        """The length is the layout's, and a packed page admits that it is not what was computed."""
        if not meta.length or meta.length != self._lengths[meta.codec]:
            return False
        return meta.codec is Codec.RAW or (meta.lossy and meta.origin_sum != NO_SUM)

    def _reserve(self, meta: PageMeta) -> Filling | PutCode:
        return self._store.reserve(
            self._place.namespace, self._place.shard, meta, record_bytes(meta.length)
        )

    def _drop_if_corrupt(self, key: bytes) -> bool:
        """Where gets do not verify, a put is the chance to find that the page there is damaged."""
        if self._verify is Verify.ALWAYS:
            return False
        keys = np.frombuffer(key, np.uint8).reshape(1, KEY_BYTES)
        (reading,) = self._store.acquire(self._place.namespace, self._place.shard, keys)
        if not isinstance(reading, Reading):
            return True
        with reading:
            whole = load(self._arena, self._place, reading, key, check_payload=True)
            return whole is None and self._store.condemn(reading.ref, failed(Why.PUT))

    def _complete(self, page: _Incoming) -> None:
        self._page = None
        filling, ref = page.filling, None
        if filling is not None and page.target is not None:
            with filling:
                page.code = self._check(page.meta, page.target)
                if page.code is PutCode.STORED:
                    header = self._place.header(page.meta, filling.ref)
                    self._arena.view(filling.ref.slot, 0, HEADER_BYTES)[:] = encode_header(header)
                    crash_point("put.verified")
                    page.code = filling.seal()
                    crash_point("put.sealed")
            if page.code is PutCode.STORED:
                ref = filling.ref
        self.codes.append(page.code)
        self.refs.append(ref)
        self.keys.append(page.meta.key)

    def _check(self, meta: PageMeta, payload: memoryview) -> PutCode:
        if not self._place.payload_ok(payload, meta):
            return PutCode.REFUSED
        if meta.codec is Codec.FP8:
            try:
                check_payload(self._place.layout, payload)
            except NonFinite:
                return PutCode.NONFINITE
        return PutCode.STORED


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
