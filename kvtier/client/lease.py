"""A lease: pages that stay where they are while it is held.

The pages are pinned first, so that none of them can be evicted meanwhile. `views` and `tensors`
then give the daemon's own memory where this connection reads it (no copy at all), and copies where
not; `sources` says which. A view counts for nothing before `verify`: the order is

    views -> the engine copies out of them -> verify -> use what it says is a HIT -> release

Why that is safe is said in `local_lease`. `pages` and `fetch` give copies, verified already.

A lease ends with its `with` block, at its deadline unless renewed, or with the connection: a daemon
closes the session of a client that makes no call for `session_ttl_s` of its capabilities, so renew
a lease that is held for long. What is said of it is what this side knows: nothing is held after the
deadline, and nothing once a call of the connection has found that the daemon was restarted.

Belongs to the event loop of its connection. A lease is taken once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from kvtier.client.arguments import GetCall, milliseconds
from kvtier.client.batches import keys_per_call
from kvtier.client.link import Within
from kvtier.client.local_lease import LeaseViews, ViewSource, segments
from kvtier.client.results import GetResult, leading_run
from kvtier.core.page import GetCode, LeaseCode
from kvtier.errors import (
    AvailabilityError,
    Busy,
    KvtierError,
    LeaseExpired,
    StaleGeneration,
    UnknownHandle,
)
from kvtier.packing._torch import load_torch
from kvtier.transfer.planes.deadline import Deadline
from kvtier.transfer.planes.values import OpenedNamespace

if TYPE_CHECKING:
    import torch

    from kvtier.client.namespace import AsyncNamespace

__all__ = ["AsyncLease"]


class AsyncLease:
    """Made by `ns.lease(keys)`, held inside `async with`. A key that is not HIT is not held."""

    def __init__(
        self, ns: AsyncNamespace, keys: list[bytes], *, ttl: float, deadline: float | None
    ) -> None:
        self._ns = ns
        self._keys = keys
        self._ttl_ms = milliseconds("ttl", ttl)
        self._deadline = deadline
        self._lease_ids: list[int] = []
        self._pinned: OpenedNamespace | None = None  # what all of them were taken under
        self._codes = bytes([GetCode.UNAVAILABLE]) * len(keys)
        self._granted_ms = 0
        self._ends_at = 0.0  # by time.monotonic()
        self._is_over = False
        self._views = LeaseViews(ns, keys)

    @property
    def reasons(self) -> list[GetCode]:
        """The outcome of each key: HIT is held. UNAVAILABLE is not held, or not any more."""
        return [GetCode(code) for code in self._present_codes()]

    @property
    def prefix(self) -> int:
        """How many keys from the first on are held."""
        return leading_run(self._present_codes(), GetCode.HIT)

    @property
    def ttl(self) -> float:
        """Seconds that the daemon grants from taking or renewing on; 0 if nothing is held."""
        return self._granted_ms / 1000 if GetCode.HIT in self._present_codes() else 0.0

    @property
    def sources(self) -> list[ViewSource]:
        """Where the view of each key comes from: IN_PLACE is no copy, all others say why not."""
        return list(self._views.sources)

    @property
    def in_place(self) -> list[bool]:
        """Of which keys the view is the daemon's own memory, which counts only after `verify`."""
        return [source is ViewSource.IN_PLACE for source in self._views.sources]

    async def __aenter__(self) -> AsyncLease:
        await self.take()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.release()

    async def take(self, *, deadline: Within = None) -> None:
        """Pins the pages. A daemon that does not answer leaves every key UNAVAILABLE or TIMEOUT.

        If it is cancelled, what the daemon pinned is given back behind the caller's back.
        """
        taking = asyncio.ensure_future(self._take(self.within(deadline)))
        try:
            await asyncio.shield(taking)
        except asyncio.CancelledError:
            self._ns.link.in_background(self._give_back(taking))
            raise

    async def _take(self, deadline: Deadline) -> None:
        codes = b""

        async def send(opened: OpenedNamespace) -> None:
            nonlocal codes
            assert self._ns.limits is not None, "known since the namespace was opened"
            if self._pinned != opened:
                # Another session or generation than that of the batches before: those pins have
                # ended, or are of pages that no longer count. From the start.
                codes, self._granted_ms = b"", 0
                if self._pinned is not None and self._pinned.session_id != opened.session_id:
                    self._lease_ids.clear()
                self._pinned = opened
            some = self._keys[len(codes) : len(codes) + keys_per_call(self._ns.limits)]
            began = time.monotonic()
            try:
                reply = await self._ns.link.plane.pin(opened.handle, some, self._ttl_ms, deadline)
            except UnknownHandle:
                codes, self._granted_ms = b"", 0
                self._lease_ids.clear()
                raise
            codes += reply.codes
            if reply.lease_id:
                self._lease_ids.append(reply.lease_id)
                if not self._granted_ms:
                    self._grant(reply.ttl_ms, began)  # the first batch ends first

        failed = GetCode.UNAVAILABLE
        try:
            while len(codes) < len(self._keys):
                await self._ns.call(send, deadline)
        except StaleGeneration:
            failed = GetCode.STALE
        except Busy:
            failed = GetCode.BUSY
        except TimeoutError:
            failed = GetCode.TIMEOUT
        except (AvailabilityError, UnknownHandle):
            self._ns.link.check_usable()
        self._codes = codes + bytes([failed]) * (len(self._keys) - len(codes))

    async def fetch(self, *, deadline: Within = None) -> GetResult:
        """Copies of the pages, also of those that are not held but there."""
        within = self.within(deadline)
        call = GetCall.of(self._ns.layout, self._keys, None, None, {}, deadline=within)
        return await self._ns.send_get(call)

    async def pages(self, *, deadline: Within = None) -> Sequence[bytearray | None]:
        """The raw bytes of each page, a verified copy; None where it is not there."""
        return (await self.fetch(deadline=deadline)).pages

    async def views(
        self, *, lossy_ok: bool = False, deadline: Within = None
    ) -> list[memoryview | None]:
        """The raw bytes of each page that is held, read-only; None where there is none.

        Where `in_place` says so it is the daemon's memory itself: copy out of it, or read it on the
        spot, and then ask `verify`; until that says HIT the page is not one. A page that cannot be
        viewed in place comes as a copy, verified already. With `lossy_ok` also pages that a codec
        has rounded, which `sources` calls PACKED unless they were unpacked in host memory.

        A view is mapped for as long as somebody holds it, also when the daemon has died; from
        `release` on it may show other bytes at any time. Not in a forked child: reading it there
        ends that. Asked again it gives the same views, and tries again what could not be had.
        """
        within = self.within(deadline)
        self._ns.link.check_usable()
        if not self._is_live() or self._pinned is None:
            return [None] * len(self._keys)
        held = [index for index, code in enumerate(self._codes) if code == GetCode.HIT]
        self._views.look(self._pinned, held, lossy_ok=lossy_ok)
        return await self._views.complete(lossy_ok=lossy_ok, deadline=within)

    async def tensors(
        self, *, lossy_ok: bool = False, deadline: Within = None
    ) -> list[dict[str, torch.Tensor] | None]:
        """Each page that is held as its segments by name, in the shape and dtype in which they are
        stored, over the memory of `views`: all that is said there holds. None where there is none.

        Never write to them: torch knows no read-only tensors, and a write to the daemon's memory
        ends the process (SIGSEGV). A copy to a GPU has to be over before `verify` is asked, so
        synchronise its stream. Raises MissingExtra without torch, and DeadlineExceeded where torch
        has to be loaded first and that takes too long.
        """
        within = self.within(deadline)
        torch = await self._ns.link.codec.run(load_torch, within)
        return [
            None if view is None else segments(torch, self._ns.layout, view)
            for view in await self.views(lossy_ok=lossy_ok, deadline=within)
        ]

    async def verify(self, *, deadline: Within = None) -> list[GetCode]:
        """What the views were worth until now, one code a key. To be asked when the engine's own
        copy out of them is done, and before `release`.

        HIT: what was copied is the page. The lease was held the whole time, by this side's
        monotonic clock, in the same session of a daemon that is still there; the namespace is
        current; and for a view in place, the bytes have the sum of the page's maker and after that
        its entry was still the same. (A copy was verified when it came.) CORRUPT: the sum is wrong
        and the entry is the same; the daemon is told. MISS: the entry is gone (deleted, condemned).
        STALE: the namespace was bumped. UNAVAILABLE: lease, session or daemon have ended. TIMEOUT:
        the deadline passed first; ask again. Otherwise the code with which the page was not held or
        not copied.

        It needs no call where shared memory is read, but reads all bytes once; without, it asks the
        daemon once. A page of which no view was asked for is judged by lease and namespace alone.
        It may be asked several times: a later answer is one for all the time up to then.
        """
        within = self.within(deadline)
        self._ns.link.check_usable()
        codes, ended = bytearray(self._codes), GetCode.UNAVAILABLE
        if GetCode.HIT in codes and self._is_live():
            assert self._pinned is not None, "there are leases"
            ended = await self._views.judge(codes, self._pinned, within)
        if not self._is_live():  # looked at last: it has to have been held until now
            ended = GetCode.UNAVAILABLE
        if ended is GetCode.HIT:
            await self._views.settle(codes, within)
        else:
            # Of all that was held: bytes and entries say nothing of a page once that has ended.
            codes = bytearray(self._codes.replace(bytes([GetCode.HIT]), bytes([ended])))
        return [GetCode(code) for code in codes]

    async def renew(self, ttl: float = 0.0, *, deadline: Within = None) -> None:
        """Moves the deadline to `ttl` seconds from now (0: the daemon's default).

        Raises LeaseExpired when it has ended already, and when the daemon does not answer. Where
        nothing was held from the start there is nothing to renew.
        """
        within, ttl_ms = self.within(deadline), milliseconds("ttl", ttl)
        if not self._lease_ids:
            if self._is_over:
                raise _expired("it was released")
            return
        assert self._pinned is not None, "there are leases"
        began = time.monotonic()
        try:
            with self._ns.link.guarded():
                codes = await self._ns.link.plane.renew(
                    self._pinned.session_id, self._lease_ids, ttl_ms, within
                )
        except UnknownHandle as error:
            self._lose()
            raise _expired(str(error)) from error
        if any(code != LeaseCode.HELD for code in codes):
            self._lose()
            raise _expired("it was not renewed in time")
        self._grant(self._renewed_ms(ttl_ms), began)

    async def release(self, *, deadline: Within = None) -> None:
        """Ends the lease. Ending it twice, or after the daemon ended it, is no error.

        Views that the caller still holds stay mapped, with whatever bytes come to be there.
        """
        within = self.within(deadline)
        self._views.drop()
        lease_ids, self._lease_ids = self._lease_ids, []
        self._is_over = True
        if not lease_ids or self._pinned is None:
            return
        try:
            await self._ns.link.plane.unpin(self._pinned.session_id, lease_ids, within)
        except (AvailabilityError, Busy, UnknownHandle):
            # It ends by itself at its deadline, or has ended with the session.
            return

    async def _give_back(self, taking: asyncio.Future[None]) -> None:
        try:
            await taking
        except KvtierError:
            pass  # nobody waits for it any more
        finally:
            await self.release()

    def within(self, deadline: Within = None) -> Deadline:
        """The deadline of a call of this lease that begins now."""
        return self._ns.link.deadline(self._deadline if deadline is None else deadline)

    def _present_codes(self) -> bytes:
        if not self._is_over and self._lease_ids and not self._is_held():
            return self._codes.replace(bytes([GetCode.HIT]), bytes([GetCode.UNAVAILABLE]))
        return self._codes

    def _is_live(self) -> bool:
        """Something is held, now and until it was asked."""
        return not self._is_over and bool(self._lease_ids) and self._is_held()

    def _is_held(self) -> bool:
        is_same_session = self._pinned and self._pinned.session_id == self._ns.link.session_id
        return bool(is_same_session) and time.monotonic() < self._ends_at

    def _grant(self, granted_ms: int, began: float) -> None:
        self._granted_ms, self._ends_at = granted_ms, began + granted_ms / 1000

    def _lose(self) -> None:
        self._granted_ms, self._ends_at = 0, 0.0

    def _renewed_ms(self, ttl_ms: int) -> int:
        """What the daemon grants for a wish, by its limits."""
        limits = self._ns.limits
        assert limits is not None, "known since the namespace was opened"
        wanted_s = ttl_ms / 1000 if ttl_ms else limits.lease_s_default
        return int(min(wanted_s, limits.lease_s_max) * 1000)


def _expired(why: str) -> LeaseExpired:
    return LeaseExpired(
        f"the lease has ended: {why}", remedy="take a new lease; treat its pages as not held"
    )
