"""Prefetch and demote: pages on their way between tiers, one outcome a key; and what is said of
a conversation's return.

Promise: an outcome for each key, within the deadline, also when the daemon is absent, stopped or
restarted; a daemon of a version without the call refuses every key. The pages move after the
answer: a lookup or a get says where they have got to.

Functions run on the connection's event loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

from kvtier.client.batches import get_code, keys_per_call, known_codes
from kvtier.core.page import GetCode
from kvtier.errors import KvtierError, NotImplementedYet
from kvtier.transfer.planes.deadline import Deadline
from kvtier.transfer.planes.values import Hints, OpenedNamespace

if TYPE_CHECKING:
    from kvtier.client.binding import Binding

__all__ = ["demote", "expect", "prefetch"]

_Ask: TypeAlias = Callable[[int, Sequence[bytes]], Awaitable[bytes]]


async def prefetch(ns: Binding, keys: Sequence[bytes], hints: Hints, deadline: Deadline) -> bytes:
    """GetCodes: HIT is in host memory or on its way there."""

    async def ask(handle: int, some: Sequence[bytes]) -> bytes:
        return await ns.link.plane.prefetch(handle, some, hints, deadline)

    return await _move(ns, keys, ask, deadline)


async def demote(ns: Binding, keys: Sequence[bytes], deadline: Deadline) -> bytes:
    """GetCodes: HIT is on NVMe or on its way there."""

    async def ask(handle: int, some: Sequence[bytes]) -> bytes:
        return await ns.link.plane.demote(handle, some, deadline)

    return await _move(ns, keys, ask, deadline)


async def expect(ns: Binding, key: bytes, hints: Hints, deadline: Deadline) -> None:
    """Says what `hints` say of the conversation that this page was the last one of. Nothing comes
    of it when the daemon cannot be asked."""

    async def send(opened: OpenedNamespace) -> bool:
        after_ms = None if hints.ended else hints.return_ms
        return await ns.link.plane.expect(opened.handle, key, after_ms, deadline)

    ns.link.local.tell_now()
    with suppress(KvtierError):
        await ns.call(send, deadline)


async def _move(ns: Binding, keys: Sequence[bytes], ask: _Ask, deadline: Deadline) -> bytes:
    codes = b""

    async def send(opened: OpenedNamespace) -> bytes:
        assert ns.limits is not None, "known since the namespace was opened"
        found = await ask(opened.handle, keys[len(codes) : len(codes) + keys_per_call(ns.limits)])
        if GetCode.STALE in found:
            ns.learn(GetCode.STALE, opened)
        return found

    while len(codes) < len(keys):
        try:
            codes += known_codes(await ns.call(send, deadline))
        except NotImplementedYet:
            return _filled(codes, GetCode.REFUSED, len(keys))
        except KvtierError as error:
            return _filled(codes, get_code(error), len(keys))
    return codes


def _filled(codes: bytes, code: GetCode, count: int) -> bytes:
    return codes + bytes([code]) * (count - len(codes))
