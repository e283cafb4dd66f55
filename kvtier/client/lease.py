"""A lease: pages that stay where they are while it is held.

Over grpc the bytes are still copies: the pages are pinned first and then fetched, so that none of
them can be evicted between a lookup and its get. A lease ends with its `with` block, at its
deadline unless renewed, or with the connection: a daemon closes the session of a client that makes
no call for `session_ttl_s` of its capabilities, so renew a lease that is held for long.

Belongs to the event loop of its connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvtier.client.arguments import GetCall, milliseconds
from kvtier.client.batches import get, keys_per_call
from kvtier.client.results import GetResult, leading_run
from kvtier.core.page import Codec, GetCode, LeaseCode
from kvtier.errors import AvailabilityError, Busy, LeaseExpired, StaleGeneration, UnknownHandle
from kvtier.packing._torch import load_torch
from kvtier.transfer.planes.deadline import Deadline
from kvtier.transfer.planes.values import OpenedNamespace, PinReply

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
        self._session_id = 0
        self._codes = bytes([GetCode.UNAVAILABLE]) * len(keys)
        self._granted_ms = 0

    @property
    def reasons(self) -> list[GetCode]:
        """The outcome of each key: HIT is held."""
        return [GetCode(code) for code in self._codes]

    @property
    def prefix(self) -> int:
        """How many keys from the first on are held."""
        return leading_run(self._codes, GetCode.HIT)

    @property
    def ttl(self) -> float:
        """Seconds that the daemon grants from taking or renewing on; 0 if nothing is held."""
        return self._granted_ms / 1000

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

    async def take(self) -> None:
        """Pins the pages. A daemon that does not answer leaves every key UNAVAILABLE or TIMEOUT."""
        deadline = self._ns.link.deadline(self._deadline)
        codes = b""

        async def send(opened: OpenedNamespace) -> PinReply:
            assert self._ns.limits is not None, "known since the namespace was opened"
            some = self._keys[len(codes) : len(codes) + keys_per_call(self._ns.limits)]
            self._session_id = opened.session_id
            return await self._ns.link.plane.pin(opened.handle, some, self._ttl_ms, deadline)

        failed = GetCode.UNAVAILABLE
        try:
            while len(codes) < len(self._keys):
                reply = await self._ns.call(send, deadline)
                codes += reply.codes
                if reply.lease_id:
                    self._lease_ids.append(reply.lease_id)
                    self._granted_ms = reply.ttl_ms
        except StaleGeneration:
            failed = GetCode.STALE
        except Busy:
            failed = GetCode.BUSY
        except TimeoutError:
            failed = GetCode.TIMEOUT
        except (AvailabilityError, UnknownHandle):
            self._ns.link.check_usable()
        self._codes = codes + bytes([failed]) * (len(self._keys) - len(codes))

    async def fetch(self) -> GetResult:
        """Copies of the held pages; `result.pages` has None where nothing is held any more."""
        deadline = self._ns.link.deadline(self._deadline)
        call = GetCall.of(self._ns.layout, self._keys, None, None, {})
        return await get(self._ns, call, deadline)

    async def pages(self) -> Sequence[bytearray | None]:
        """The raw bytes of each page (a copy over grpc), None where it is not held."""
        return (await self.fetch()).pages

    async def tensors(self) -> list[dict[str, torch.Tensor] | None]:
        """Each page as its segments by name, in the shape and dtype in which they are stored.

        None where a page is not held. Over grpc they are copies. Raises MissingExtra without torch.
        """
        torch = load_torch()
        spans = self._ns.layout.spans(Codec.RAW)

        def segments(page: bytearray) -> dict[str, Any]:
            flat = torch.frombuffer(page, dtype=torch.uint8)
            return {
                span.segment.name: flat[span.offset : span.offset + span.nbytes]
                .view(getattr(torch, span.dtype))
                .reshape(span.shape)
                for span in spans
            }

        return [None if page is None else segments(page) for page in await self.pages()]

    async def renew(self, ttl: float = 0.0) -> None:
        """Moves the deadline to `ttl` seconds from now (0: the daemon's default).

        Raises LeaseExpired when it has ended already, and when the daemon does not answer.
        """
        deadline = self._ns.link.deadline(self._deadline)
        if self._lease_ids:
            try:
                with self._ns.link.guarded():
                    codes = await self._ns.link.plane.renew(
                        self._session_id, self._lease_ids, milliseconds("ttl", ttl), deadline
                    )
            except UnknownHandle as error:
                raise _expired(str(error)) from error
            if any(code != LeaseCode.HELD for code in codes):
                raise _expired("it was not renewed in time")

    async def release(self) -> None:
        """Ends the lease. Ending it twice, or after the daemon ended it, is no error."""
        lease_ids, self._lease_ids = self._lease_ids, []
        if not lease_ids:
            return
        deadline: Deadline = self._ns.link.deadline(self._deadline)
        try:
            await self._ns.link.plane.unpin(self._session_id, lease_ids, deadline)
        except (AvailabilityError, Busy, UnknownHandle):
            # It ends by itself at its deadline, or has ended with the session.
            return


def _expired(why: str) -> LeaseExpired:
    return LeaseExpired(
        f"the lease has ended: {why}", remedy="take a new lease; treat its pages as not held"
    )
