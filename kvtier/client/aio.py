"""`async with kvtier.aio.connect(url) as kv`: the client for asyncio.

Belongs to one event loop, that of its first call, and to one process: in a forked child every call
raises ForkedClient at once and the parent is not disturbed. Packing, checksums and copies between a
GPU and the host run on the event loop, for some 0.1 ms a MiB (fp8: 2 to 4 ms a MiB).
"""

from __future__ import annotations

import os
import time
from types import TracebackType

from kvtier.client.link import Link, Settings
from kvtier.client.namespace import AsyncNamespace
from kvtier.config import DaemonConfig
from kvtier.packing.layout import Layout
from kvtier.transfer.planes.grpc import GrpcPlane
from kvtier.transfer.planes.values import Capabilities, Status

__all__ = ["DEADLINE_S", "AsyncConnection", "connect"]

#: What a call may take unless the connection or the call says otherwise.
DEADLINE_S = 1.0


def connect(
    url: str | None = None,
    *,
    deadline: float = DEADLINE_S,
    verify: str = "always",
    client_name: str = "",
) -> AsyncConnection:
    """A connection to the daemon at `url`: unix:///path or grpc://127.0.0.1:port.

    Without `url` it is where a daemon of this user listens by default. Nothing is sent yet, so it
    does not matter whether the daemon runs. `deadline` in seconds is for each call, 60 at most.
    `verify` is "always", "sampled" or "off": whether a get compares checksums. `client_name` is
    shown in the daemon's status. Raises InvalidConfigValue, NotImplementedYet.
    """
    return AsyncConnection(
        DaemonConfig().listen[0] if url is None else url,
        Settings.of(
            deadline=deadline, verify=verify, client_name=client_name or f"pid {os.getpid()}"
        ),
    )


class AsyncConnection:
    """Made by `connect`. `url` is where the daemon is."""

    def __init__(self, url: str, settings: Settings) -> None:
        self.url = url
        self._plane = GrpcPlane(url)
        self.link = Link(self._plane, settings)

    async def __aenter__(self) -> AsyncConnection:
        self.link.check_usable()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"

    async def namespace(
        self,
        layout: Layout,
        *,
        tenant: str = "default",
        salt: bytes = b"",
        deadline: float | None = None,
    ) -> AsyncNamespace:
        """The namespace of `layout`, opened now if the daemon is there, else by the first call that
        finds it.

        Raises LayoutError for a layout that cannot be stored and NamespaceMismatch, naming the
        field, when the daemon has another shard cut or other weights for it.
        """
        self.link.check_usable()
        ns = AsyncNamespace(self.link, layout, tenant=tenant, salt=salt)
        await ns.open(self.link.deadline(deadline))
        return ns

    async def status(self, *, deadline: float | None = None) -> Status:
        """How the daemon is doing. Raises DaemonUnavailable, DeadlineExceeded."""
        self.link.check_usable()
        with self.link.watched():
            return await self._plane.status(self.link.deadline(deadline))

    async def capabilities(self, *, deadline: float | None = None) -> Capabilities:
        """What the daemon can do, and its limits. Raises DaemonUnavailable, DeadlineExceeded."""
        self.link.check_usable()
        with self.link.watched():
            return await self._plane.capabilities(self.link.deadline(deadline))

    async def ping(self, *, deadline: float | None = None) -> float:
        """Seconds for a round trip. Raises DaemonUnavailable, DeadlineExceeded."""
        began = time.monotonic()
        await self.capabilities(deadline=deadline)
        return time.monotonic() - began

    async def delete_namespace(
        self,
        layout: Layout,
        *,
        tenant: str = "default",
        salt: bytes = b"",
        deadline: float | None = None,
    ) -> int:
        """Deletes a namespace and all its pages, durably; how many. Raises UnknownNamespace."""
        self.link.check_usable()
        within = self.link.deadline(deadline)
        with self.link.watched():
            return await self._plane.delete_namespace(layout.fingerprint(tenant, salt), within)

    async def close(self) -> None:
        """Ends the session, its leases and the connection; calls under way raise ClientClosed."""
        if os.getpid() == self.link.pid:
            await self.link.close()
