"""ListQuarantine, ReadQuarantine and ClearQuarantine: a look at the copies that were condemned.

While a record is read its slot cannot be reused; a reader that takes nothing for `get_idle_ms` is
cut off. Event loop's thread; files are read on the threads of their device.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any, cast

from kvtier.core.handles import Reading
from kvtier.core.page import PageRef, Tier
from kvtier.daemon.idle_reader import write_to_reader
from kvtier.daemon.node import Node
from kvtier.errors import Busy, DeadlineExceeded, LimitExceeded, UnknownHandle
from kvtier.packing.record import record_bytes
from kvtier.tiers.base import TierDevice
from kvtier.tiers.io_pool import IoClass
from kvtier.v1 import admin_pb2 as pb
from kvtier.v1 import page_pb2

__all__ = ["clear_quarantine", "list_quarantine", "read_quarantine"]

_TIERS = {int(tier): tier for tier in Tier}
#: Every ref is looked for in the whole table, so the store's lock is let go between so many.
_REFS_PER_TURN = 16
#: Keeps a stock client's reply limit of 4 MiB.
_PAGES_LISTED_MAX = 16_384


def list_quarantine(node: Node, _request: pb.ListQuarantineRequest) -> pb.ListQuarantineResponse:
    """The oldest 16384; GetStatus tells how many there are."""
    devices: dict[str, int] = {}
    now = time.monotonic()

    def device_of(ref: PageRef) -> int:
        if ref.tier is not Tier.NVME or node.nvme is None:
            return 0
        return devices.setdefault(node.nvme.path_of(ref.slot), len(devices) + 1)

    pages = [
        pb.QuarantinedPage(
            ref=page_pb2.PageRef(
                boot_id=ref.boot_id,
                tier=cast("page_pb2.Tier", int(ref.tier)),
                slot=ref.slot,
                generation=ref.generation,
            ),
            fingerprint=node.registry.fingerprint_of(namespace),
            shard=shard,
            key=key,
            length=length,
            codec=cast("page_pb2.Codec", int(codec)),
            device=device_of(ref),
            age_ms=max(1, round((now - verdict.at) * 1000)) if verdict.at else 0,
            reason=verdict.why,
        )
        for ref, namespace, shard, key, length, codec, verdict in (
            node.store.survey.quarantined()[:_PAGES_LISTED_MAX]
        )
    ]
    return pb.ListQuarantineResponse(pages=pages, devices=list(devices))


async def read_quarantine(node: Node, request: pb.ReadQuarantineRequest, context: Any) -> None:
    """Streams the record in chunks. Raises UnknownHandle, TierIOError, Busy, DeadlineExceeded."""
    ref = _ref(request.ref)
    reading = None if ref is None else node.store.survey.hold_quarantined(ref)
    if reading is None:
        raise UnknownHandle(
            f"no quarantined copy has generation {request.ref.generation} in"
            f" slot {request.ref.slot} of tier {request.ref.tier}",
            remedy="ListQuarantine names those whose bytes are still kept.",
        )
    with reading:
        total, chunk = record_bytes(reading.length), node.config.limits.chunk_bytes
        for at in range(0, total, chunk):
            data = await _piece(node, reading, at, min(chunk, total - at))
            await write_to_reader(node, context, pb.ReadQuarantineResponse(data=data))


async def clear_quarantine(
    node: Node, request: pb.ClearQuarantineRequest
) -> pb.ClearQuarantineResponse:
    """Raises LimitExceeded."""
    refs_max = node.config.limits.keys_per_call_max
    if len(request.refs) > refs_max:
        raise LimitExceeded(
            f"{len(request.refs)} refs, one call takes {refs_max} (limits.keys_per_call_max)",
            remedy="Clear them in several calls, or all at once by naming none.",
        )
    if not request.refs:
        return pb.ClearQuarantineResponse(pages=node.store.survey.clear_quarantine(None))
    # A ref of a tier that does not exist names no copy, as any other that is unknown.
    refs = [ref for ref in map(_ref, request.refs) if ref is not None]
    pages = 0
    for at in range(0, len(refs), _REFS_PER_TURN):
        pages += node.store.survey.clear_quarantine(refs[at : at + _REFS_PER_TURN])
        await asyncio.sleep(0)
    return pb.ClearQuarantineResponse(pages=pages)


async def _piece(node: Node, reading: Reading, at: int, size: int) -> bytes:
    """`size` bytes of the record from byte `at`."""
    slot = reading.ref.slot
    if reading.ref.tier is Tier.HOST:
        return bytes(node.arena.view(slot, at, size))
    assert node.nvme is not None, reading.ref
    devices, held = node.nvme.devices, reading.again()
    try:
        job = devices.submit(IoClass.SCRUB, slot, partial(_read, devices.tier, slot, at, size))
    except Busy:
        held.release()
        raise
    # A read that nobody waits for any more still names the slot.
    job.add_done(held.release)
    try:
        return await job.wait(devices.timeout_s)
    except TimeoutError:
        raise DeadlineExceeded(
            f"slot {slot} of the nvme tier was not read within {devices.timeout_s:g} s",
            remedy="Check the device's latency, or raise nvme.io_timeout_ms.",
        ) from None


def _read(device: TierDevice, slot: int, offset: int, size: int) -> bytes:
    data = bytearray(size)
    device.read(slot, offset, data)
    return bytes(data)


def _ref(message: page_pb2.PageRef) -> PageRef | None:
    """None for a tier that does not exist."""
    tier = _TIERS.get(int(message.tier))
    if tier is None:
        return None
    return PageRef(message.boot_id, tier, message.slot, message.generation)
