"""What every plane does, whatever carries its bytes.

A plane moves bytes and codes; it decides nothing about pages. It raises KvtierError alone, keeps
the deadline it is given (a call returns soon after it, also when the other side has stopped),
repeats nothing by itself, and holds no reference to a caller's buffer once a call has returned or
raised.

A plane belongs to one event loop: all methods are called there.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from typing import Protocol

from kvtier.core.page import PageRef, Tier
from kvtier.transfer.planes.deadline import Deadline
from kvtier.transfer.planes.values import (
    Capabilities,
    FlushResult,
    GetQuery,
    Hints,
    LookupReply,
    NamespaceRequest,
    OpenedNamespace,
    OutgoingPage,
    PageSink,
    PinReply,
    PoolReport,
    PutOpening,
    PutReply,
    QuarantinedPage,
    Residency,
    Status,
    VerifyProgress,
)

__all__ = ["Plane"]


class Plane(Protocol):
    """`name` is what status and metrics call it; `keys` are 32 bytes each."""

    @property
    def name(self) -> str: ...

    async def open_namespace(
        self, request: NamespaceRequest, deadline: Deadline
    ) -> OpenedNamespace:
        """Raises LayoutError, NamespaceMismatch, UnknownHandle (the session), LimitExceeded."""

    async def close_session(self, session_id: int, deadline: Deadline) -> None: ...

    async def lookup(
        self,
        handle: int,
        keys: Sequence[bytes],
        hints: Hints,
        deadline: Deadline,
        *,
        is_exact: bool = False,
    ) -> LookupReply:
        """With `is_exact` pages of which the best copy is lossy are misses."""

    async def get(self, query: GetQuery, sink: PageSink, deadline: Deadline) -> None:
        """Delivers to `sink`. When it raises, pages that were completed before stay so."""

    async def put(
        self, opening: PutOpening, pages: AsyncIterable[OutgoingPage], deadline: Deadline
    ) -> PutReply:
        """Takes `pages` one at a time as they are sent. When it raises, nothing is known of any
        page.
        """

    async def delete(self, handle: int, keys: Sequence[bytes], deadline: Deadline) -> bytes:
        """DeleteCodes"""

    async def pin(
        self, handle: int, keys: Sequence[bytes], ttl_ms: int, deadline: Deadline
    ) -> PinReply: ...

    async def renew(
        self, session_id: int, lease_ids: Sequence[int], ttl_ms: int, deadline: Deadline
    ) -> bytes:
        """LeaseCodes"""

    async def unpin(self, session_id: int, lease_ids: Sequence[int], deadline: Deadline) -> bytes:
        """LeaseCodes"""

    async def prefetch(
        self, handle: int, keys: Sequence[bytes], hints: Hints, deadline: Deadline
    ) -> bytes:
        """GetCodes; the movement goes on after the answer."""

    async def expect(
        self, handle: int, key: bytes, returns_after_ms: int | None, deadline: Deadline
    ) -> bool:
        """When the conversation that this page was the last one of comes back (None: never).
        False: nobody heeds that."""

    async def demote(self, handle: int, keys: Sequence[bytes], deadline: Deadline) -> bytes:
        """GetCodes; the movement goes on after the answer."""

    async def flush(self, session_id: int, deadline: Deadline) -> FlushResult:
        """Raises UnknownHandle (the session)."""

    async def report_pool(
        self, session_id: int, pool: PoolReport, *, is_gone: bool, deadline: Deadline
    ) -> None:
        """Raises UnknownHandle (the session), LimitExceeded."""

    async def bump(
        self,
        fingerprint: bytes,
        *,
        expected: int,
        weights_revision: str,
        token: bytes,
        deadline: Deadline,
    ) -> int:
        """The new generation. Raises GenerationConflict, UnknownNamespace."""

    async def delete_namespace(self, fingerprint: bytes, deadline: Deadline) -> int:
        """Pages deleted. Raises UnknownNamespace."""

    async def capabilities(self, deadline: Deadline) -> Capabilities: ...

    async def status(self, deadline: Deadline) -> Status: ...

    def verify(
        self, tier: Tier, bytes_per_second: int, *, silence_s: float
    ) -> AsyncGenerator[VerifyProgress, None]:
        """The daemon's reports, as they come; closing the generator ends the call. It may take any
        time in all: DeadlineExceeded when the daemon says nothing for `silence_s`. Raises Busy.
        """

    def watch(
        self, fingerprint: bytes, deadline: Deadline, *, silence_s: float | None = None
    ) -> AsyncGenerator[Residency, None]:
        """What is there of a family, then every change, in order and without a gap; closing the
        generator ends the call. `deadline` is for all until SNAPSHOT_END, after that it may take
        any time. Raises Busy when the reader falls behind, DaemonUnavailable when the daemon goes,
        or when something was lost; DeadlineExceeded when it gives no sign of life for `silence_s`.
        """

    async def list_quarantine(self, deadline: Deadline) -> tuple[QuarantinedPage, ...]:
        """Oldest first."""

    async def read_quarantine(self, ref: PageRef, deadline: Deadline) -> bytes:
        """The whole record: header block and payload."""

    async def clear_quarantine(self, refs: Sequence[PageRef], deadline: Deadline) -> int:
        """How many slots were freed. Without refs: all of them."""

    async def close(self) -> None:
        """Ends calls under way with ClientClosed. Closing twice is no error."""
