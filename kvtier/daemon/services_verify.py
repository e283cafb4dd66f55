"""The Verify stream: one scrub of a tier, and its progress as the reader takes it.

Event loop's thread.
"""

from __future__ import annotations

from typing import Any

from kvtier.daemon.idle_reader import write_to_reader
from kvtier.daemon.node import Node
from kvtier.daemon.scrub import ScrubCounts
from kvtier.errors import LimitExceeded
from kvtier.v1 import admin_pb2 as pb

__all__ = ["verify"]

#: The least rate that may be asked for, as for scrub.bytes_per_second.
_BYTES_PER_SECOND_MIN = 64 << 10


async def verify(node: Node, request: pb.VerifyRequest, context: Any) -> None:
    """Raises Busy, LimitExceeded, DeadlineExceeded (the reader stands still, or the scrub's process
    does) and DaemonUnavailable (draining, or the process ended).
    """
    scrubber = node.scrubber
    tier = next((known for known in scrubber.tiers if int(known) == int(request.tier)), None)
    if tier is None:
        names = ", ".join(f"{known.name} ({int(known)})" for known in scrubber.tiers)
        raise LimitExceeded(
            f"tier {request.tier} is not a tier of this daemon that can be verified",
            remedy=f"Use one of {names}; GetCapabilities lists the tiers.",
        )
    rate = request.bytes_per_second or node.config.scrub.bytes_per_second
    if rate < _BYTES_PER_SECOND_MIN:
        raise LimitExceeded(
            f"bytes_per_second is {rate}, the least is {_BYTES_PER_SECOND_MIN}",
            remedy="Ask for a higher rate, or for 0: as configured (scrub.bytes_per_second).",
        )

    async def progress(counts: ScrubCounts) -> None:
        node.refuse_unless_serving()
        if counts.pages_done < counts.pages_total:
            await write_to_reader(node, context, _message(counts))

    report = await scrubber.run(tier, bytes_per_second=rate, on_progress=progress)
    await write_to_reader(node, context, _message(report.counts))


def _message(counts: ScrubCounts) -> pb.VerifyProgress:
    return pb.VerifyProgress(
        pages_done=counts.pages_done,
        pages_total=counts.pages_total,
        bytes_done=counts.bytes_done,
        pages_corrupt=counts.pages_corrupt,
        pages_unreadable=counts.io_errors,
    )
