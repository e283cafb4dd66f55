"""Lookups, gets and deletes against the daemon: cut to its limits, all inside one deadline, every
key with an outcome.

A failed call ends its batch: what was answered before stands, everything else gets the outcome that
the error stands for. Errors that say "you asked wrong" go to the caller as they are.

Functions run on the connection's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from kvtier.client.arguments import GetCall
from kvtier.client.buffers import Allocated
from kvtier.client.codec_thread import unpack
from kvtier.client.reading import Part, Reader
from kvtier.client.results import GetResult
from kvtier.client.settings import Verify
from kvtier.core.page import KEY_BYTES, Codec, DeleteCode, GetCode
from kvtier.errors import (
    Busy,
    CorruptPage,
    CorruptRecord,
    DaemonUnavailable,
    DeadlineExceeded,
    DirectoryError,
    KvtierError,
    NotEnoughMemory,
    StaleGeneration,
    TierIOError,
    UnknownHandle,
)
from kvtier.transfer.planes.deadline import Deadline
from kvtier.transfer.planes.values import (
    Capabilities,
    GetQuery,
    Hints,
    LookupReply,
    OpenedNamespace,
)

if TYPE_CHECKING:
    from kvtier.client.namespace import AsyncNamespace

__all__ = [
    "BegunGet",
    "begin_get",
    "begin_get_on_loop",
    "delete",
    "finish_get",
    "get_code",
    "got",
    "keys_per_call",
    "learn_generation",
    "known_codes",
    "limits_of",
    "lookup",
    "lookup_here",
]

#: What an error says of each key of its call. Other errors are the caller's.
_GET_CODES: Final[dict[type[KvtierError], GetCode]] = {
    Busy: GetCode.BUSY,
    CorruptPage: GetCode.CORRUPT,
    CorruptRecord: GetCode.CORRUPT,
    DaemonUnavailable: GetCode.UNAVAILABLE,
    DeadlineExceeded: GetCode.TIMEOUT,
    DirectoryError: GetCode.UNAVAILABLE,
    NotEnoughMemory: GetCode.BUSY,
    StaleGeneration: GetCode.STALE,
    TierIOError: GetCode.IO_ERROR,
    UnknownHandle: GetCode.UNAVAILABLE,
}
#: A code of a later version says that something went wrong, and no more.
_KNOWN: Final = bytes(c if c in map(int, GetCode) else GetCode.IO_ERROR for c in range(256))


async def lookup(
    ns: AsyncNamespace,
    keys: Sequence[bytes],
    hints: Hints,
    deadline: Deadline,
    *,
    is_exact: bool = False,
) -> LookupReply:
    codes = bytearray([GetCode.UNAVAILABLE]) * len(keys)
    tiers = bytearray(len(keys))
    done = 0

    async def send(opened: OpenedNamespace) -> LookupReply:
        some = keys[done : done + keys_per_call(limits_of(ns))]
        found = await ns.link.plane.lookup(opened.handle, some, hints, deadline, is_exact=is_exact)
        _learn(ns, found.codes, opened)
        return found

    while done < len(keys):
        try:
            found = await ns.call(send, deadline)
        except KvtierError as error:
            codes[done:] = bytes([get_code(error)]) * (len(keys) - done)
            break
        end = done + len(found.codes)
        codes[done:end] = known_codes(found.codes)
        tiers[done:end] = found.tiers
        done = end
    return LookupReply(bytes(codes), bytes(tiers))


@dataclass(slots=True)
class BegunGet:
    """A get of which some pages (`left`) are still to be had from the daemon."""

    reader: Reader
    left: Sequence[int]


def begin_get(ns: AsyncNamespace, call: GetCall) -> BegunGet:
    """Takes what shared memory has. Any thread."""
    begun = _nothing_yet(ns, call)
    for _ in _local_slices(ns, call, begun):
        pass
    return begun


async def begin_get_on_loop(ns: AsyncNamespace, call: GetCall) -> BegunGet:
    """As `begin_get`, with turns for others between slices."""
    begun = _nothing_yet(ns, call)
    for _ in _local_slices(ns, call, begun):
        await asyncio.sleep(0)
    return begun


def _nothing_yet(ns: AsyncNamespace, call: GetCall) -> BegunGet:
    reader = Reader(ns.layout, call.keys, call.rows, verify=ns.link.settings.verify)
    return BegunGet(reader, range(len(call.keys)))


def _local_slices(ns: AsyncNamespace, call: GetCall, begun: BegunGet) -> Iterator[None]:
    opened = ns.opened
    reads = None if opened is None else ns.link.local.reads(opened.boot_id)
    if reads is not None and opened is not None and call.keys:
        begun.left = yield from reads.get(begun.reader, call.options, opened, call.deadline)


def lookup_here(ns: AsyncNamespace, keys: Sequence[bytes], *, is_exact: bool) -> LookupReply | None:
    """What the shared directory says, None where only the daemon can. Any thread."""
    opened = ns.opened
    reads = None if opened is None else ns.link.local.reads(opened.boot_id)
    if reads is None or opened is None or not keys:
        return None
    return reads.lookup(ns.layout, opened, keys, is_exact=is_exact)


async def finish_get(ns: AsyncNamespace, call: GetCall, begun: BegunGet) -> None:
    """Gets the rest from the daemon."""
    failed = await _get(ns, begun.reader, begun.left, call)
    if failed:
        # Bytes that are not right can be a race with an entry that changed: once more, then it
        # counts.
        await _get(ns, begun.reader, failed, call, is_retry=True)


def got(ns: AsyncNamespace, call: GetCall, begun: BegunGet) -> GetResult:
    """What a get came to that has ended."""
    reader = begun.reader
    pages: Sequence[bytearray | None] = ()
    if isinstance(call.rows, Allocated):
        pages = [
            page if code == GetCode.HIT else None
            for page, code in zip(call.rows.pages, reader.codes, strict=True)
        ]
    return GetResult(reader.columns(), page_tokens=ns.layout.page_tokens, pages=pages)


async def _get(
    ns: AsyncNamespace,
    reader: Reader,
    indices: Sequence[int],
    call: GetCall,
    *,
    is_retry: bool = False,
) -> list[int]:
    """Gets these keys; the indices of those whose bytes came and were not right."""
    failed: list[int] = []
    done = 0
    part: Part | None = None

    async def unpacked(codec: Codec, payloads: list[memoryview]) -> list[memoryview | None]:
        work = partial(unpack, codec, reader.layout, payloads)
        return await ns.link.codec.run(work, call.deadline)

    async def send(opened: OpenedNamespace) -> Part:
        nonlocal part
        limits = limits_of(ns)
        count = min(keys_per_call(limits), limits.bytes_per_call_max // ns.layout.raw_bytes)
        some = indices[done : done + max(count, 1)]
        part = Part(
            reader,
            some,
            opened,
            options=call.options,
            unpack=unpacked,
            always_verify=is_retry,
        )
        query = GetQuery(
            handle=opened.handle,
            keys=[call.keys[index] for index in some],
            accept=call.options.accept,
            lossy_ok=call.options.lossy_ok,
            hints=call.options.hints,
            # Once is enough, where the bytes end up. Bytes that were wrong there are for the daemon
            # to judge, which then looks for another copy.
            reader_verifies=not is_retry and ns.link.settings.verify is Verify.ALWAYS,
        )
        await ns.link.plane.get(query, part, call.deadline)
        _learn(ns, bytes(reader.codes[index] for index in some), opened)
        return part

    while done < len(indices):
        part = None
        try:
            part = await ns.call(send, call.deadline)
        except KvtierError as error:
            code = get_code(error)
            answered = set() if part is None else part.answered
            for index in indices[done:]:
                if index not in answered:
                    # On a retry the pages are known to be bad: that they could not be got again
                    # does not make them less so.
                    reader.codes[index] = GetCode.CORRUPT if is_retry else code
            return failed if part is None else failed + part.failed
        done += part.count
        failed += part.failed
    return failed


async def delete(ns: AsyncNamespace, keys: Sequence[bytes], deadline: Deadline) -> bytes:
    """DeleteCodes. Raises when the daemon does not answer; earlier parts are then deleted."""
    codes = b""

    async def send(opened: OpenedNamespace) -> bytes:
        some = keys[len(codes) : len(codes) + keys_per_call(limits_of(ns))]
        found = await ns.link.plane.delete(opened.handle, some, deadline)
        if DeleteCode.STALE in found:
            ns.learn(GetCode.STALE, opened)
        return found

    try:
        while len(codes) < len(keys):
            codes += await ns.call(send, deadline)
    except StaleGeneration:
        codes += bytes([DeleteCode.STALE]) * (len(keys) - len(codes))
    return codes


def known_codes(codes: bytes) -> bytes:
    """GetCodes as the daemon gave them, each one a code of this version."""
    return codes.translate(_KNOWN)


def keys_per_call(limits: Capabilities) -> int:
    """Keys that one call takes: as the daemon says, and as fit a message."""
    return max(min(limits.keys_per_call_max, limits.message_bytes_max // 64), 1)


def limits_of(ns: AsyncNamespace) -> Capabilities:
    """Of the daemon that has the namespace open."""
    assert ns.limits is not None, "known since the namespace was opened"
    return ns.limits


def _learn(ns: AsyncNamespace, codes: bytes, opened: OpenedNamespace) -> None:
    if GetCode.STALE in codes:
        ns.learn(GetCode.STALE, opened)


async def learn_generation(ns: AsyncNamespace, opened: OpenedNamespace, deadline: Deadline) -> None:
    """Has `ns` learn whether the generation of this handle has ended. A put that is STALE does not
    say: the slot of one page may have been taken from it.
    """
    try:
        found = await ns.link.plane.lookup(opened.handle, [bytes(KEY_BYTES)], Hints(), deadline)
    except StaleGeneration:
        ns.learn(GetCode.STALE, opened)
    except KvtierError:
        return  # the next call finds out
    else:
        _learn(ns, found.codes, opened)


def get_code(error: KvtierError) -> GetCode:
    """What the error of a call says of each of its keys. Raises the error if it is the caller's."""
    code = _GET_CODES.get(type(error))
    if code is None:
        raise error
    return code
