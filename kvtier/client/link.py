"""One connection as its namespaces see it: the plane, the session, the limits, and whether calling
makes sense now.

Promise: a call on a closed connection or in a forked child is refused at once; calls to a daemon
that has stopped answering are refused at once after a few have waited in vain, so that an engine
does not pay its deadline again and again; a session that the daemon no longer knows is opened anew.
One shard of a family has one handle, however often it is opened: a daemon gives a session only so
many. How many are remembered is bounded.

Belongs to the event loop of its connection, but for `check_usable`, which any thread may call.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, TypeAlias

from kvtier.client.codec_thread import CodecThread
from kvtier.client.held_thread import HeldThread
from kvtier.client.local_attachment import LocalAttachment
from kvtier.client.settings import PlaneChoice, Settings, checked_seconds
from kvtier.client.unflushed import Unflushed
from kvtier.core.page import KEY_BYTES, GetCode
from kvtier.errors import (
    ClientClosed,
    DaemonUnavailable,
    DeadlineExceeded,
    ForkedClient,
    KvtierError,
    StaleGeneration,
    UnknownHandle,
)
from kvtier.packing.layout import Layout, Shard
from kvtier.transfer.planes.base import Plane
from kvtier.transfer.planes.deadline import Deadline, OwnDelay
from kvtier.transfer.planes.values import (
    Capabilities,
    Hints,
    NamespaceRequest,
    OpenedNamespace,
)

__all__ = ["Link", "Within", "locked"]

#: What a call may take: seconds, the moment where it ends, or None for the connection's setting.
Within: TypeAlias = float | Deadline | None

_CLOSE_S_MAX: Final = 0.5
#: Handles that are remembered, those used last. The daemon gives a session the same one again for
#: what it has open, so that forgetting one costs a call.
_HANDLES_MAX: Final = 256


class _Breaker:
    """Refuses calls for a while after several in a row ended without any answer.

    After the pause one call goes through to try; the others are refused until it has ended.
    """

    SILENT_CALLS_MAX: Final = 3
    PAUSE_S: Final = 1.0

    def __init__(self) -> None:
        self._silent_calls = 0
        self._tries_at = 0.0

    def check(self) -> None:
        if self._silent_calls < self.SILENT_CALLS_MAX:
            return
        now = time.monotonic()
        if now < self._tries_at:
            raise DaemonUnavailable(
                f"the daemon let {self._silent_calls} calls in a row wait in vain",
                remedy="compute the pages; the daemon is asked again within "
                f"{self.PAUSE_S:g} s, see whether it is stopped or overloaded",
            )
        self._tries_at = now + self.PAUSE_S

    def answered(self) -> None:
        self._silent_calls = 0

    def was_silent(self) -> None:
        self._silent_calls += 1
        self._tries_at = time.monotonic() + self.PAUSE_S


class Link:
    def __init__(self, plane: Plane, settings: Settings) -> None:
        self.plane = plane
        self.settings = settings
        self._breaker = _Breaker()
        self.pid = os.getpid()
        self._is_closed = False
        self._opening = asyncio.Lock()
        self._session_id = 0
        self._limits: tuple[int, Capabilities] | None = None  # with the boot that they are of
        self._handles: dict[tuple[bytes, Shard], OpenedNamespace] = {}
        self._background: set[asyncio.Task[None]] = set()
        self.codec = CodecThread()
        self.putting = HeldThread()
        self.local = LocalAttachment(
            settings.client_name, is_wanted=settings.plane is PlaneChoice.AUTO
        )
        self.unflushed = Unflushed()

    @property
    def session_id(self) -> int:
        """0 until a namespace was opened."""
        return self._session_id

    def check_usable(self) -> None:
        """Raises ForkedClient or ClientClosed."""
        if os.getpid() != self.pid:
            raise ForkedClient(
                f"this connection belongs to process {self.pid}, this is its child {os.getpid()}",
                remedy="fork before anything connects, and connect in the child: gRPC does not "
                "survive a fork. The parent's connection goes on working",
            )
        if self._is_closed:
            raise ClientClosed("the connection is closed", remedy="connect again")

    def deadline(self, seconds: Within) -> Deadline:
        """The deadline of a call that begins now, or began where `seconds` was made."""
        if isinstance(seconds, Deadline):
            return seconds
        own = self.settings.deadline_s
        return Deadline.after(own if seconds is None else checked_seconds(seconds))

    @contextmanager
    def watched(self, *, counts_silence: bool = True) -> Iterator[None]:
        """Around a call of the plane: learns from how it ends whether the daemon answers.

        A call that waits for a disk does not count silence: the daemon may well be answering others
        meanwhile.
        """
        try:
            yield
        except DeadlineExceeded as error:
            if counts_silence and not isinstance(error.__cause__, OwnDelay):
                self._breaker.was_silent()
            raise
        except (ClientClosed, DaemonUnavailable):
            raise
        except KvtierError:
            self._breaker.answered()
            raise
        self._breaker.answered()

    @contextmanager
    def guarded(self, *, counts_silence: bool = True) -> Iterator[None]:
        """As `watched`; raises DaemonUnavailable at once while the daemon does not answer."""
        self._breaker.check()
        with self.watched(counts_silence=counts_silence):
            yield

    async def open(
        self, layout: Layout, *, tenant: str, salt: bytes, fingerprint: bytes, deadline: Deadline
    ) -> tuple[OpenedNamespace, Capabilities]:
        """A handle of the present generation in the connection's session, which is opened if need
        be.
        """
        key = (fingerprint, layout.shard)
        async with locked(self._opening, deadline):
            with self.guarded():
                opened = await self._known(key, deadline)
                if opened is None:
                    opened = await self._open(layout, tenant, salt, fingerprint, deadline)
                    # At once: whatever fails from here on, the session and the handle are there.
                    if opened.session_id != self._session_id:
                        self._handles.clear()
                    self._session_id = opened.session_id
                    self._remember(key, opened)
                if self._limits is None or self._limits[0] != opened.boot_id:
                    self._limits = (opened.boot_id, await self.plane.capabilities(deadline))
                self.local.offered(self._limits[1].local_socket, opened.boot_id)
            return opened, self._limits[1]

    def _remember(self, key: tuple[bytes, Shard], opened: OpenedNamespace) -> None:
        """An engine that leaves a family for the next with every update of its weights would
        otherwise remember all of them.
        """
        self._handles[key] = opened
        while len(self._handles) > _HANDLES_MAX:
            del self._handles[next(iter(self._handles))]

    def forget(self, opened: OpenedNamespace) -> None:
        """The daemon does not know this handle any more, or calls it stale."""
        for key in [key for key, known in self._handles.items() if known is opened]:
            del self._handles[key]

    def stored(self, opened: OpenedNamespace, pages: int) -> None:
        """So many pages are stored under this handle and not known to be durable."""
        self.unflushed.stored(pages, opened.session_id)

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Goes on with `work`, for which nobody waits."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        """Ends the session if the daemon answers soon; its leases would end by themselves later."""
        if self._is_closed:
            return
        self._is_closed = True
        self.codec.close()
        self.putting.close()
        await self.local.close()
        try:
            if self._session_id:
                await self.plane.close_session(self._session_id, Deadline.after(_CLOSE_S_MAX))
        except KvtierError:
            pass
        finally:
            await self.plane.close()

    async def _known(self, key: tuple[bytes, Shard], deadline: Deadline) -> OpenedNamespace | None:
        """The handle that this key has already, if the daemon still answers for it."""
        opened = self._handles.get(key)
        if opened is None:
            return None
        try:
            # A handle is bound to its generation for life; any key tells whether that has ended.
            found = await self.plane.lookup(opened.handle, [bytes(KEY_BYTES)], Hints(), deadline)
            is_stale = GetCode.STALE in found.codes
        except (StaleGeneration, UnknownHandle):
            is_stale = True
        if is_stale:
            self.forget(opened)
            return None
        # Last again, among those that are used.
        self._handles[key] = self._handles.pop(key, opened)
        return opened

    async def _open(
        self, layout: Layout, tenant: str, salt: bytes, fingerprint: bytes, deadline: Deadline
    ) -> OpenedNamespace:
        def request(session_id: int) -> NamespaceRequest:
            return NamespaceRequest(
                session_id=session_id,
                tenant=tenant,
                salt=salt,
                layout=layout,
                client_name=self.settings.client_name,
                fingerprint=fingerprint,
            )

        if self._session_id:
            try:
                return await self.plane.open_namespace(request(self._session_id), deadline)
            except UnknownHandle:
                self._session_id = 0
        return await self.plane.open_namespace(request(0), deadline)


@asynccontextmanager
async def locked(lock: asyncio.Lock, deadline: Deadline) -> AsyncIterator[None]:
    """Holds `lock`. Raises DeadlineExceeded if others hold it for too long."""
    if lock.locked():
        try:
            await asyncio.wait_for(lock.acquire(), deadline.remaining())
        except TimeoutError:
            raise DeadlineExceeded(
                "another call is still opening the namespace",
                remedy="compute the page; raise `deadline` if this happens often",
            ) from None
    else:
        await lock.acquire()
    try:
        yield
    finally:
        lock.release()
