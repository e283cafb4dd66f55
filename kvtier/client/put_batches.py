"""Puts: by shared memory as far as that goes, the rest to the daemon, cut to its limits, all inside
one deadline, every page with an outcome.

A failed call ends its put: what was answered before stands, everything else gets the outcome that
the error stands for. Errors that say "you asked wrong" go to the caller as they are.

Functions run on the connection's event loop, unless they say otherwise.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from kvtier.client.arguments import PutCall
from kvtier.client.batches import learn_generation, limits_of
from kvtier.client.codec_thread import pack
from kvtier.client.local_puts import LocalPuts
from kvtier.client.results import PutResult
from kvtier.client.writing import Writer
from kvtier.core.page import Durability, PutCode
from kvtier.errors import (
    Busy,
    DaemonUnavailable,
    DeadlineExceeded,
    DirectoryError,
    KvtierError,
    NotEnoughMemory,
    NotImplementedYet,
    StaleGeneration,
    TierIOError,
    UnknownHandle,
)
from kvtier.transfer.planes.values import OpenedNamespace, PutOpening

if TYPE_CHECKING:
    from kvtier.client.namespace import AsyncNamespace

__all__ = ["BegunPut", "begin_put", "begin_put_on_loop", "done_put", "finish_put"]

#: What an error says of each page of its call. Other errors are the caller's.
_PUT_CODES: Final[dict[type[KvtierError], PutCode]] = {
    Busy: PutCode.BUSY,
    DaemonUnavailable: PutCode.UNAVAILABLE,
    DeadlineExceeded: PutCode.TIMEOUT,
    DirectoryError: PutCode.UNAVAILABLE,
    NotEnoughMemory: PutCode.BUSY,
    StaleGeneration: PutCode.STALE_GENERATION,
    TierIOError: PutCode.UNAVAILABLE,
    UnknownHandle: PutCode.UNAVAILABLE,
}

#: What stops a put that only its deadline ends; making one takes longer than looking a page up.
_NEVER: Final = threading.Event()


@dataclass(slots=True)
class BegunPut:
    """A put of which some pages (`left`) still have to go to the daemon. `opened` is what pages
    were put under, if any were.
    """

    writer: Writer
    left: Sequence[int]
    opened: OpenedNamespace | None = None


def begin_put(ns: AsyncNamespace, call: PutCall) -> BegunPut:
    """Puts what shared memory takes. Any thread; waits for the daemon within the deadline."""
    begun, puts = _put_of(ns, call)
    if puts is not None and begun.opened is not None:
        _put_here(ns, call, begun, puts, begun.opened, _NEVER)
    return begun


async def begin_put_on_loop(ns: AsyncNamespace, call: PutCall) -> BegunPut:
    """As `begin_put`, in another thread, which has let go of the pages when this ends."""
    begun, puts = _put_of(ns, call)
    if puts is not None and begun.opened is not None:
        work = partial(_put_here, ns, call, begun, puts, begun.opened)
        await ns.link.putting.run(work, call.deadline)
    return begun


def _put_of(ns: AsyncNamespace, call: PutCall) -> tuple[BegunPut, LocalPuts | None]:
    codec, layout = call.options.codec, ns.layout

    async def packed(raw: memoryview) -> memoryview | None:
        return await ns.link.codec.run(partial(pack, codec, layout, raw), call.deadline)

    writer = Writer(layout, call.keys, call.rows, call.options, pack=packed)
    opened = ns.opened
    puts = None if opened is None or not call.keys else ns.link.local.puts(opened.boot_id)
    return BegunPut(writer, range(len(call.keys)), None if puts is None else opened), puts


def _put_here(
    ns: AsyncNamespace,
    call: PutCall,
    begun: BegunPut,
    puts: LocalPuts,
    opened: OpenedNamespace,
    stop: threading.Event,
) -> None:
    try:
        begun.left = puts.put(begun.writer, opened, call.deadline, stop)
    finally:
        ns.link.stored(opened, begun.writer.stored)


async def finish_put(ns: AsyncNamespace, call: PutCall, begun: BegunPut) -> None:
    """Sends the rest to the daemon."""
    writer, indices, deadline = begun.writer, begun.left, call.deadline
    length = ns.layout.payload_bytes(call.options.codec)
    durability = call.options.durability
    done = 0

    async def send(opened: OpenedNamespace) -> int:
        before = begun.opened
        if before is not None and _name(before) != _name(opened):
            # Opened anew meanwhile, perhaps for other weights: the pages are not of those.
            writer.fail(indices[done:], PutCode.STALE_GENERATION)
            return len(indices) - done
        limits = limits_of(ns)
        count = max(min(limits.pages_per_put_max, limits.bytes_per_call_max // length), 1)
        some = indices[done : done + count]
        opening = PutOpening(
            handle=opened.handle,
            message_bytes_max=limits.message_bytes_max,
            durability=durability,
            hints=call.options.hints,
        )
        sent: list[int] = []
        async with aclosing(writer.pages(some, opened, deadline, sent)) as pages:
            unsure = writer.take(await ns.link.plane.put(opening, pages, deadline), sent)
        ns.link.stored(opened, unsure)
        if any(writer.codes[index] == PutCode.STALE_GENERATION for index in sent):
            await learn_generation(ns, opened, deadline)
        return len(some)

    while done < len(indices):
        try:
            is_quick = durability is Durability.HOST
            done += await ns.call(send, deadline, counts_silence=is_quick)
        except KvtierError as error:
            if isinstance(error, NotImplementedYet) and durability is Durability.NVME:
                # A daemon from before there was an NVMe tier. What it can do is worth having, and
                # the result says that it is not durable.
                durability = Durability.HOST
                continue
            code = _PUT_CODES.get(type(error))
            if code is None:
                raise
            writer.fail(indices[done:], code)
            break


def _name(opened: OpenedNamespace) -> tuple[bytes, int]:
    return opened.fingerprint, opened.generation


def done_put(call: PutCall, begun: BegunPut) -> PutResult:
    """What a put came to that has ended."""
    writer = begun.writer
    return PutResult(
        bytes(writer.codes),
        writer.refs,
        reached=bytes(writer.reached),
        wanted=call.options.durability,
    )
