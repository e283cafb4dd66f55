"""`with kvtier.connect(url) as kv`: the client for code without asyncio.

A thin face over the asyncio client, which runs in one event loop in one daemon thread of the
connection.

Threads: every method may be called from any thread, several at once; calls run concurrently. Forks:
a connection belongs to the process that made it. In a child every call raises ForkedClient at once;
the parent goes on undisturbed. Connect anew in the child (and not through `fork` in the middle of a
call). Interrupts: a KeyboardInterrupt in a waiting call ends that call first, so that nothing is
written to the caller's memory afterwards. Exit: an interpreter that ends without `close()` closes
its connections within two seconds.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Coroutine, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from kvtier.client import aio
from kvtier.client.arguments import (
    GetArguments,
    PutArguments,
    checked_session,
    checked_traceparent,
)
from kvtier.client.batches import got
from kvtier.client.keys import KeyChain, looked_up
from kvtier.client.local_attachment import LocalState
from kvtier.client.namespace import AsyncNamespace
from kvtier.client.put_batches import done_put
from kvtier.client.quarantine import Quarantine
from kvtier.client.results import DeleteResult, GetResult, LookupResult, MoveResult, PutResult
from kvtier.client.runner import Runner
from kvtier.client.sync_lease import Lease
from kvtier.client.verifying import OnProgress, watch
from kvtier.core.page import Tier
from kvtier.packing.layout import Layout
from kvtier.transfer.planes.deadline import Deadline
from kvtier.transfer.planes.values import (
    Capabilities,
    FlushResult,
    PoolReport,
    Status,
    VerifyProgress,
)

if TYPE_CHECKING:
    from typing import Unpack

    from typing_extensions import Buffer

__all__ = ["Connection", "Lease", "Namespace", "connect"]

T = TypeVar("T")


def connect(
    url: str | None = None,
    *,
    deadline: float = aio.DEADLINE_S,
    verify: str = "always",
    client_name: str = "",
    plane: str = "auto",
) -> Connection:
    """As `kvtier.aio.connect`, for code without asyncio."""
    return Connection(
        aio.connect(url, deadline=deadline, verify=verify, client_name=client_name, plane=plane)
    )


def _shut_down(runner: Runner, connection: aio.AsyncConnection) -> None:
    # In a forked child loop and thread are the parent's.
    if os.getpid() == connection.link.pid:
        runner.stop(connection.close)


class Connection:
    """Made by `connect`. Usable from any thread; not in a forked child."""

    def __init__(self, connection: aio.AsyncConnection) -> None:
        self._async = connection
        self._runner = Runner()
        self._pool_names = set[str]()
        self._pool_names_lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _shut_down, self._runner, connection)

    def __enter__(self) -> Connection:
        self._async.link.check_usable()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"

    @property
    def url(self) -> str:
        return self._async.url

    @property
    def local(self) -> LocalState:
        """Whether shared memory is read; see AsyncConnection.local."""
        return self._async.local

    def namespace(
        self,
        layout: Layout,
        *,
        tenant: str = "default",
        salt: bytes = b"",
        deadline: float | None = None,
    ) -> Namespace:
        """See AsyncConnection.namespace."""
        within = self._within(deadline)
        opened = self._run(self._async.namespace(layout, tenant=tenant, salt=salt, deadline=within))
        return Namespace(self, opened)

    def status(self, *, deadline: float | None = None) -> Status:
        """How the daemon is doing. Raises DaemonUnavailable, DeadlineExceeded."""
        return self._run(self._async.status(deadline=self._within(deadline)))

    def capabilities(self, *, deadline: float | None = None) -> Capabilities:
        """What the daemon can do, and its limits. Raises DaemonUnavailable, DeadlineExceeded."""
        return self._run(self._async.capabilities(deadline=self._within(deadline)))

    def ping(self, *, deadline: float | None = None) -> float:
        """Seconds for a round trip. Raises DaemonUnavailable, DeadlineExceeded."""
        return self._run(self._async.ping(deadline=self._within(deadline)))

    def flush(self, *, deadline: float | None = None) -> FlushResult:
        """Waits until what this connection put survives the daemon; see AsyncConnection.flush."""
        return self._run(self._async.flush(deadline=self._within(deadline)))

    def report_pool(
        self, pool: PoolReport, *, is_gone: bool = False, deadline: float | None = None
    ) -> None:
        """Tells the daemon how full a device pool is; see AsyncConnection.report_pool."""
        within = self._within(deadline)
        self._run(self._async.report_pool(pool, is_gone=is_gone, deadline=within))

    def claim_pool_name(self, name: str) -> bool:
        """For who tells of a pool: False while another has the name. Give it back."""
        with self._pool_names_lock:
            is_free = name not in self._pool_names
            self._pool_names.add(name)
        return is_free

    def give_back_pool_name(self, name: str) -> None:
        """No error if nobody has it."""
        with self._pool_names_lock:
            self._pool_names.discard(name)

    def verify(
        self,
        tier: Tier | str,
        *,
        bytes_per_second: int = 0,
        on_progress: OnProgress | None = None,
        deadline: float | None = None,
    ) -> VerifyProgress:
        """Has a tier read and checked; see AsyncConnection.verify. `on_progress` is called in this
        thread.
        """
        self._async.link.check_usable()
        reports = self._async.reports(tier, bytes_per_second=bytes_per_second, deadline=deadline)
        return watch(self._run, reports, on_progress)

    @property
    def quarantine(self) -> Quarantine:
        """Copies that failed their checks: `list()`, `read(ref)`, `clear()`."""
        # Made anew: one that is kept here would keep this object alive with itself.
        return Quarantine(self, self._async.quarantine)

    def delete_namespace(
        self,
        layout: Layout,
        *,
        tenant: str = "default",
        salt: bytes = b"",
        deadline: float | None = None,
    ) -> int:
        """See AsyncConnection.delete_namespace."""
        within = self._within(deadline)
        return self._run(
            self._async.delete_namespace(layout, tenant=tenant, salt=salt, deadline=within)
        )

    def bump_namespace(
        self,
        layout: Layout,
        weights_revision: str = "",
        *,
        tenant: str = "default",
        salt: bytes = b"",
        expected: int | None = None,
        token: bytes | None = None,
        deadline: float | None = None,
    ) -> int:
        """See AsyncConnection.bump_namespace."""
        within = self._within(deadline)
        return self._run(
            self._async.bump_namespace(
                layout,
                weights_revision,
                tenant=tenant,
                salt=salt,
                expected=expected,
                token=token,
                deadline=within,
            )
        )

    def close(self) -> None:
        """Ends the session, its leases and the connection; closing twice is no error.

        Calls under way in other threads raise ClientClosed.
        """
        self._finalizer()

    def _within(self, deadline: float | None) -> Deadline:
        """The deadline of a call that begins now, in the caller's thread: waiting counts."""
        return self._async.link.deadline(deadline)

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            self._async.link.check_usable()
        except BaseException:
            coroutine.close()
            raise
        return self._runner.run(coroutine)


class Namespace:
    """Made by `connection.namespace()`. Usable from any thread; not in a forked child.

    Every method is that of AsyncNamespace, where it is described.
    """

    def __init__(self, connection: Connection, opened: AsyncNamespace) -> None:
        self._connection = connection
        self._async = opened

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.layout.model_id!r} of tenant {self.tenant!r}>"

    @property
    def layout(self) -> Layout:
        return self._async.layout

    @property
    def tenant(self) -> str:
        return self._async.tenant

    @property
    def fingerprint(self) -> bytes:
        return self._async.fingerprint

    @property
    def generation(self) -> int | None:
        """The namespace generation this object is bound to; None until it was opened once."""
        return self._async.generation

    @property
    def is_stale(self) -> bool:
        """Someone bumped or deleted the namespace: every outcome is STALE until `reopen`."""
        return self._async.is_stale

    def keys(
        self,
        token_ids: Sequence[int] | Any,
        parent: bytes | KeyChain | None = None,
        *,
        depth: int = 0,
    ) -> KeyChain:
        """One key for each full page of `token_ids`; see AsyncNamespace.keys."""
        return self._async.keys(token_ids, parent, depth=depth)

    def keys_from(self, hashes: Iterable[str | Buffer]) -> KeyChain:
        """Keys that an engine has already made, as hexadecimal text or 32 bytes."""
        return self._async.keys_from(hashes)

    def lookup(
        self,
        keys: Sequence[bytes],
        *,
        session: str = "",
        traceparent: str = "",
        lossy_ok: bool = True,
        deadline: float | None = None,
    ) -> LookupResult:
        """Which pages are there now; see AsyncNamespace.lookup."""
        within = self._connection._within(deadline)
        known = looked_up(keys)
        if session != "" or traceparent != "":
            session, traceparent = checked_session(session), checked_traceparent(traceparent)
        found = self._async.lookup_here(known, lossy_ok=lossy_ok)
        if found is not None:
            return found
        return self._run(
            self._async.lookup(
                known,
                session=session,
                traceparent=traceparent,
                lossy_ok=lossy_ok,
                deadline=within,
            )
        )

    def get(
        self,
        keys: Sequence[bytes],
        *,
        out: object = None,
        at: object = None,
        **options: Unpack[GetArguments],
    ) -> GetResult:
        """Pages into `out`, verified there; see AsyncNamespace.get. Only a HIT's bytes count."""
        # In this thread: the current stream of a GPU is this thread's.
        call = self._async.prepare_get(keys, out=out, at=at, **options)
        begun = self._async.begin_get(call)
        if not (begun.left or call.options.hints.says_return):
            return got(self._async, call, begun)
        return self._run(self._async.finish_get(call, begun))

    def put(
        self,
        keys: Sequence[bytes],
        pages: object,
        *,
        at: object = None,
        **options: Unpack[PutArguments],
    ) -> PutResult:
        """Stores pages; see AsyncNamespace.put. Do not write to them meanwhile."""
        call = self._async.prepare_put(keys, pages, at=at, **options)
        begun = self._async.begin_put(call)
        if not (begun.left or call.options.hints.says_return):
            return done_put(call, begun)
        return self._run(self._async.finish_put(call, begun))

    def prefetch(
        self,
        keys: Sequence[bytes],
        *,
        session: str = "",
        traceparent: str = "",
        deadline: float | None = None,
    ) -> MoveResult:
        """Starts bringing pages up to host memory; see AsyncNamespace.prefetch."""
        within = self._connection._within(deadline)
        return self._run(
            self._async.prefetch(keys, session=session, traceparent=traceparent, deadline=within)
        )

    def demote(self, keys: Sequence[bytes], *, deadline: float | None = None) -> MoveResult:
        """Starts copying pages down to NVMe; see AsyncNamespace.demote."""
        return self._run(self._async.demote(keys, deadline=self._connection._within(deadline)))

    def delete(self, keys: Sequence[bytes], *, deadline: float | None = None) -> DeleteResult:
        """Removes pages of this shard from every tier, durably."""
        return self._run(self._async.delete(keys, deadline=self._connection._within(deadline)))

    def lease(
        self, keys: Sequence[bytes], *, ttl: float = 0.0, deadline: float | None = None
    ) -> Lease:
        """`with ns.lease(keys) as held`: the pages that are there stay there meanwhile."""
        return Lease(self._connection, self._async.lease(keys, ttl=ttl, deadline=deadline))

    def bump(
        self,
        weights_revision: str = "",
        *,
        expected: int | None = None,
        token: bytes | None = None,
        deadline: float | None = None,
    ) -> int:
        """Makes every page of this namespace a miss; see AsyncNamespace.bump."""
        within = self._connection._within(deadline)
        return self._run(
            self._async.bump(weights_revision, expected=expected, token=token, deadline=within)
        )

    def reopen(self, weights_revision: str | None = None, *, deadline: float | None = None) -> int:
        """Binds this object to the present generation; see AsyncNamespace.reopen."""
        within = self._connection._within(deadline)
        return self._run(self._async.reopen(weights_revision, deadline=within))

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._connection._run(coroutine)
