"""Watch over gRPC: what is there, then every change, for as long as the reader wants.

Promise: nothing is lost without an error; with a limit of silence a daemon that is stopped is an
error, too, which its connection shows after some twenty seconds at the earliest.

Belongs to the channel's event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from typing import Any, Final

from kvtier.errors import DeadlineExceeded
from kvtier.transfer import rpc
from kvtier.transfer.planes.deadline import Deadline
from kvtier.transfer.planes.grpc_channel import GrpcChannel, parsed
from kvtier.transfer.planes.grpc_values import residencies_from_proto
from kvtier.transfer.planes.values import Residency, ResidencyKind
from kvtier.v1 import pages_pb2

__all__ = ["next_report", "watch"]

#: Signs of life that are asked for within the time of silence that is allowed.
_ALIVE_PER_SILENCE: Final = 4


async def watch(
    channel: GrpcChannel, fingerprint: bytes, deadline: Deadline, *, silence_s: float | None
) -> AsyncGenerator[Residency, None]:
    """As Plane.watch."""
    call, count, within, is_told = None, 0, deadline, False
    alive_ms = 0 if silence_s is None else max(1, int(silence_s * 1000 / _ALIVE_PER_SILENCE))
    try:
        while True:
            async with channel.until(within) as seconds:
                if call is None:
                    request = pages_pb2.WatchRequest(fingerprint=fingerprint, alive_ms=alive_ms)
                    call = channel.callable(rpc.PAGES, "Watch")(request)
                event = parsed(await next_report(call, seconds))
            count += 1
            for change in residencies_from_proto(event, count):
                is_told |= change.kind is ResidencyKind.SNAPSHOT_END
                yield change
            if is_told:
                # From here on: what the reader did meanwhile is no silence of the daemon's.
                within = Deadline(math.inf) if silence_s is None else Deadline.after(silence_s)
    finally:
        if call is not None:
            call.cancel()


async def next_report(call: Any, seconds: float) -> Any:
    """The next message of a stream. Raises DeadlineExceeded after so long without one."""
    try:
        async with asyncio.timeout(seconds):
            return await call.read()
    except TimeoutError:
        raise DeadlineExceeded(
            f"the daemon has reported nothing for {seconds:g} s",
            remedy="see whether it is stopped or overloaded; raise `deadline`",
        ) from None
