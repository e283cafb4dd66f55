"""A put: payload sums from the source bytes, packing if asked for, one outcome a page.

The sum is made here, from the memory the caller passed (or from the one contiguous copy of it),
before anything is sent; from then on everyone only compares. A page that is to be packed is copied
to private memory first and summed and packed from that copy, so that the sum of its origin is that
of the bytes that were packed. A page that cannot be packed gets NONFINITE and the others go on.

A Writer belongs to one call.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtier.client.buffers import Rows
from kvtier.core.page import KEY_BYTES, NO_SUM, Codec, Durability, PageRef, PutCode, Tier
from kvtier.packing.checksum import payload_sum
from kvtier.packing.layout import Layout
from kvtier.transfer.planes.deadline import Deadline
from kvtier.transfer.planes.values import Hints, OpenedNamespace, OutgoingPage, PutReply

__all__ = ["Names", "PutOptions", "Writer"]

_CODES = frozenset(map(int, PutCode))
_HOST = int(Durability.HOST)
_NEW = int(PutCode.STORED)
_STORED = frozenset(int(code) for code in PutCode if code.is_stored)


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOptions:
    codec: Codec
    durability: Durability
    hints: Hints
    parent: bytes
    depth: int
    is_chain: bool


@dataclass(frozen=True, slots=True)
class Names:
    """Of n pages: keys and parents, shape (n, 32), zeros where there is none; depths, (n,)."""

    keys: NDArray[np.uint8]
    parents: NDArray[np.uint8]
    depths: NDArray[np.uint32]


class Writer:
    """The outcomes of one put while they come in. Every page is UNAVAILABLE until it has one."""

    def __init__(
        self,
        layout: Layout,
        keys: Sequence[bytes],
        rows: Rows,
        options: PutOptions,
        *,
        pack: Callable[[memoryview], Awaitable[memoryview | None]],
    ) -> None:
        self._pack = pack
        self.layout = layout
        self.keys = keys
        self.options = options
        self.rows = rows
        self.codes = bytearray([PutCode.UNAVAILABLE]) * len(keys)
        self.reached = bytearray(len(keys))  # Durability numbers, 0 where the daemon says nothing
        self.refs: list[PageRef | None] = [None] * len(keys)

    async def pages(
        self, indices: Sequence[int], handle: OpenedNamespace, deadline: Deadline, sent: list[int]
    ) -> AsyncGenerator[OutgoingPage, None]:
        """The pages of one call, each made when its turn comes; `sent` grows by those that go out.

        Raises DeadlineExceeded between two pages.
        """
        for index in indices:
            deadline.remaining()
            data = self.rows.direct(index) if self.options.codec is Codec.RAW else None
            if data is None:
                data = self.rows.load(index)
            page = await self._page(index, handle, data)
            if page is None:
                self.codes[index] = PutCode.NONFINITE
            else:
                sent.append(index)
                yield page

    def take(self, reply: PutReply, sent: Sequence[int]) -> int:
        """The daemon's outcome of the pages that went out. How many are stored and not durable."""
        unsure = 0
        for place, index in enumerate(sent):
            code = reply.codes[place]
            self.codes[index] = code if code in _CODES else PutCode.UNAVAILABLE
            if code in _STORED:
                self.reached[index] = reply.reached[place]
                unsure += reply.reached[place] != Durability.NVME
            if code == PutCode.STORED and reply.generations[place]:
                self.refs[index] = PageRef(
                    reply.boot_id, Tier.HOST, reply.slots[place], reply.generations[place]
                )
        return unsure

    def settle(
        self, indices: Sequence[int], codes: bytes, refs: Sequence[PageRef] = ()
    ) -> list[int]:
        """The outcomes of pages that are in host memory now, those stored at `refs`; which of them
        are not, and stay without one.
        """
        left = []
        for at, (index, code) in enumerate(zip(indices, codes, strict=True)):
            if code not in _STORED:
                left.append(index)
                continue
            self.codes[index] = code
            self.reached[index] = _HOST
            if code == _NEW:
                self.refs[index] = refs[at]
        return left

    @property
    def stored(self) -> int:
        """Pages that are in the cache now."""
        return sum(code in _STORED for code in self.codes)

    def names(self) -> Names:
        """Those of all pages."""
        options, count = self.options, len(self.keys)
        keys, first = b"".join(self.keys), options.parent or bytes(KEY_BYTES)
        parents = (first + keys)[: len(keys)] if options.is_chain else first * count
        depths = np.full(count, options.depth, "<u4")
        if options.is_chain:
            depths += np.arange(count, dtype="<u4")
        return Names(_rows(keys), _rows(parents), depths)

    def fail(self, indices: Sequence[int], code: PutCode) -> None:
        """The outcome of pages whose call failed; what was refused before sending stays refused."""
        for index in indices:
            if self.codes[index] != PutCode.NONFINITE:
                self.codes[index] = code

    async def _page(
        self, index: int, handle: OpenedNamespace, raw: memoryview
    ) -> OutgoingPage | None:
        options = self.options
        raw_sum = self._sum(index, handle, Codec.RAW, raw)
        data, origin_sum = raw, NO_SUM
        parent, depth = self._place(index)
        if options.codec is not Codec.RAW:
            packed = await self._pack(raw)
            if packed is None:
                return None
            data, origin_sum = packed, raw_sum
        return OutgoingPage(
            key=self.keys[index],
            codec=options.codec,
            payload_sum=raw_sum
            if options.codec is Codec.RAW
            else self._sum(index, handle, options.codec, data),
            data=data,
            origin_sum=origin_sum,
            lossy=options.codec is not Codec.RAW,
            parent=parent,
            depth=depth,
        )

    def _place(self, index: int) -> tuple[bytes, int]:
        """Parent, empty where there is none, and depth of a page."""
        options = self.options
        if not options.is_chain:
            return options.parent, options.depth
        return self.keys[index - 1] if index else options.parent, options.depth + index

    def _sum(self, index: int, handle: OpenedNamespace, codec: Codec, data: memoryview) -> bytes:
        return payload_sum(
            data,
            key=self.keys[index],
            fingerprint=handle.fingerprint,
            namespace_generation=handle.generation,
            shard=self.layout.shard.index,
            codec=codec,
            length=len(data),
        )


def _rows(keys: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES)
