"""The Get stream: keys in, an Outlet read, messages out.

A message ends after `chunk_bytes` of payload. A page that ends inside a message is copied, because
its slot is let go before the message is sent; longer runs leave from the arena directly. A reader
that takes nothing for `get_idle_ms` is cut off, so that it cannot keep slots. Event loop's thread.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtier.core.page import Codec, GetCode, Tier
from kvtier.daemon.admission import ByteBudget
from kvtier.daemon.idle_reader import write_to_reader
from kvtier.daemon.node import Node
from kvtier.errors import Busy, LimitExceeded
from kvtier.transfer.outlet import Outgoing, Outlet
from kvtier.transfer.place import Place, Verify
from kvtier.transfer.wire import encode_get
from kvtier.v1 import transfer_pb2 as pb

__all__ = ["get"]

log = logging.getLogger(__name__)

#: Announcements in one message at most; also how often a run of misses lets the loop breathe.
_PAGES_PER_MESSAGE = 1024
_ACCEPT_MAX = 64
_CODECS = {int(codec): codec for codec in Codec}


async def get(
    node: Node,
    place: Place,
    keys: npt.NDArray[np.uint8],
    *,
    request: pb.GetRequest,
    context: Any,
) -> None:
    """Raises DeadlineExceeded when the reader stands still."""
    if len(request.accept) > _ACCEPT_MAX:
        raise LimitExceeded(
            f"accept has {len(request.accept)} entries, the limit is {_ACCEPT_MAX}",
            remedy="Name each codec once.",
        )
    # Codecs that this version does not know are none it could send.
    accept = frozenset(_CODECS[number] for number in request.accept if number in _CODECS)
    outlet = Outlet(
        node.store,
        node.arena,
        place,
        keys,
        accept=accept if request.accept else frozenset((Codec.RAW,)),
        lossy_ok=request.lossy_ok,
        verify=Verify.OFF if request.reader_verifies else node.verify,
        sample_one_in=node.config.host.sample_one_in,
        mover=node.nvme.mover if node.nvme else None,
    )
    async with outlet:
        with node.admission.budget() as budget:
            writer = _Writer(node, context, budget)
            async for page in outlet:
                await writer.page(page)
            await writer.flush()
        writer.ended()
        for tier, pages in outlet.corrupt.items():
            extra: dict[str, Any] = {"tier": tier.name.lower(), "pages": pages}
            if tier is Tier.NVME and node.nvme is not None:
                at = [
                    f"{node.nvme.place(ref.slot)} key {key.hex()}" for ref, key in outlet.corrupt_at
                ]
                extra["at"] = "; ".join(at)
            log.error("page.corrupt", extra=extra)


class _Writer:
    def __init__(self, node: Node, context: Any, budget: ByteBudget) -> None:
        self._node = node
        self._context = context
        self._budget = budget
        self._chunk = node.config.limits.chunk_bytes
        self._call_bytes_left = node.config.limits.bytes_per_call_max
        self._head = pb.GetResponse()
        self._pieces: list[bytes | memoryview] = []
        self._held = 0
        self._sent = 0
        self._codes: list[str] = []
        self._hits: Counter[Tier] = Counter()

    async def page(self, page: Outgoing) -> None:
        """Announces one page and takes its bytes; sends what has become a whole message."""
        code = self._admitted(page)
        self._codes.append(code.name.lower())
        if code is GetCode.HIT and page.tier is not None:
            self._hits[page.tier] += 1
        if code is GetCode.HIT and page.payload is not None:
            self._announce_hit(page)
            await self._payload(page.payload)
        else:
            self._head.pages.add(code=int(code))
        if len(self._head.pages) >= _PAGES_PER_MESSAGE:
            await self.flush()

    async def flush(self) -> None:
        """Sends what is held, if anything is."""
        if not self._head.pages and not self._held:
            return
        self._head.offset = self._sent
        message = encode_get(self._head, self._pieces)
        count = self._held
        self._head, self._pieces, self._held = pb.GetResponse(), [], 0
        await write_to_reader(self._node, self._context, message)
        self._sent += count
        self._node.admission.give(self._budget, count)

    def ended(self) -> None:
        self._node.metrics.get_ended(self._codes, self._sent, self._hits)

    def _admitted(self, page: Outgoing) -> GetCode:
        """The page's own code, or BUSY when its bytes are more than may be under way."""
        if page.code is not GetCode.HIT or page.payload is None:
            return page.code
        if len(page.payload) > self._call_bytes_left:
            return GetCode.BUSY
        try:
            self._node.admission.take(self._budget, len(page.payload))
        except Busy:
            return GetCode.BUSY
        self._call_bytes_left -= len(page.payload)
        return page.code

    def _announce_hit(self, page: Outgoing) -> None:
        header = page.header
        assert header is not None
        assert page.tier is not None
        self._head.pages.add(
            code=int(page.code),
            tier=int(page.tier),
            codec=int(header.codec),
            lossy=header.lossy,
            length=header.length,
            payload_sum=header.payload_sum,
            origin_sum=header.origin_sum,
            slot=header.slot,
            generation=header.generation,
        )

    async def _payload(self, payload: memoryview) -> None:
        at = 0
        while at < len(payload):
            take = min(self._chunk - self._held, len(payload) - at)
            piece = payload[at : at + take]
            at += take
            self._held += take
            if self._held == self._chunk:
                self._pieces.append(piece)
                await self.flush()
            else:
                self._pieces.append(bytes(piece))
