"""`async with kvtier.aio.connect(url) as kv`: the client for asyncio.

Belongs to one event loop, that of its first call, and to one process: in a forked child every call
raises ForkedClient at once and the parent is not disturbed. Checksums and copies between a GPU and
the host run on the event loop, for some 0.1 ms a MiB; fp8 packing (0.3 to 4 ms a MiB) runs in
a thread of the connection.

A `deadline` is in seconds, or a kvtier.transfer.planes.deadline.Deadline that began elsewhere.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType

from kvtier.client.flushing import flush
from kvtier.client.generations import bump_family
from kvtier.client.link import Link, Within
from kvtier.client.local_attachment import LocalState
from kvtier.client.namespace import AsyncNamespace
from kvtier.client.quarantine import AsyncQuarantine
from kvtier.client.settings import Settings
from kvtier.client.verifying import NOTHING_READ, OnProgress, reports
from kvtier.core.page import Tier
from kvtier.packing.layout import Layout
from kvtier.transfer.planes.address import default_url
from kvtier.transfer.planes.values import (
    Capabilities,
    FlushResult,
    PoolReport,
    Residency,
    Status,
    VerifyProgress,
)

__all__ = ["DEADLINE_S", "AsyncConnection", "connect"]

#: What a call may take unless the connection or the call says otherwise.
DEADLINE_S = 1.0


def connect(
    url: str | None = None,
    *,
    deadline: float = DEADLINE_S,
    verify: str = "always",
    client_name: str = "",
    plane: str = "auto",
) -> AsyncConnection:
    """A connection to the daemon at `url`: unix:///path or grpc://127.0.0.1:port.

    Without `url` it is where a daemon of this user listens by default. Nothing is sent yet, so it
    does not matter whether the daemon runs. `deadline` in seconds is for each call, 60 at most.
    `verify` is "always", "sampled" or "off": whether a get compares checksums. `client_name` is
    shown in the daemon's status. `plane` is "auto" (lookups and gets read the daemon's shared
    memory where it offers that to this process, all else goes over gRPC) or "grpc". Raises
    InvalidConfigValue, NotImplementedYet.
    """
    return AsyncConnection(
        default_url() if url is None else url,
        Settings.of(
            deadline=deadline,
            verify=verify,
            client_name=client_name or f"pid {os.getpid()}",
            plane=plane,
        ),
    )


class AsyncConnection:
    """Made by `connect`. `url` is where the daemon is."""

    def __init__(self, url: str, settings: Settings) -> None:
        # Here, because it loads grpc and protobuf: who only imports the client need not wait.
        from kvtier.transfer.planes.grpc import GrpcPlane

        self.url = url
        self._plane = GrpcPlane(url)
        self.link = Link(self._plane, settings)
        self._quarantine = AsyncQuarantine(self.link)

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

    @property
    def local(self) -> LocalState:
        """Whether this connection reads the daemon's shared memory, why not, and how often it did.

        It begins beside the first calls, which go over gRPC until it is there.
        """
        return self.link.local.state

    async def namespace(
        self,
        layout: Layout,
        *,
        tenant: str = "default",
        salt: bytes = b"",
        deadline: Within = None,
    ) -> AsyncNamespace:
        """The namespace of `layout`, opened now if the daemon is there, else by the first call that
        finds it.

        Raises LayoutError for a layout that cannot be stored and NamespaceMismatch, naming the
        field, when the daemon has another shard cut or other weights for it.
        """
        within = self.link.deadline(deadline)
        self.link.check_usable()
        ns = AsyncNamespace(self.link, layout, tenant=tenant, salt=salt)
        await ns.open(within)
        return ns

    async def status(self, *, deadline: Within = None) -> Status:
        """How the daemon is doing. Raises DaemonUnavailable, DeadlineExceeded."""
        within = self.link.deadline(deadline)
        self.link.check_usable()
        with self.link.watched():
            return await self._plane.status(within)

    async def capabilities(self, *, deadline: Within = None) -> Capabilities:
        """What the daemon can do, and its limits. Raises DaemonUnavailable, DeadlineExceeded."""
        within = self.link.deadline(deadline)
        self.link.check_usable()
        with self.link.watched():
            return await self._plane.capabilities(within)

    async def ping(self, *, deadline: Within = None) -> float:
        """Seconds for a round trip. Raises DaemonUnavailable, DeadlineExceeded."""
        began = time.monotonic()
        await self.capabilities(deadline=deadline)
        return time.monotonic() - began

    async def flush(self, *, deadline: Within = None) -> FlushResult:
        """Waits until every page that this connection has put survives the daemon, or turns out not
        to. How many of those since the flush before do, and of how many that cannot be said.

        Disks take their time: give it a `deadline` of seconds. It raises DeadlineExceeded,
        DaemonUnavailable and the like, and can then be called again for the same pages.
        """
        within = self.link.deadline(deadline)
        self.link.check_usable()
        return await flush(self.link, within)

    async def report_pool(
        self, pool: PoolReport, *, is_gone: bool = False, deadline: Within = None
    ) -> None:
        """Tells the daemon how full a device pool of this engine is; status, metrics and Watch show
        it until `is_gone`, or the session's end. kvtier.client.device.PoolReporter does it by
        itself. Raises UnknownHandle while no namespace is open, LimitExceeded, and when the daemon
        does not answer.
        """
        within = self.link.deadline(deadline)
        self.link.check_usable()
        with self.link.guarded():
            await self._plane.report_pool(
                self.link.session_id, pool, is_gone=is_gone, deadline=within
            )

    async def verify(
        self,
        tier: Tier | str,
        *,
        bytes_per_second: int = 0,
        on_progress: OnProgress | None = None,
        deadline: float | None = None,
    ) -> VerifyProgress:
        """Has the daemon read every page of `tier` ("host" or "nvme") and check every byte; what it
        came to. Corrupt pages are taken out, so that no get finds them.

        `bytes_per_second` 0 is the daemon's own pace. `on_progress` is called with each report. It
        takes as long as it takes: `deadline` is how many seconds the daemon may be silent between
        two reports (by default 120). Raises Busy while another one is under way, InvalidInput for a
        tier that the daemon does not have, and when the daemon does not answer.
        """
        last = NOTHING_READ
        given = self.reports(tier, bytes_per_second=bytes_per_second, deadline=deadline)
        async with aclosing(given) as progress:
            async for last in progress:
                if on_progress is not None:
                    on_progress(last)
        return last

    def reports(
        self, tier: Tier | str, *, bytes_per_second: int = 0, deadline: float | None = None
    ) -> AsyncGenerator[VerifyProgress, None]:
        """The reports of a `verify` as they come. Closing the generator ends it."""
        return reports(self.link, tier, bytes_per_second=bytes_per_second, deadline=deadline)

    async def watch(
        self, fingerprint: bytes, *, deadline: Within = None, silence: float | None = None
    ) -> AsyncGenerator[Residency, None]:
        """What is there of the family with this `fingerprint`, then every change, in order.

        It goes on until the generator is closed. It raises Busy when the reader falls behind, and
        DaemonUnavailable or DeadlineExceeded when the daemon goes, is silent on its connection for
        some twenty seconds, or has not told all that is there within `deadline`: then nothing is
        known any more, and watching again begins with what is there. With `silence` the daemon is
        asked for signs of life, and DeadlineExceeded is raised when it has given none for so many
        seconds: it may still be there, stopped.
        """
        within = self.link.deadline(deadline)
        self.link.check_usable()
        async with aclosing(self._plane.watch(fingerprint, within, silence_s=silence)) as events:
            async for event in events:
                yield event

    @property
    def quarantine(self) -> AsyncQuarantine:
        """Copies that failed their checks: `list()`, `read(ref)`, `clear()`."""
        return self._quarantine

    async def delete_namespace(
        self,
        layout: Layout,
        *,
        tenant: str = "default",
        salt: bytes = b"",
        deadline: Within = None,
    ) -> int:
        """Deletes a namespace and all its pages, durably; how many. Raises UnknownNamespace."""
        within = self.link.deadline(deadline)
        self.link.check_usable()
        with self.link.watched():
            return await self._plane.delete_namespace(layout.fingerprint(tenant, salt), within)

    async def bump_namespace(
        self,
        layout: Layout,
        weights_revision: str = "",
        *,
        tenant: str = "default",
        salt: bytes = b"",
        expected: int | None = None,
        token: bytes | None = None,
        deadline: Within = None,
    ) -> int:
        """As AsyncNamespace.bump, for whoever cannot open the namespace: after somebody bumped it
        to "r2", `bump_namespace(layout, "r1")` gives it back to those who open it with "r1".
        Without `expected` it ends the present generation.
        """
        within = self.link.deadline(deadline)
        self.link.check_usable()
        return await bump_family(
            self.link,
            layout.fingerprint(tenant, salt),
            weights_revision=weights_revision,
            expected=expected,
            token=token,
            deadline=within,
        )

    async def close(self) -> None:
        """Ends the session, its leases and the connection; calls under way raise ClientClosed."""
        if os.getpid() == self.link.pid:
            await self.link.close()
