"""Packing and unpacking beside the event loop, in one thread of the connection.

Promise: the loop goes on while a page is packed (0.3 ms a MiB with numba, milliseconds with torch)
and while either is loaded, and numba's code compiled where no earlier process has, which takes
seconds; whoever waits gets DeadlineExceeded in time. The work sees private memory alone, never the
caller's: what is still under way when a call has ended goes on and is thrown away.

`run` belongs to the connection's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kvtier.core.page import Codec
from kvtier.errors import ClientClosed, DeadlineExceeded, NonFinite
from kvtier.packing.codec import decode, encode
from kvtier.packing.fp8_backend import require_backend
from kvtier.packing.layout import Layout
from kvtier.transfer.planes.deadline import Deadline, OwnDelay

__all__ = ["CodecThread", "pack", "require_packer", "unpack"]

T = TypeVar("T")


class CodecThread:
    """The thread is started by the first work."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._is_closed = False

    async def run(self, work: Callable[[], T], deadline: Deadline) -> T:
        """What `work` gives. Raises DeadlineExceeded, ClientClosed; work that was not begun
        then never is.
        """
        if self._has_ended():
            raise _closed()
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="kvtier-codec")
        seconds = deadline.remaining()
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.wrap_future(self._executor.submit(work))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._has_ended() and task is not None and not task.cancelling():
                raise _closed() from None  # by `close`, not by the caller
            raise
        except TimeoutError:
            raise DeadlineExceeded(
                "the deadline passed while a page was packed or unpacked",
                remedy="raise `deadline`; call kvtier.packing.fp8.warm_up() when the engine "
                "starts, as the first page waits for that",
            ) from OwnDelay()

    def close(self) -> None:
        """Ends the thread when it is done with what it does now."""
        self._is_closed = True
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)

    def _has_ended(self) -> bool:
        return self._is_closed


def _closed() -> ClientClosed:
    return ClientClosed("the connection is closed", remedy="connect again")


def require_packer() -> None:
    """Raises MissingExtra where fp8 pages cannot be packed, without loading what packs them."""
    require_backend()


def pack(codec: Codec, layout: Layout, raw: memoryview) -> memoryview | None:
    """The stored payload of a raw one; None for numbers that cannot be packed."""
    try:
        return encode(codec, layout, raw).data
    except NonFinite:
        return None


def unpack(codec: Codec, layout: Layout, payloads: Sequence[memoryview]) -> list[memoryview | None]:
    """Raw payloads of stored ones; None for scales or codes that no packer makes."""
    made: list[memoryview | None] = []
    for payload in payloads:
        try:
            made.append(decode(codec, layout, payload).data)
        except NonFinite:
            made.append(None)
    return made
