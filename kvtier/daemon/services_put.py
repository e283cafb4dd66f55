"""The Put stream: messages in, an Intake fed, one answer out.

Whatever ends the call (the client, its deadline, silence, a broken rule), the Intake is closed, so
that no slot stays taken; pages that were sealed by then stay. Event loop's thread; a long message
is taken in slices, so that the loop serves others meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy as np

from kvtier.core.page import KEY_BYTES, NO_SUM, SUM_BYTES, Codec, Durability, PageMeta, PutCode
from kvtier.daemon.admission import ByteBudget
from kvtier.daemon.node import Node
from kvtier.daemon.sessions import Handle
from kvtier.daemon.tracing import log_trace
from kvtier.errors import ChunkError, DeadlineExceeded, LimitExceeded, NotImplementedYet
from kvtier.packing.record import SESSION_BYTES_MAX
from kvtier.transfer.intake import Intake
from kvtier.transfer.place import Place
from kvtier.transfer.wire import PutMessage
from kvtier.v1 import transfer_pb2 as pb

__all__ = ["put"]

#: Bytes taken between two looks at the clock, and the longest stretch without a turn for others.
_SLICE_BYTES = 128 << 10
_SLICE_PAGES = 8
_STRETCH_S = 0.0005
_CODECS = {int(codec): codec for codec in Codec}


async def put(node: Node, requests: AsyncIterator[PutMessage], context: Any) -> pb.PutResponse:
    """Raises UnknownHandle, ChunkError, LimitExceeded, Busy, DeadlineExceeded."""
    idle_s = node.config.limits.put_idle_ms / 1000
    loop = asyncio.get_running_loop()
    with ExitStack() as stack:
        call: _PutCall | None = None
        try:
            async with asyncio.timeout(idle_s) as silence:
                async for message in requests:
                    if call is None:
                        call = _begin(node, message, stack)
                    elif message.open is not None:
                        raise ChunkError(
                            "a second `open`", remedy="Send `open` in the first message alone."
                        )
                    await call.take(message)
                    silence.reschedule(loop.time() + idle_s)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the put sent nothing for {idle_s:g} s (limits.put_idle_ms)",
                remedy="Send without long pauses, or raise limits.put_idle_ms.",
            ) from None
        if call is None:
            raise ChunkError("the put has no message", remedy="Begin with a message with `open`.")
        call.intake.finish()
        return await call.answer()


def _begin(node: Node, message: PutMessage, stack: ExitStack) -> _PutCall:
    opened = message.open
    if opened is None:
        raise ChunkError(
            "the first message of a put has no `open`", remedy="Name the handle in `open` first."
        )
    if int(opened.durability) == Durability.NVME and node.nvme is None:
        raise NotImplementedYet(
            "durability NVME: this daemon has no NVMe tier",
            remedy="Use durability HOST, or give the daemon nvme.paths.",
        )
    if int(opened.durability) not in (0, Durability.HOST, Durability.NVME):
        raise ChunkError(
            f"durability {opened.durability} is unknown", remedy="Use HOST (1) or NVME (2)."
        )
    if len(opened.session.encode()) > SESSION_BYTES_MAX:
        raise LimitExceeded(
            f"session has {len(opened.session.encode())} bytes, the limit is {SESSION_BYTES_MAX}",
            remedy="Use a shorter name of the conversation.",
        )
    log_trace("Put", opened.traceparent)
    handle = stack.enter_context(node.sessions.in_use(opened.handle))
    budget = stack.enter_context(node.admission.budget())
    intake = stack.enter_context(
        closing(
            Intake(
                node.store,
                node.arena,
                handle.bound,
                pages_max=node.config.limits.pages_per_put_max,
                bytes_max=node.config.limits.bytes_per_call_max,
                verify=node.verify,
            )
        )
    )
    return _PutCall(node, opened, intake, budget, handle=handle)


class _PutCall:
    def __init__(
        self,
        node: Node,
        opened: pb.PutOpen,
        intake: Intake,
        budget: ByteBudget,
        *,
        handle: Handle[Place],
    ) -> None:
        self._node = node
        self._handle = handle
        self._opened = opened
        self._budget = budget
        self._announced = 0
        self._bytes = 0
        self.intake = intake
        # A page costs its own time, however small it is.
        self._slice = min(_SLICE_BYTES, _SLICE_PAGES * handle.bound.layout.raw_bytes)

    async def take(self, message: PutMessage) -> None:
        """One message. Raises what `put` raises."""
        limit = self._node.config.limits.message_bytes_max
        if len(message.data) > limit:
            raise LimitExceeded(
                f"a message carries {len(message.data)} bytes, the limit is {limit} "
                "(message_bytes_max)",
                remedy="Cut the run of bytes into shorter chunks.",
            )
        if message.pages:
            metas = self._metas(message.pages)
            self.intake.announce(metas)
            self._node.admission.take(self._budget, sum(meta.length for meta in metas))
        loop = asyncio.get_running_loop()
        since = loop.time()
        for at in range(0, len(message.data), self._slice):
            self.intake.feed(message.offset + at, message.data[at : at + self._slice])
            if loop.time() - since > _STRETCH_S:
                await asyncio.sleep(0)
                since = loop.time()
        self._bytes += len(message.data)

    async def answer(self) -> pb.PutResponse:
        """When the pages are as durable as was asked, or it is clear that they do not become so."""
        codes, refs = self.intake.codes, self.intake.refs
        reached = await self._reached()
        self._node.metrics.put_ended((code.name.lower() for code in codes), self._bytes)
        run = next((i for i, code in enumerate(codes) if not code.is_stored), len(codes))
        assert all(isinstance(code, PutCode) for code in codes)
        return pb.PutResponse(
            codes=[int(code) for code in codes],  # type: ignore[misc]
            leading_run=run,
            boot_id=self._node.boot_id,
            slots=[ref.slot if ref else 0 for ref in refs],
            generations=[ref.generation if ref else 0 for ref in refs],
            reached=[int(durability) for durability in reached],  # type: ignore[misc]
        )

    async def _reached(self) -> list[Durability]:
        nvme, place, codes = self._node.nvme, self._handle.bound, self.intake.codes
        reached = [Durability.HOST] * len(codes)
        scope = place.namespace, place.shard
        stored = [i for i, code in enumerate(codes) if code.is_stored]
        keys = [self.intake.keys[i] for i in stored]
        self._node.unflushed.stored(self._handle.session_id, scope, keys)
        if nvme is None:
            return reached
        if int(self._opened.durability) != Durability.NVME:
            nvme.tiering.stored(scope, keys)
            return reached
        array = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)
        is_durable = await nvme.tiering.make_durable(scope, array)
        for i, durable in zip(stored, is_durable.tolist(), strict=True):
            reached[i] = Durability.NVME if durable else Durability.HOST
        return reached

    def _metas(self, pages: Sequence[pb.PutPage]) -> list[PageMeta]:
        metas = [self._meta(page, self._announced + i) for i, page in enumerate(pages)]
        self._announced += len(metas)
        return metas

    def _meta(self, page: pb.PutPage, number: int) -> PageMeta:
        codec = _CODECS.get(page.codec)
        if codec is None:
            raise ChunkError(
                f"page {number}: codec {page.codec} is unknown",
                remedy="Use a codec of GetCapabilities.",
            )
        if len(page.payload_sum) != SUM_BYTES or len(page.origin_sum) not in (0, SUM_BYTES):
            raise ChunkError(
                f"page {number}: payload_sum has {len(page.payload_sum)} bytes, "
                f"origin_sum {len(page.origin_sum)}",
                remedy=f"Both are {SUM_BYTES} bytes; origin_sum may be absent.",
            )
        return PageMeta(
            key=page.key,
            length=page.length,
            codec=codec,
            payload_sum=page.payload_sum,
            origin_sum=page.origin_sum or NO_SUM,
            lossy=page.lossy,
            parent=page.parent,
            depth=page.depth,
            session=self._opened.session,
            ttl_ms=self._opened.ttl_ms,
            priority=self._opened.priority,
        )
