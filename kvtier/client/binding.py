"""The handle behind a namespace object.

Promise: it is opened when it is needed and opened again, once a call, after a restart; when the
namespace was bumped or deleted by someone else it is not, and everything is STALE until the object
is released from its generation.

Belongs to the connection's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from kvtier.client.link import Link, locked
from kvtier.core.page import GetCode
from kvtier.errors import (
    AvailabilityError,
    LayoutError,
    NamespaceMismatch,
    StaleGeneration,
    UnknownHandle,
)
from kvtier.packing.layout import Layout
from kvtier.transfer.planes.deadline import Deadline
from kvtier.transfer.planes.values import Capabilities, OpenedNamespace

__all__ = ["Binding"]

T = TypeVar("T")


class Binding:
    """`layout`, `tenant` and `salt` say which namespace it is."""

    def __init__(self, link: Link, layout: Layout, *, tenant: str, salt: bytes) -> None:
        self._link = link
        self._opening = asyncio.Lock()
        self._opened: OpenedNamespace | None = None
        self._limits: Capabilities | None = None
        self._generation: int | None = None
        self._is_stale = False
        self.layout = layout
        self.tenant = tenant
        self.salt = bytes(salt)
        self.fingerprint = layout.fingerprint(tenant, self.salt)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.layout.model_id!r} of tenant {self.tenant!r}>"

    @property
    def generation(self) -> int | None:
        """The namespace generation this object is bound to; None until it was opened once."""
        return self._generation

    @property
    def is_stale(self) -> bool:
        """Someone bumped or deleted the namespace: every outcome is STALE until `reopen`."""
        return self._is_stale

    async def open(self, deadline: Deadline) -> None:
        """Opens the handle now if the daemon is there. Raises LayoutError, NamespaceMismatch."""
        try:
            await self._attached(deadline)
        except AvailabilityError:
            self._link.check_usable()

    @property
    def link(self) -> Link:
        return self._link

    @property
    def opened(self) -> OpenedNamespace | None:
        """The present handle. Any thread may ask."""
        return self._opened

    @property
    def limits(self) -> Capabilities | None:
        """The daemon's limits, None until the namespace was opened once."""
        return self._limits

    async def call(
        self,
        send: Callable[[OpenedNamespace], Awaitable[T]],
        deadline: Deadline,
        *,
        counts_silence: bool = True,
    ) -> T:
        """`send` with a handle; once more with a new one if the daemon does not know it.

        `counts_silence` is that of Link.watched.
        """
        opened = await self._attached(deadline)
        try:
            return await self._sent(send, opened, counts_silence)
        except UnknownHandle:
            self._drop(opened)
            return await self._sent(send, await self._attached(deadline), counts_silence)

    def learn(self, code: int, opened: OpenedNamespace) -> None:
        """Looks at an outcome that the daemon gave for a handle: STALE is for good, unless this
        object was reopened meanwhile.
        """
        if code == GetCode.STALE:
            self._link.forget(opened)
            if (opened.fingerprint, opened.generation) == (self.fingerprint, self._generation):
                self._end()

    async def _sent(
        self,
        send: Callable[[OpenedNamespace], Awaitable[T]],
        opened: OpenedNamespace,
        counts_silence: bool,
    ) -> T:
        try:
            with self._link.guarded(counts_silence=counts_silence):
                return await send(opened)
        except StaleGeneration:
            self.learn(GetCode.STALE, opened)
            raise

    async def _attached(self, deadline: Deadline) -> OpenedNamespace:
        if self._opened is not None:
            return self._opened
        async with locked(self._opening, deadline):
            if self._opened is None:
                if self._is_stale:
                    raise _stale()
                self._opened = await self._open(deadline)
            return self._opened

    async def _open(self, deadline: Deadline) -> OpenedNamespace:
        fingerprint = self.fingerprint
        try:
            opened, self._limits = await self._link.open(
                self.layout,
                tenant=self.tenant,
                salt=self.salt,
                fingerprint=fingerprint,
                deadline=deadline,
            )
        except NamespaceMismatch:
            if self._generation is None:
                raise
            # Bumped to other weights while the daemon restarted.
            self._end()
            raise _stale() from None
        if fingerprint != self.fingerprint:
            raise _stale()  # reopened with other weights meanwhile
        if opened.raw_bytes != self.layout.raw_bytes or opened.fingerprint != fingerprint:
            raise LayoutError(
                f"the daemon makes {opened.raw_bytes} bytes a page of this layout, "
                f"this client {self.layout.raw_bytes}",
                remedy="use a client and daemon of the same version",
            )
        if self._generation not in (None, opened.generation):
            self._end()
            raise _stale()
        self._generation = opened.generation
        return opened

    def _release(self, weights_revision: str | None) -> None:
        """Bound to no generation from now on; with a revision, to the family of those weights."""
        if weights_revision is not None:
            self.layout = replace(self.layout, weights_revision=weights_revision)
            self.fingerprint = self.layout.fingerprint(self.tenant, self.salt)
        self._opened, self._generation, self._is_stale = None, None, False

    def _drop(self, opened: OpenedNamespace) -> None:
        self._link.forget(opened)
        if self._opened is opened:
            self._opened = None

    def _end(self) -> None:
        self._opened, self._is_stale = None, True


def _stale() -> StaleGeneration:
    return StaleGeneration(
        "the namespace was bumped since it was opened",
        remedy="load the present weights if they changed, then call ns.reopen()",
    )
