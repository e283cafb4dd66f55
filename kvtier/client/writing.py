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

from kvtier.client.buffers import Rows
from kvtier.core.page import NO_SUM, Codec, Durability, PageRef, PutCode, Tier
from kvtier.packing.checksum import payload_sum
from kvtier.packing.layout import Layout
from kvtier.transfer.planes.deadline import Deadline
from kvtier.transfer.planes.values import Hints, OpenedNamespace, OutgoingPage, PutReply

__all__ = ["PutOptions", "Writer"]

_CODES = frozenset(map(int, PutCode))
_HOST = int(Durability.HOST)
_STORED = frozenset(int(code) for code in PutCode if code.is_stored)


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOptions:
    codec: Codec
    durability: Durability
    hints: Hints
    parent: bytes
    depth: int
    is_chain: bool


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

    def settle(self, index: int, code: PutCode, ref: PageRef | None) -> None:
        """The outcome of a page that is in host memory now."""
        self.codes[index] = code
        self.reached[index] = _HOST
        self.refs[index] = ref

    @property
    def stored(self) -> int:
        """Pages that are in the cache now."""
        return sum(code in _STORED for code in self.codes)

    def parents_of(self, indices: Sequence[int]) -> list[bytes]:
        """Empty where there is none."""
        first, keys = self.options.parent, self.keys
        if not self.options.is_chain:
            return [first] * len(indices)
        return [keys[index - 1] if index else first for index in indices]

    def depths_of(self, indices: Sequence[int]) -> list[int]:
        depth = self.options.depth
        return [depth + index if self.options.is_chain else depth for index in indices]

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
            parent=self.parents_of((index,))[0],
            depth=self.depths_of((index,))[0],
        )

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
