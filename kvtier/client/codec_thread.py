"""Packing and unpacking beside the event loop, in one thread of the connection.

Promise: the loop goes on while a page is packed, which takes milliseconds a MiB, and while torch is
loaded, which takes seconds; whoever waits gets DeadlineExceeded in time. The work sees private
memory alone, never the caller's: what is still under way when a call has ended goes on and is
thrown away.

`run` belongs to the connection's event loop.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import TypeVar

from kvtier.core.page import Codec
from kvtier.errors import ClientClosed, DeadlineExceeded, MissingExtra, NonFinite
from kvtier.packing._torch import load_torch
from kvtier.packing.codec import decode, encode
from kvtier.packing.layout import Layout
from kvtier.transfer.planes.deadline import Deadline, OwnDelay

__all__ = ["CodecThread", "pack", "require_torch", "unpack"]

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
                remedy="raise `deadline`; import torch when the engine starts, as the first page "
                "waits for that",
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


def require_torch() -> None:
    """Raises MissingExtra where torch is not installed, without loading it."""
    if sys.modules.get("torch") is None and find_spec("torch") is None:
        raise MissingExtra(
            "packing and unpacking fp8 pages needs torch", remedy="pip install torch"
        )


def pack(codec: Codec, layout: Layout, raw: memoryview) -> memoryview | None:
    """The stored payload of a raw one; None for numbers that cannot be packed."""
    load_torch()
    try:
        return encode(codec, layout, raw).data
    except NonFinite:
        return None


def unpack(codec: Codec, layout: Layout, payloads: Sequence[memoryview]) -> list[memoryview | None]:
    """Raw payloads of stored ones; None for scales or codes that no packer makes."""
    load_torch()
    made: list[memoryview | None] = []
    for payload in payloads:
        try:
            made.append(decode(codec, layout, payload).data)
        except NonFinite:
            made.append(None)
    return made
